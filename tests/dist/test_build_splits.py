"""The ranks of a machine open the data together: one compares the checksums, and an error is raised by all."""

import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.load import load_config
from megatron_lite.data import index_cache
from megatron_lite.errors import DataError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.pretrain import build_splits
from megatron_lite.training.state import TrainState
from tests.helpers.corpora import write_corpus


def data_error(overrides: list[str], local_ranks: list[int]) -> str:
    config = load_config(None, overrides)
    ctx = ParallelContext.create(Grid(dp=dist.get_world_size()), torch.device("cpu"), 60.0)
    run = SimpleNamespace(config=config, ctx=ctx, state=TrainState(), origin={}, tokenizer=None)
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_ranks[ctx.rank])}),
        pytest.raises(DataError) as raised,
    ):
        build_splits(run)  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.parametrize("local_ranks, more", [([0, 1], ""), ([0, 0], " (1 more rank failed)")])
def test_all_ranks_raise_the_data_error_of_the_building_rank(ranks, tmp_path, local_ranks, more):
    """Otherwise the other ranks would wait in the barrier until train.comm_timeout."""
    texts = ranks(2, data_error, [f"data.paths={tmp_path}/missing"], local_ranks)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 0: {tmp_path}/missing.idx: no such file")
    assert texts[0].endswith(f"its path without .bin or .idx{more}")


def opened(config_of_rank: list[list[str]], ranks_per_host: int) -> tuple[int, list[int]]:
    """The checksums that this rank has computed, and its order of samples."""
    rank, calls = dist.get_rank(), []
    config = load_config(None, config_of_rank[rank])
    ctx = ParallelContext.create(Grid(dp=dist.get_world_size()), torch.device("cpu"), 60.0, ranks_per_host)
    run = SimpleNamespace(config=config, ctx=ctx, state=TrainState(), origin={}, tokenizer=None)
    counting = SimpleNamespace(crc32=lambda values: calls.append(1) or zlib.crc32(values))
    with (
        mock.patch.object(index_cache, "zlib", counting),
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank)}),
    ):
        train = build_splits(run).train  # type: ignore[arg-type]
    return len(calls), train.index.shuffle.tolist()  # type: ignore[union-attr]


def damage(cache: Path) -> None:
    """Exchange two samples of the order, as a broken disk or a writer without a lock could."""
    (path,) = cache.glob("*-shuffle.npy")
    content = bytearray(path.read_bytes())
    content[-8:] = content[-4:] + content[-8:-4]
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("ranks_per_host", "folders", "all_compare"), [(2, "aa", False), (1, "aa", True), (2, "ab", True)]
)
def test_one_rank_of_a_machine_finds_a_damaged_index_for_all(ranks, tmp_path, ranks_per_host, folders, all_compare):
    """Each of 8 ranks would read the index of a long run; without any, they would train in another order. A rank with
    another cache has it to itself, and on unknown machines each rank may have one."""
    corpus = write_corpus(tmp_path / "corpus", [40] * 30)
    overrides = ["data.split=[1, 0, 0]", "data.seq_length=16", "model.max_position_embeddings=16"]
    overrides += [f"data.paths=[{corpus}]", "train.iterations=5", "train.eval_iterations=0"]
    configs = [[*overrides, f"data.cache_dir={tmp_path / name}"] for name in folders]
    (built, order), (_, same) = ranks(2, opened, configs, ranks_per_host)
    assert same == order and built
    (first, _), (second, _) = ranks(2, opened, configs, ranks_per_host)
    assert (first, second) == (3, 3 * all_compare)
    for name in set(folders):
        damage(tmp_path / name)
    assert [found for _, found in ranks(2, opened, configs, ranks_per_host)] == [order] * 2
