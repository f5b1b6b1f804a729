"""Process groups of a context sum over the ranks that the grid lists."""

import pytest
import torch
import torch.distributed as dist

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid

CPU = torch.device("cpu")
KINDS = ("tp", "cp", "dp", "pp", "mp", "embd", "pos_embd", "world")


def sums(grid):
    """The sum of 2**rank over each group, which encodes the set of its ranks in one integer."""
    ctx = ParallelContext.create(grid, CPU, timeout_seconds=30)
    view = ParallelContext.at(grid, dist.get_rank())
    got = {}
    for kind in KINDS:
        group = getattr(ctx, kind)
        assert (group.ranks, group.rank) == (getattr(view, kind).ranks, getattr(view, kind).rank)
        assert (group.pg is None) == (group.size == 1)
        got[kind] = all_reduce(torch.tensor([2**ctx.rank]), group).item()
    return got


@pytest.mark.parametrize(
    "grid", [Grid(tp=2, dp=2), Grid(tp=2, pp=2), Grid(dp=2, pp=2), Grid(tp=4), Grid(pp=4), Grid(cp=2, dp=2)], ids=str
)
def test_created_groups_sum_over_their_ranks(ranks, grid):
    """A group with a wrong rank would sum gradients or activations of another layout."""
    for rank, got in enumerate(ranks(4, sums, grid)):
        view = ParallelContext.at(grid, rank)
        assert got == {kind: sum(2**r for r in getattr(view, kind).ranks) for kind in KINDS}


def create_a_grid_of_four_on_two_ranks():
    with pytest.raises(ValueError, match=r"Grid\(tp=4.* needs 4 ranks, torch.distributed has 2"):
        ParallelContext.create(Grid(tp=4), CPU, timeout_seconds=30)


def test_a_grid_that_differs_from_the_world_size_raises_an_error(ranks):
    """Groups with ranks that do not exist would hang at creation."""
    ranks(2, create_a_grid_of_four_on_two_ranks)
