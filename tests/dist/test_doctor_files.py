"""The number of open files that `doctor` expects of a rank, against /proc."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_lite.doctor.machine import FILES_OF_A_GROUP, FILES_OF_A_RANK, needed_files
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.p2p import connect


def connected_and_expected(grid: Grid) -> tuple[int, int]:
    """The files that the groups of a layout open beside the world's on this rank, and the expected ones."""
    dist.barrier()
    before = len(os.listdir("/proc/self/fd"))
    ctx = ParallelContext.create(grid, torch.device("cpu"), 60.0)
    pipes = connect(ctx, wraps=False, timeout_seconds=60.0)
    dist.barrier()
    opened = len(os.listdir("/proc/self/fd")) - before
    del pipes
    of_world = grid.world_size - 1 + FILES_OF_A_GROUP
    store = grid.world_size if ctx.rank == 0 else 1
    return opened, needed_files(grid, ctx.rank) - FILES_OF_A_RANK - store - of_world


@pytest.mark.parametrize("grid", [Grid(dp=4), Grid(tp=2, dp=2), Grid(tp=2, dp=2, pp=2)])
def test_groups_open_as_many_files_as_expected(ranks, grid):
    """A rank above its limit fails with `Too many open files` in the middle of its start."""
    for opened, expected in ranks(grid.world_size, connected_and_expected, grid):
        assert abs(opened - expected) <= 2
