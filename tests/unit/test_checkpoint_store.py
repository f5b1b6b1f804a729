"""Saving and loading in one process: bits, messages, and checkpoints after a failure at any step."""

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.contents import Contents
from megatron_lite.checkpoint.directory import TRACKER_FILE, iterations, read_latest
from megatron_lite.checkpoint.layout import Layout, dump_layout, read_layout
from megatron_lite.checkpoint.reshard import Move, rectangles
from megatron_lite.checkpoint.tensor_file import write_tensors
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, Shard
from tests.helpers.checkpoints import (
    CONFIG,
    TABLE,
    assert_complete,
    assert_same,
    contents,
    listed,
    load,
    one_process,
    save,
)
from tests.helpers.limits import PATIENCE

NAME = "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_saved_checkpoint_is_loaded_bit_for_bit(tmp_path, dtype):
    """A rounded moment or master would change the run after every resume."""
    ctx = one_process()
    saved, into = contents(ctx, 3, dtype), contents(ctx, -1, dtype)
    saved["weights"][NAME][0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    save(tmp_path, 3, ctx, **saved)
    loaded, _ = load(tmp_path, 3, ctx, **into)
    for name, tensor in saved["weights"].items():
        assert torch.equal(into["weights"][name].view(torch.uint8), tensor.view(torch.uint8))
    assert_same(into["optimizer_state"], saved["optimizer_state"])
    assert loaded.rng is not None and torch.equal(loaded.rng["cpu"], torch.full((5,), 30, dtype=torch.uint8))
    assert (loaded.layout.iteration, loaded.layout.state["loss_scale"], loaded.layout.config) == (3, 0.1, CONFIG)


def test_weights_load_into_parameters_without_optimizer_state(tmp_path):
    """Generation has no optimizer; a parameter that requires gradients is filled in place."""
    ctx = one_process()
    save(tmp_path, 1, ctx)
    params = {name: torch.nn.Parameter(tensor) for name, tensor in contents(ctx, -1)["weights"].items()}
    load(tmp_path, 1, ctx, weights=params, optimizer_state={})
    assert_same({name: p.detach() for name, p in params.items()}, contents(ctx, 1)["weights"])


def test_weights_are_a_plain_safetensors_file_by_name(tmp_path):
    """Anyone can open them without this package."""
    folder = save(tmp_path, 1, one_process())
    assert_same(load_file(folder / "mp_rank_00" / "model.safetensors"), contents(one_process(), 1)["weights"])
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == [
        "iter_0000001/layout.json",
        "iter_0000001/mp_rank_00/model.safetensors",
        "iter_0000001/mp_rank_00/optimizer_dp_000.safetensors",
        "iter_0000001/mp_rank_00/rng_host_00000.safetensors",
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_a_state_that_json_cannot_represent_is_an_error_before_the_tracker_changes(tmp_path):
    """Otherwise the newest checkpoint would be one that cannot be read."""
    save(tmp_path, 1, one_process())
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, 2, one_process(), state={"x": object()})
    assert read_latest(tmp_path) == 1


def test_saving_an_iteration_again_replaces_it(tmp_path):
    """A run reset to an older checkpoint saves the same iteration with other values."""
    ctx = one_process()
    for iteration, version in ((1, 1), (2, 2), (2, 7)):
        save(tmp_path, iteration, ctx, version=version)
    assert assert_complete(tmp_path, ctx, 2) == 7
    assert assert_complete(tmp_path, ctx, 1) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000001", "iter_0000002"]


def test_keep_is_the_number_of_newest_checkpoints_and_0_keeps_all(tmp_path):
    for iteration in (1, 2, 3, 4):
        save(tmp_path / "two", iteration, one_process(), keep=2)
        save(tmp_path / "all", iteration, one_process(), keep=0)
    assert iterations(tmp_path / "two") == [3, 4]
    assert iterations(tmp_path / "all") == [1, 2, 3, 4]


def test_pruning_never_deletes_the_saved_checkpoint_for_later_ones_of_an_abandoned_run(tmp_path):
    """After a reset to iteration 1, pruning by number alone would delete iteration 2."""
    ctx = one_process()
    for iteration in (1, 5, 6):
        save(tmp_path, iteration, ctx, keep=0)
    save(tmp_path, 2, ctx, keep=1)
    assert iterations(tmp_path) == [2, 5, 6] and read_latest(tmp_path) == 2


class Killed(BaseException):
    """The simulated end of the process. Handlers of Exception do not catch it."""


class Faults:
    """Counts the calls of a save that change the disk, and makes one fail before or after its effect."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int, error: BaseException, after: bool):
        self.calls, self.fail_at, self.error, self.after = 0, fail_at, error, after
        for module, name in [
            (os, "fsync"),
            (os, "rename"),
            (os, "replace"),
            (os, "mkdir"),
            (shutil, "rmtree"),
            (io, "open"),
        ]:
            patch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call):
        def counted(*args, **kwargs):
            if call is io.open and "w" not in (args[1] if len(args) > 1 else kwargs.get("mode", "r")):
                return call(*args, **kwargs)
            self.calls += 1
            if self.calls - 1 != self.fail_at:
                return call(*args, **kwargs)
            if self.after:
                with contextlib.suppress(OSError):  # an existing folder, which the caller allows
                    call(*args, **kwargs)
            raise self.error

        return counted


def steps_of_a_save(tmp_path: Path, iteration: int) -> int:
    """The number of calls of a save that `Faults` counts."""
    save(tmp_path / "count", 1, one_process())
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, -1, Killed(), after=False)
        save(tmp_path / "count", iteration, one_process(), keep=1)
    assert faults.calls > 15
    return faults.calls


@pytest.mark.parametrize("iteration", [1, 2], ids=["same iteration", "next iteration"])
@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_an_error_at_any_step_of_a_save_is_raised_and_loses_nothing(tmp_path, iteration, reason):
    """After any failure, the previous or the new checkpoint can be loaded, and the next save succeeds."""
    ctx, raised = one_process(), 0
    for step in range(steps_of_a_save(tmp_path, iteration)):
        root = tmp_path / f"{step}"
        save(root, 1, ctx)
        try:
            with pytest.MonkeyPatch.context() as patch:
                Faults(patch, step, OSError(reason, os.strerror(reason)), after=False)
                save(root, iteration, ctx, version=2, keep=1)
        except CheckpointError as error:
            raised += 1
            assert str(root) in str(error) and os.strerror(reason) in str(error)
            assert "checkpoints saved before are untouched" in str(error)
        latest = read_latest(root)
        assert latest is not None and assert_complete(root, ctx, latest) in (1, 2)
        save(root, 3, ctx, keep=1)
        assert assert_complete(root, ctx, 3) == 3
        assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["iter_0000003"]
    assert raised > 10


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("iteration", [1, 2], ids=["same iteration", "next iteration"])
def test_a_process_killed_at_any_step_of_a_save_leaves_a_complete_checkpoint(tmp_path, iteration, after):
    """Every step between two changes of the disk is tried; tests/dist kills processes at random times."""
    ctx = one_process()
    for step in range(steps_of_a_save(tmp_path, iteration)):
        root = tmp_path / f"{step}"
        save(root, 1, ctx)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            Faults(patch, step, Killed(), after)
            save(root, iteration, ctx, version=2, keep=1)
        latest = read_latest(root)
        assert latest is not None and assert_complete(root, ctx, latest) in (1, 2)
        for path in root.iterdir():  # every folder with the name of a checkpoint is one
            if path.is_dir() and not path.name.startswith("."):
                assert_complete(root, ctx, int(path.name[5:]))
        save(root, 3, ctx, keep=1)
        assert [path.name for path in root.iterdir() if path.is_dir()] == ["iter_0000003"]


def test_a_process_killed_in_its_first_save_leaves_no_or_a_complete_checkpoint(tmp_path):
    """Without a tracker, an incomplete checkpoint must not be loaded."""
    ctx = one_process()
    for step in range(steps_of_a_save(tmp_path, 2)):
        root = tmp_path / f"{step}"
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, step, Killed(), after=True)
            with contextlib.suppress(Killed):
                save(root, 1, ctx)
        if read_latest(root) is not None:
            assert_complete(root, ctx, 1)


def public(path: str) -> str:
    """The path without the random end of a private name."""
    return re.sub(r"\.[0-9a-f]{16}$", "", path)


def test_files_are_synced_before_the_tracker_names_them(tmp_path, monkeypatch):
    """After a power failure, the disk may have a name without its content unless the content was synced."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(("sync", public(os.readlink(f"/proc/self/fd/{fd}")))), fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", str(b))), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("replace", str(b))), replace(a, b)))
    folder = save(tmp_path, 1, one_process())
    appears, counts = events.index(("rename", str(folder))), events.index(("replace", str(tmp_path / TRACKER_FILE)))
    new = str(tmp_path / ".new-iter_0000001")
    written = {str(path).replace(str(folder), new) for path in [folder, *folder.rglob("*")]} - {f"{new}/layout.json"}
    synced = {path for event, path in events[:appears] if event == "sync"}
    assert written | {f"{new}/.new-layout.json"} <= synced
    assert events[appears - 1] == ("sync", new)  # after layout.json got its name
    assert ("sync", str(tmp_path)) in events[appears:counts]
    assert ("sync", str(tmp_path / f".new-{TRACKER_FILE}")) in events[appears:counts]
    assert events[counts + 1] == ("sync", str(tmp_path))


