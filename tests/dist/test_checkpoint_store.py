"""Checkpoints of several ranks: each writes its share, and all of them succeed or fail together."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_lite.checkpoint import directory, store
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.errors import CheckpointError, TrainingError
from megatron_lite.parallel.agreement import gather_objects, on_all, on_first
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from tests.helpers.checkpoints import TABLE, assert_holds, assert_same, bytes_of, contents, load, save, whole


def context(tp: int, dp: int) -> ParallelContext:
    return ParallelContext.create(Grid(tp=tp, dp=dp), torch.device("cpu"), 60)


def message_of(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return "no error"


def save_and_load(root: Path, tp: int, dp: int) -> int:
    ctx = context(tp, dp)
    for iteration in (1, 2, 3):
        save(root, iteration, ctx)
        assert (root / f"iter_{iteration:07d}").exists()  # no rank returns before all is done
        assert (root / "latest_checkpointed_iteration.txt").read_text() == str(iteration)
    latest = directory.find_latest(root, world=ctx.world)
    assert latest is not None
    return assert_holds(root, ctx, latest)


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1), (2, 2)])
def test_every_rank_gets_its_own_back(ranks, tmp_path, tp, dp):
    """ShardedTensor of fused tensors, replicated tensors and each data-parallel rank's generators."""
    assert ranks(tp * dp, save_and_load, tmp_path, tp, dp) == [3] * (tp * dp)
    assert directory.iterations(tmp_path) == [2, 3]
    folder = tmp_path / "iter_0000003"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")}
    assert files == {
        f"mp_rank_{t:02d}/{name}.safetensors"
        for t in range(tp)
        for name in ["model", "optimizer_dp_000", *(f"rng_dp_{d:03d}" for d in range(dp))]
    }
    layout = read_layout(folder)
    assert layout.files.keys() == files and store.verify(folder, layout) == []


def test_pieces_join_to_the_whole_tensor(ranks, tmp_path):
    """layout.json alone must be enough to put any tensor together, for a reader without our code too."""
    ranks(2, save_and_load, tmp_path, 2, 1)
    folder = tmp_path / "iter_0000003"
    layout = read_layout(folder)
    for name, tensor in layout.tensors.items():
        for kind, value in tensor.values.items():
            shards = [load_file(folder / p.file)[p.key] for tp in range(2) for p in value.slices if p.tp == tp]
            dtype = torch.bfloat16 if kind == "weight" else torch.float32
            assert torch.equal(tensor.shard.join(shards), whole(name, kind, 3, dtype)), (name, kind)


def load_elsewhere(root: Path, tp: int, dp: int) -> tuple[int, int, str]:
    ctx = context(tp, dp)
    into = contents(ctx, -1)
    loaded, _ = load(root, 3, ctx, **into)
    assert_same(into, contents(ctx, 3))
    return loaded.grid.world_size, loaded.bytes_read - bytes_of(into), str(loaded.rng)


@pytest.mark.parametrize(("before", "after"), [((1, 2), (1, 1)), ((1, 2), (1, 4)), ((1, 1), (4, 1)), ((4, 1), (2, 2))])
def test_another_grid_loads_all_but_the_generators(ranks, tmp_path, before, after):
    """Each rank has its cut, and has read no more; its random stream has to be seeded anew."""
    size = before[0] * before[1]
    ranks(size, save_and_load, tmp_path, *before)
    assert set(ranks(after[0] * after[1], load_elsewhere, tmp_path, *after)) == {(size, 0, "None")}


def save_with_a_failing_disk(root: Path, failing_ranks: tuple[int, ...]) -> str:
    ctx = context(2, 1)
    save(root, 1, ctx)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if ctx.rank in failing_ranks:
        with mock.patch("os.fsync", side_effect=full):
            message = message_of(save, root, 2, ctx)
    else:
        message = message_of(save, root, 2, ctx)
    latest = directory.find_latest(root, world=ctx.world)
    assert latest == 1 and assert_holds(root, ctx, latest) == 1
    save(root, 3, ctx)
    assert assert_holds(root, ctx, 3) == 3
    return message


@pytest.mark.parametrize("failing", [(1,), (0,), (0, 1)])
def test_a_full_disk_on_any_rank_is_told_by_all(ranks, tmp_path, failing):
    """A rank that did not hear of it would wait in the next collective until the time-out."""
    first, second = ranks(2, save_with_a_failing_disk, tmp_path, failing)
    assert first == second
    more = " (1 more rank failed)" if len(failing) == 2 else ""
    assert first.startswith(f"rank {failing[0]}: {tmp_path}/.new-iter_0000002/mp_rank_{failing[0]:02d}/")
    assert "writing failed: No space left on device. Free some space, lower checkpoint.keep" in first
    assert first.endswith(more or "untouched")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000001", "iter_0000003"]


def save_where_the_first_rank_cannot(root: Path, function: str) -> str:
    ctx = context(2, 1)
    save(root, 1, ctx)
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with mock.patch(function, side_effect=denied):
        message = message_of(save, root, 2, ctx)
    assert directory.find_latest(root, world=ctx.world) == 1 and assert_holds(root, ctx, 1) == 1
    return message


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("os.mkdir", "creating the folder failed: Permission denied. Give this user write permission"),
        ("os.rename", "putting the checkpoint in place failed: Permission denied"),
        ("os.replace", "writing failed: Permission denied"),
    ],
)
def test_what_only_the_first_rank_does_fails_on_all(ranks, tmp_path, function, what):
    first, second = ranks(2, save_where_the_first_rank_cannot, tmp_path, function)
    assert first == second and first.startswith("rank 0: ") and what in first


def load_damaged(root: Path) -> str:
    return message_of(load, root, 3, context(2, 1))


def test_damage_that_one_rank_reads_stops_all(ranks, tmp_path):
    """The other ranks would go on training, or wait for it."""
    ranks(2, save_and_load, tmp_path, 2, 1)
    path = tmp_path / "iter_0000003" / "mp_rank_01" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    first, second = ranks(2, load_damaged, tmp_path)
    assert first == second and first.startswith(f"rank 1: {path}: tensor ") and "has checksum" in first


def save_with_a_bug(root: Path) -> tuple[str, type | None]:
    ctx = context(2, 1)
    wrong = {name: torch.zeros(3) for name in TABLE} if ctx.rank == 1 else contents(ctx, 1)["weights"]
    try:
        save(root, 1, ctx, weights=wrong)
    except TrainingError as error:
        return str(error), type(error.__cause__)
    return "no error", None


def test_a_bug_on_one_rank_leaves_nobody_waiting(ranks, tmp_path):
    """Any exception counts; the rank where it happened has it as the cause, with its traceback."""
    results = ranks(2, save_with_a_bug, tmp_path)
    assert results[0][0] == results[1][0] and results[0][0].startswith("rank 1: AssertionError: ")
    assert results[1][1] is AssertionError


def agree() -> tuple:
    world = context(2, 1).world
    return on_first(lambda: f"from {world.rank}", world), on_all(lambda: world.rank, world), gather_objects(7, world)


def test_results_reach_who_they_should(ranks):
    """The first rank's for all, each its own, or all for the first."""
    assert ranks(2, agree) == [("from 0", 0, [7, 7]), ("from 0", 1, [])]
