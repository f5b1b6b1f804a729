"""The context of any rank, in one process without torch.distributed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid

KINDS = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "mp": ("tp", "pp")}
KINDS["dp_cp"] = ("cp", "dp")


@given(st.builds(Grid, *(st.integers(1, 4) for _ in range(4))), st.data())
def test_the_context_of_every_rank_agrees_with_the_grid(grid, data):
    rank = data.draw(st.integers(0, grid.world_size - 1))
    ctx = ParallelContext.at(grid, rank)
    place = grid.coordinates(rank)
    for name, along in KINDS.items():
        group = getattr(ctx, name)
        assert group.ranks in grid.groups(*along)
        assert group.ranks[group.rank] == rank
        if len(along) == 1:
            assert group.rank == place[name]
    assert ctx.world.ranks == tuple(range(grid.world_size))
    assert (ctx.embd.rank >= 0) == (place["pp"] in (0, grid.pp - 1))
    assert (ctx.pos_embd.rank >= 0) == (place["pp"] == 0)


@pytest.mark.parametrize("rank", [0, 1, 2047, 6143])
def test_the_context_of_thousands_of_ranks_needs_no_process(rank):
    ctx = ParallelContext.at(Grid(tp=8, cp=2, dp=24, pp=16), rank)
    names = ("tp", "cp", "dp", "dp_cp", "pp", "mp", "world")
    assert [getattr(ctx, name).size for name in names] == [8, 2, 24, 48, 16, 128, 6144]
    assert ctx.device == torch.device("meta")
    assert all(getattr(ctx, name).pg is None for name in KINDS)


def test_a_middle_stage_is_not_in_an_embedding_group_and_its_groups_are_not_none():
    """torch takes None for the world, so an all-reduce over it would include every GPU."""
    ctx = ParallelContext.at(Grid(pp=3), 1)
    assert ctx.embd.rank == ctx.pos_embd.rank == -1
    assert ctx.embd.ranks == (1,)


def test_a_group_identifies_its_first_and_last_rank():
    ctx = ParallelContext.at(Grid(pp=3), 2)
    assert ctx.pp.is_last and not ctx.pp.is_first
    assert solo().is_first and solo().is_last and solo().size == 1


def test_one_rank_is_created_without_torch_distributed():
    ctx = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=1)
    assert ctx.rank == 0 and ctx.device == torch.device("cpu")
    assert ctx.world.pg is None