def test_a_full_disk_is_an_error_and_the_incomplete_save_is_deleted(tmp_path):
    """An incomplete checkpoint would keep the disk full."""
    ctx, root = one_process(), tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", root], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        save(root, 1, ctx)
        used = shutil.disk_usage(root).used
        with pytest.raises(CheckpointError) as caught:
            save(root, 2, ctx, rng={"large": torch.zeros(1 << 20, dtype=torch.uint8)})
        assert "rng_host_00000.safetensors: writing failed: No space left on device. Free some space" in str(
            caught.value
        )
        assert shutil.disk_usage(root).used == used
        assert read_latest(root) == 1 and assert_complete(root, ctx, 1) == 1
    finally:
        subprocess.run(["umount", root], check=True)


def test_the_previous_checkpoint_of_a_killed_replacement_is_loaded(tmp_path):
    """While a save replaces an iteration, the previous folder has another name."""
    ctx = one_process()
    save(tmp_path, 1, ctx)
    os.rename(tmp_path / "iter_0000001", tmp_path / ".old-iter_0000001")
    assert read_latest(tmp_path) == 1 and assert_complete(tmp_path, ctx, 1) == 1


def test_verify_lists_every_damaged_file(tmp_path):
    folder = save(tmp_path, 1, one_process())
    layout = read_layout(folder)
    assert store.verify(folder, layout) == []
    (folder / "mp_rank_00" / "rng_host_00000.safetensors").unlink()
    path = folder / "mp_rank_00" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    missing, damaged = sorted(map(str, store.verify(folder, layout)), reverse=True)
    assert "rng_host_00000.safetensors: is listed in layout.json but missing" in missing
    assert "model.safetensors: tensor decoder.final_layernorm.weight has checksum" in damaged


