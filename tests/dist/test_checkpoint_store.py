"""Checkpoints of several ranks: each rank writes its shards, and all ranks succeed or fail together."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_lite.checkpoint import directory, store
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.errors import CheckpointError, DamagedCheckpoint, TrainingError
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.parallel.agreement import gather_objects, on_all, on_first
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from tests.helpers.checkpoints import (
    TABLE,
    assert_complete,
    assert_same,
    contents,
    full_tensor,
    load,
    save,
    total_bytes,
)


def context(tp: int, dp: int) -> ParallelContext:
    return ParallelContext.create(Grid(tp=tp, dp=dp), torch.device("cpu"), 60)


def error_message(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return "no error"


def save_and_load(root: Path, tp: int, dp: int) -> int:
    ctx = context(tp, dp)
    for iteration in (1, 2, 3):
        save(root, iteration, ctx)
        assert (root / f"iter_{iteration:07d}").exists()  # no rank returns before the save is complete
        assert (root / "latest_checkpointed_iteration.txt").read_text() == str(iteration)
    latest = directory.read_latest(root)
    assert latest is not None
    return assert_complete(root, ctx, latest)


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1), (2, 2)])
def test_every_rank_loads_the_values_that_it_saved(ranks, tmp_path, tp, dp):
    """Shards of fused tensors, replicated tensors and each data-parallel rank's generators could be mixed up."""
    assert ranks(tp * dp, save_and_load, tmp_path, tp, dp) == [3] * (tp * dp)
    assert directory.iterations(tmp_path) == [2, 3]
    folder = tmp_path / "iter_0000003"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")}
    assert files == {
        f"mp_rank_{t:02d}/{name}.safetensors" for t in range(tp) for name in ("model", "optimizer_dp_000")
    } | {f"mp_rank_{rank % tp:02d}/rng_host_{rank:05d}.safetensors" for rank in range(tp * dp)}
    layout = read_layout(folder)
    assert layout.files.keys() == files and store.verify(folder, layout) == []


def test_shards_in_the_files_join_to_the_full_tensor(ranks, tmp_path):
    """A reader without our code must be able to build any full tensor from layout.json alone."""
    ranks(2, save_and_load, tmp_path, 2, 1)
    folder = tmp_path / "iter_0000003"
    layout = read_layout(folder)
    for name, tensor in layout.tensors.items():
        for kind in tensor.values:
            shards = [load_file(folder / stored.file)[stored.key] for stored in layout.slices(name, kind)]
            dtype = torch.bfloat16 if kind == "weight" else torch.float32
            assert torch.equal(tensor.shard.join(shards), full_tensor(name, kind, 3, dtype)), (name, kind)


def load_on_another_grid(root: Path, tp: int, dp: int) -> tuple[int, int, int, str]:
    ctx = context(tp, dp)
    into = contents(ctx, -1)
    loaded, _ = load(root, 3, ctx, **into)
    assert_same(into, contents(ctx, 3))
    return loaded.layout.grid.world_size, loaded.bytes_read, total_bytes(into), str(loaded.rng)


@pytest.mark.parametrize(("before", "after"), [((1, 2), (1, 1)), ((1, 2), (1, 4)), ((1, 1), (4, 1)), ((4, 1), (2, 2))])
def test_another_grid_loads_all_shards_but_no_generators(ranks, tmp_path, before, after):
    """Ranks that together read a value more than once, or more than their shards, would make large restarts slow. So
    would one that reads the values for all others. Random streams must be seeded anew."""
    size, (tp, dp) = before[0] * before[1], after
    ranks(size, save_and_load, tmp_path, *before)
    sizes, read, own, rng = zip(*ranks(tp * dp, load_on_another_grid, tmp_path, *after), strict=True)
    assert set(sizes) == {size} and set(rng) == {"None"}
    assert all(sum(read[rank::tp]) == own[rank] for rank in range(tp))
    assert max(read) < 1.5 * own[0] / dp


