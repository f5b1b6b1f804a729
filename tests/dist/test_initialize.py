"""Ranks compare their configs before they create the first process group of the layout."""

import io
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lite.data import identity
from megatron_lite.errors import ConfigError
from megatron_lite.parallel.context import Group
from megatron_lite.training import initialize
from megatron_lite.training.initialize import (
    finalize_megatron,
    initialize_megatron,
    join_process_group,
    ranks_per_host,
)
from tests.helpers.corpora import write_corpus
from tests.helpers.tiny import tiny_config

INITIALIZE = "megatron_lite.training.initialize"


def initialized(changes_of_last: dict) -> str:
    """The config error of this rank when the last rank has a different config, or `initialized`."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        initialize_megatron(tiny_config("gpt", **(changes_of_last if is_last else {})))
        return "initialized"
    except ConfigError as error:
        return str(error)
    finally:
        finalize_megatron()


def test_a_config_that_differs_on_one_rank_is_an_error_on_all_ranks(ranks):
    """A layout that only one rank has would hang in the creation of groups."""
    here = socket.gethostname()
    assert ranks(2, initialized, {"optim__lr": 0.5, "parallel__tensor": 2}) == 2 * [
        f"rank 0 on {here} and rank 1 on {here} have different configs (parallel.tensor: 1 and 2, "
        "optim.lr: 0.005 and 0.5); give every machine the same file and the same overrides"
    ]


def test_nccl_without_a_gpu_is_an_error_on_one_rank_too():
    """Otherwise the setting would have no effect there, and fail on the cluster."""
    with pytest.raises(ConfigError, match=r"run\.backend is nccl, which needs GPUs, and this rank is on the cpu"):
        initialize_megatron(tiny_config("gpt", run__backend="nccl", run__device="cpu"))


@pytest.mark.parametrize("place", ["run__dir", "data__cache_dir", "checkpoint__load"])
def test_paths_in_the_config_may_differ_between_machines(ranks, place):
    """Machines may mount run, cache and checkpoint folders in different places."""
    assert ranks(2, initialized, {place: "/elsewhere"}) == 2 * ["initialized"]


def compared(folders: list[Path], overrides: dict, patches: dict[str, object]) -> tuple[str, str]:
    """The output and the config error of this rank in its folder; overrides and patches are for the last rank."""
    rank, out, before = dist.get_rank(), io.StringIO(), os.getcwd()
    is_last = rank == dist.get_world_size() - 1
    config = {"data__paths": "[corpus]", "data__tokenizer": "sentencepiece:model", **(overrides if is_last else {})}
    os.chdir(folders[rank])
    with ExitStack() as stack:
        for target, value in patches.items() if is_last else ():
            stack.enter_context(mock.patch(target, value))
        stack.enter_context(redirect_stdout(out))
        try:
            initialize_megatron(tiny_config("gpt", **config))
        except ConfigError as error:
            return out.getvalue(), str(error)
        finally:
            os.chdir(before)
            finalize_megatron()
    return out.getvalue(), ""


@pytest.fixture
def folders(tmp_path):
    """Two folders with equal copies of a corpus and a tokenizer."""
    for name in "ab":
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "corpus", [5, 3, 8])
        (tmp_path / name / "model").write_text("a tokenizer")
    return [tmp_path / "a", tmp_path / "b"]


def has_error(ranks, *arguments) -> str:
    """The error, equal on both ranks."""
    (first, error), (second, same) = ranks(2, compared, *arguments)
    assert error == same and not first and not second
    return error


def test_equal_copies_of_the_data_may_have_any_path(ranks, folders):
    """Hosts with disks of their own mount them where they like, and copy at different times."""
    for file in ("corpus.bin", "corpus.idx"):
        os.utime(folders[1] / file, (0, 0))
        (folders[1] / file).rename(folders[1] / f"moved.{file[-3:]}")
    (folders[1] / "model").rename(folders[1] / "renamed")
    moved = {"data__paths": f"[{folders[1]}/moved]", "data__tokenizer": "sentencepiece:renamed"}
    assert has_error(ranks, folders, moved, {}) == ""


def test_another_corpus_on_one_rank_is_an_error_that_names_host_and_file(ranks, folders):
    """Each rank opens its own data.paths: the stages of a pipeline would train on labels of other samples."""
    here = socket.gethostname()
    write_corpus(folders[1] / "corpus", [5, 3, 8], first_token=1)  # equal lengths, so an equal .idx
    error = has_error(ranks, folders, {}, {})
    assert error.startswith(
        f"rank 1 on {here} reads other contents than rank 0 on {here}: corpus.bin {{'bytes': 64, 'crc32': '"
    )
    assert "corpus.idx" not in error
    assert error.endswith("; copy the files of one host to the other, or read them from a shared disk")
    write_corpus(folders[1] / "corpus", [5, 8, 3])  # equal tokens, other documents
    error = has_error(ranks, folders, {}, {})
    assert ": corpus.idx {'sequences': 3, " in error and "corpus.bin" not in error
    (folders[1] / "corpus.bin").unlink()
    error = has_error(ranks, folders, {}, {})
    assert ": corpus.idx No such file or directory instead of corpus.idx {'sequences': 3, " in error


def test_other_weights_or_corpora_of_a_blend_on_one_rank_are_an_error(ranks, folders):
    error = has_error(ranks, folders, {"data__paths": "[corpus, corpus]"}, {})
    assert "corpus.idx {'sequences': 3, " in error and "instead of data.paths no more" in error
    error = has_error(ranks, folders, {"data__paths": "[2, corpus, 1, corpus]"}, {})
    assert ": data.paths weights [0.66" in error and "instead of data.paths weights None" in error


def test_another_tokenizer_or_version_on_one_rank_is_an_error(ranks, folders):
    """Their loss would look as usual; the version alone is equal in two checkouts."""
    (folders[1] / "model").write_text("b tokenizer")
    assert ": sentencepiece:model hash " in has_error(ranks, folders, {}, {})
    (folders[1] / "model").unlink()
    assert "model: no such tokenizer file instead of sentencepiece:model hash " in has_error(ranks, folders, {}, {})
    (folders[1] / "model").write_text("a tokenizer")
    error = has_error(ranks, folders, {}, {f"{INITIALIZE}.__version__": "0.0.1"})
    assert f": {initialize.PACKAGE} megatron_lite 0.0.1, sources " in error
    error = has_error(ranks, folders, {}, {f"{INITIALIZE}.sources_checksum": partial(str, "0badc0de")})
    assert f", sources 0badc0de instead of {initialize.PACKAGE} megatron_lite " in error


def test_another_build_of_torch_is_a_warning(ranks, folders):
    (out, error), (second, _) = ranks(2, compared, folders, {}, {"torch.version.cuda": "99.9"})
    assert (error, second) == ("", "") and out.startswith(" WARNING: the builds of torch differ: ")
    assert f"{torch.__version__} for 99.9 on {socket.gethostname()}; sums may be rounded differently" in out


def test_a_task_of_srun_without_a_rank_warns_at_its_start(ranks, folders):
    """With a run.dir for each task no lock stops the second run."""
    [(out, error)] = ranks(1, as_a_task, folders)
    assert error == "" and out.startswith(
        " WARNING: Each of the 2 tasks of srun (SLURM_STEP_NUM_TASKS) is a run of its"
    )


def as_a_task(folders: list[Path]) -> tuple[str, str]:
    names = ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    variables = {name: value for name, value in os.environ.items() if name not in names}
    with mock.patch.dict(os.environ, variables | {"SLURM_STEP_NUM_TASKS": "2"}, clear=True):
        return compared(folders, {}, {})


def test_one_rank_of_each_machine_reads_the_files_unless_paths_differ(ranks, folders):
    """Eight ranks of a host would read a corpus eight times, and thousands would send each other their paths."""
    machine, unknown = {"LOCAL_WORLD_SIZE": "2"}, {}
    assert ranks(2, files_read, folders[:1] * 2, machine) == [3, 0]
    assert ranks(2, files_read, folders[:1] * 2, unknown) == [3, 3]
    assert ranks(2, files_read, folders, machine) == [3, 3]


def files_read(folders: list[Path], variables: Mapping[str, str]) -> int:
    """The files whose content this rank reads as the rank of a launcher; no rank gathers anything."""
    calls = []
    checked = initialize.checksum

    def counting(*parts):
        calls.append(parts)
        return checked(*parts)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(initialize, "gather_objects", None))
        for module in (identity, initialize):
            stack.enter_context(mock.patch.object(module, "checksum", counting))
        stack.enter_context(mock.patch.dict(os.environ, {"LOCAL_RANK": str(dist.get_rank()), **variables}))
        assert compared(folders, {}, {}) == ("", "")
    return len(calls)


def hosts_of(cases: list[list[tuple[int, int]]]) -> list[int]:
    """The agreed number of ranks on a machine, where each rank has this LOCAL_RANK and LOCAL_WORLD_SIZE."""
    world, found = Group("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD), []
    for case in cases:
        local_rank, count = case[world.rank]
        variables = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(count)}
        with mock.patch.dict(os.environ, variables):
            found.append(ranks_per_host(world))
    return found


def test_machines_are_known_only_where_all_have_as_many_adjacent_ranks(ranks):
    """Ranks that disagree would create different groups and wait for each other."""
    cases = {
        "two machines": [(0, 2), (1, 2), (0, 2), (1, 2)],
        "one machine": [(rank, 4) for rank in range(4)],
        "three and one": [(0, 3), (1, 3), (2, 3), (0, 1)],
        "in turns": [(0, 2), (0, 2), (1, 2), (1, 2)],
        "one of them differs": [(0, 2), (1, 2), (0, 2), (0, 1)],
        "does not divide": [(0, 3), (1, 3), (2, 3), (0, 3)],
        "unknown": [(0, 0)] * 4,
    }
    assert ranks(4, hosts_of, list(cases.values())) == 4 * [[2, 4, 1, 1, 1, 1, 1]]


def test_restarts_by_torchrun_on_several_machines_raise_an_error(monkeypatch):
    """After the first lost rank, the others would try to connect to its old address for hours."""
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        join_process_group(torch.device("cpu"), 1.0, "gloo")
    message = str(raised.value)
    assert message.startswith("torchrun --max-restarts on several machines keeps old addresses; use `megatron-lite")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine" in message
    assert message.endswith("torchrun --rdzv-backend c10d")