def test_a_checkpoint_that_is_pruned_while_it_is_read_is_not_damaged(tmp_path):
    """The checkpoint was complete, and a newer one exists."""
    folder = save(tmp_path, 1, one_process())
    layout = read_layout(folder)
    shutil.rmtree(folder)
    problems = store.verify(folder, layout)
    assert len(problems) == len(layout.files)
    for problem in problems:
        assert type(problem) is CheckpointError
        assert str(problem) == f"{folder}: deleted while it was read (checkpoint.keep); restart"


def test_nothing_is_copied_after_an_error(tmp_path, monkeypatch):
    """A late reader would overwrite values of the previous checkpoint with those of the damaged one."""
    layout = read_layout(save(tmp_path, 1, one_process()))
    tensor = layout.tensors[NAME]
    (stored,) = layout.slices(NAME, "weight")
    (full,) = rectangles(tensor.shape, tensor.shard, 0, 1)
    flat, started = torch.zeros(full.numel, dtype=torch.bfloat16), []
    wait, cancelled = store.wait, threading.Event()

    def wait_after_cancelling(copies):
        cancelled.set()
        return wait(copies)

    with store.Opened(tmp_path / "iter_0000001", layout) as opened:
        submit, indices = opened._readers.submit, itertools.count()

        def submit_numbered(copy, *arguments):
            def first_fails_others_wait(index):
                started.append(index)
                if index == 0:
                    raise DamagedCheckpoint("the first block")
                assert cancelled.wait(PATIENCE)
                copy(*arguments)

            return submit(first_fails_others_wait, next(indices))

        monkeypatch.setattr(opened._readers, "submit", submit_numbered)
        monkeypatch.setattr(store, "wait", wait_after_cancelling)
        with pytest.raises(DamagedCheckpoint, match="the first block"):
            opened.fill([(flat, [Move(stored, full, full)] * 20)])
        count, filled = len(started), flat.clone()
        cancelled.set()  # readers that `fill` did not wait for would copy from now on
    assert len(started) == count and torch.equal(flat, filled)
    assert count <= store.READERS + 1, "one block failed and each reader had at most one more"


LARGE = {name: ParamMeta((8192, 8192), Shard(dim), "normal") for dim, name in enumerate(("rows", "columns"))}