def save_with_a_failing_disk(root: Path, failing_ranks: tuple[int, ...]) -> str:
    ctx = context(2, 1)
    save(root, 1, ctx)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if ctx.rank in failing_ranks:
        with mock.patch("os.fsync", side_effect=full):
            message = error_message(save, root, 2, ctx)
    else:
        message = error_message(save, root, 2, ctx)
    latest = directory.read_latest(root)
    assert latest == 1 and assert_complete(root, ctx, latest) == 1
    save(root, 3, ctx)
    assert assert_complete(root, ctx, 3) == 3
    return message


@pytest.mark.parametrize("failing", [(1,), (0,), (0, 1)])
def test_all_ranks_raise_the_full_disk_error_of_any_rank(ranks, tmp_path, failing):
    """A rank that did not know of the error would wait in the next collective until the timeout."""
    first, second = ranks(2, save_with_a_failing_disk, tmp_path, failing)
    assert first == second
    more = " (1 more rank failed)" if len(failing) == 2 else ""
    assert first.startswith(f"rank {failing[0]}: {tmp_path}/.new-iter_0000002/mp_rank_{failing[0]:02d}/")
    assert "writing failed: No space left on device. Free some space, lower checkpoint.keep" in first
    assert first.endswith(more or "untouched")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000001", "iter_0000003"]


def save_without_permission_on_rank_0(root: Path, function: str) -> str:
    ctx = context(2, 1)
    save(root, 1, ctx)
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with mock.patch(function, side_effect=denied):
        message = error_message(save, root, 2, ctx)
    assert directory.read_latest(root) == 1 and assert_complete(root, ctx, 1) == 1
    return message


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("os.mkdir", "failed: Permission denied. Give this user write permission"),
        ("os.rename", "putting the checkpoint in place failed: Permission denied"),
        ("os.replace", "writing failed: Permission denied"),
    ],
)
def test_a_failing_file_operation_of_rank_0_fails_on_all_ranks(ranks, tmp_path, function, error):
    """Only rank 0 makes folders and renames them; the other ranks would count a checkpoint that does not exist."""
    first, second = ranks(2, save_without_permission_on_rank_0, tmp_path, function)
    assert first == second and first.startswith("rank 0: ") and error in first


def load_damaged(root: Path) -> str:
    return error_message(load, root, 3, context(2, 1))


def test_all_ranks_raise_the_checksum_error_of_one_rank(ranks, tmp_path):
    """The other ranks would start training, and wait for the failed rank in a collective."""
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


def test_an_unexpected_exception_on_one_rank_is_raised_by_all_ranks(ranks, tmp_path):
    """The other ranks would hang. The rank of the exception keeps it as the cause, with its traceback."""
    results = ranks(2, save_with_a_bug, tmp_path)
    assert results[0][0] == results[1][0] and results[0][0].startswith("rank 1: AssertionError: ")
    assert results[1][1] is AssertionError


def damage_on_rank_0_and_a_full_disk_on_rank_1() -> None:
    world = context(2, 1).world

    def work() -> None:
        raise CheckpointError("no space is left") if world.rank else DamagedCheckpoint("a file is damaged")

    on_all(work, world)


def test_damage_does_not_hide_another_error(ranks):
    """Damage alone lets a run load an older checkpoint, which would lose iterations here and help nothing."""
    with pytest.raises(RanksFailed, match=r"errors\.CheckpointError: rank 1: no space is left \(1 more rank failed\)"):
        ranks(2, damage_on_rank_0_and_a_full_disk_on_rank_1)


def agreed_results() -> tuple:
    world = context(2, 1).world
    return on_first(lambda: f"from {world.rank}", world), on_all(lambda: world.rank, world), gather_objects(7, world)


def test_agreement_functions_return_results_to_the_right_ranks(ranks):
    """on_first returns rank 0's result to all, on_all each rank its own, gather_objects all results to rank 0."""
    assert ranks(2, agreed_results) == [("from 0", 0, [7, 7]), ("from 0", 1, [])]
