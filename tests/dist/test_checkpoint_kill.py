"""Ranks that are killed while they save: what remains loads, and is one of the states that were saved."""

import os
import random
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lite.checkpoint.directory import find_latest, iterations
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from tests.checkpoints import assert_holds, save

SIZE = 2  # tensor-parallel ranks


def save_forever(rank: int, root: Path, store: Path) -> None:
    """A run without training: loads the newest checkpoint, checks it, saves on and on; sometimes an old one again."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    ctx = ParallelContext.create(Grid(tp=SIZE), torch.device("cpu"), 60)
    iteration = find_latest(root, world=ctx.world) or 0
    if iteration:
        assert_holds(root, ctx, iteration)
    (root.parent / f"ready-{rank}").touch()
    while True:
        iteration += 1
        save(root, iteration, ctx, version=iteration % 1000 + 1, keep=2)
        if iteration % 3 == 0:
            save(root, iteration, ctx, version=iteration % 1000 + 1, keep=2)


def kill_while_saving(root: Path, random_: random.Random) -> None:
    """Starts the ranks, and kills all of them, or one and then the rest, after a random time."""
    mp = get_context("forkserver")
    mp.set_forkserver_preload(["torch", "torch.distributed"])
    store = root.parent / f"store-{random_.random()}"
    ready = [root.parent / f"ready-{rank}" for rank in range(SIZE)]
    for path in ready:
        path.unlink(missing_ok=True)
    processes = [mp.Process(target=save_forever, args=(rank, root, store), daemon=True) for rank in range(SIZE)]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in ready):
            assert all(process.is_alive() for process in processes), "a rank could not go on from what remained"
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.01)
        time.sleep(random_.uniform(0, 0.3))
        random_.shuffle(processes)
        processes[0].kill()
        if random_.random() < 0.5:
            time.sleep(random_.uniform(0, 0.05))
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def check_kills(root: Path, kills: int, seed: int) -> None:
    random_, before = random.Random(seed), 0
    for _ in range(kills):
        kill_while_saving(root, random_)
        ctx = ParallelContext.at(Grid(tp=SIZE), 0)
        latest = find_latest(root, world=ParallelContext.at(Grid(), 0).world) or 0
        assert latest >= before, "an older checkpoint than before the kill"
        before = latest
        for iteration in iterations(root):
            for rank in range(SIZE):
                ctx = ParallelContext.at(Grid(tp=SIZE), rank)
                alone = ParallelContext(**{**vars(ctx), "world": ParallelContext.at(Grid(), 0).world})
                # assert_holds compares rng too, which is of this rank
                assert assert_holds(root, alone, iteration) == iteration % 1000 + 1
    assert before > 0, "nothing was ever saved"
    assert not [path for path in root.iterdir() if path.name.startswith("iter_") and not os.listdir(path)]


def test_ranks_killed_while_saving_leave_a_checkpoint_that_loads(tmp_path):
    """Otherwise a crash at the wrong moment costs the whole run."""
    check_kills(tmp_path / "checkpoints", kills=4, seed=5)


@pytest.mark.soak
def test_ranks_killed_while_saving_many_times(tmp_path):
    """The same at many more instants; MEGATRON_LITE_SOAK_KILLS and _SEED choose others."""
    kills = int(os.environ.get("MEGATRON_LITE_SOAK_KILLS", "40"))
    check_kills(tmp_path / "checkpoints", kills=kills, seed=int(os.environ.get("MEGATRON_LITE_SOAK_SEED", "1")))