def load_a_quarter(root: Path, results) -> None:
    """Load one of four tensor-parallel shards; put its bytes and the rise of peak memory into `results`."""
    ctx = replace(ParallelContext.at(Grid(tp=4), 3), world=solo())
    weights = {name: LocalShard(torch.ones(meta.shard.local_shape(meta.shape, 4))) for name, meta in LARGE.items()}
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    store.load(root, 1, ctx=ctx, table=LARGE, contents=Contents(weights), config=CONFIG)
    results.put((sum(local.values.nbytes for local in weights.values()), status("VmHWM") - before))


def status(line: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0]) << 10


def test_loading_needs_little_memory_beside_the_local_shard(tmp_path):
    """At most a fifth of the shard, although the file is four times as large. A new process is measured, because this
    one could reuse freed memory."""
    weights = {name: LocalShard(torch.zeros(meta.shape)) for name, meta in LARGE.items()}
    rest = {"state": {}, "config": CONFIG, "origin": {}}
    store.save(tmp_path, 1, ctx=one_process(), table=LARGE, contents=Contents(weights), keep=1, **rest)
    processes = get_context("spawn")
    results = processes.Queue()
    process = processes.Process(target=load_a_quarter, args=(tmp_path, results))
    process.start()
    shard_bytes, rise = results.get(timeout=PATIENCE)
    process.join()
    assert shard_bytes == 2 * 8192 * 8192 and rise < 0.2 * shard_bytes


@pytest.mark.parametrize("file", ["model", "optimizer_dp_000", "rng_host_00000"])
def test_the_error_of_a_damaged_file_names_it_and_the_remedy(tmp_path, file):
    """Training with a flipped bit would raise no other error."""
    folder = save(tmp_path, 1, one_process())
    path = folder / "mp_rank_00" / f"{file}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{file}.safetensors: tensor .* has checksum .*, not .* Restore a copy"):
        load(tmp_path, 1, one_process())


def test_the_error_of_a_missing_iteration_lists_the_present_ones(tmp_path):
    save(tmp_path, 4, one_process())
    with pytest.raises(CheckpointError, match=r"iter_0000005: does not exist on this rank\. There are iterations 4"):
        load(tmp_path, 5, one_process())


def test_each_pipeline_stage_has_its_own_folder(tmp_path):
    """Two stages that wrote into one folder would overwrite each other."""
    ctx = ParallelContext.at(Grid(pp=2), 1)
    alone = ParallelContext(**{**vars(ctx), "world": one_process().world})
    folder = save(tmp_path, 1, alone)
    assert sorted(path.name for path in (folder / "mp_rank_00_001").iterdir()) == [
        "model.safetensors",
        "optimizer_dp_000.safetensors",
        "rng_host_00001.safetensors",
    ]
    stored = next(read_layout(folder).slices(NAME, "exp_avg"))
    assert (stored.tp, stored.pp, stored.start, stored.end) == (0, 1, 0, 48)


def test_a_tensor_in_slices_of_several_files_is_joined(tmp_path):
    """A sharded optimizer writes ranges of one shard into several files."""
    ctx = one_process()
    folder = save(tmp_path, 1, ctx)
    layout = json.loads(dump_layout(listed(read_layout(folder))))
    slices = layout["tensors"][NAME]["values"]["exp_avg"]["pieces"]
    first, second = dict(slices[0]), dict(slices[0])
    for slice_, replica, start, end in ((first, 1, 0, 20), (second, 2, 20, 48)):
        slice_.update(file=f"mp_rank_00/optimizer_dp_{replica:03d}.safetensors", start=start, end=end)
    flat = contents(ctx, 1)["optimizer_state"][NAME]["exp_avg"].view(-1)
    for stored in (first, second):
        info = write_tensors(folder / stored["file"], {stored["key"]: flat[stored["start"] : stored["end"]]})
        layout["files"][stored["file"]] = info.model_dump()
    layout["tensors"][NAME]["values"]["exp_avg"]["pieces"] = [second, first]
    layout.pop("crc32")
    (folder / "layout.json").write_text(dump_layout(Layout.model_validate(layout)))
    assert assert_complete(tmp_path, ctx, 1) == 1


def test_a_parameter_without_description_is_an_error(tmp_path):
    """A tensor that the table lacks could not be resharded."""
    with pytest.raises(KeyError):
        save(tmp_path, 1, one_process(), table={name: TABLE[name] for name in list(TABLE)[1:]})
