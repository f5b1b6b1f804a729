"""Ranks and groups equal Megatron-LM's published list, and satisfy the rules of any layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.parallel.grid import AXES, Grid

grids = st.builds(Grid, *(st.integers(1, 4) for _ in AXES))
subsets = st.sets(st.sampled_from(AXES))


def test_sixteen_ranks_are_grouped_as_megatron_lists_them():
    """The example in Megatron-LM's parallel_state.py: 16 GPUs, tensor 2, pipeline 4."""
    grid = Grid(tp=2, dp=2, pp=4)
    assert grid.groups("tp") == [(i, i + 1) for i in range(0, 16, 2)]
    assert grid.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert (grid.rank(tp=1), grid.rank(dp=1), grid.rank(pp=1)) == (1, 2, 4)
    assert grid.groups("pp") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert grid.groups("tp", "cp", "pp") == [(0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)]
    assert grid.embedding_groups() == [(0, 12), (1, 13), (2, 14), (3, 15)]
    assert grid.position_embedding_groups() == [(0,), (1,), (2,), (3,)]


@given(grids)
def test_rank_is_the_inverse_of_coordinates_with_tp_fastest_and_pp_slowest(grid):
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert [grid.rank(**place) for place in places] == list(range(grid.world_size))
    assert places == sorted(places, key=lambda place: [place[axis] for axis in ("pp", "dp", "cp", "tp")])


@given(grids, subsets)
def test_groups_along_any_axes_contain_every_rank_once(grid, along):
    groups = grid.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert all(list(group) == sorted(group) for group in groups)
    for group in groups:
        fixed = [{grid.coordinates(rank)[axis] for rank in group} for axis in AXES if axis not in along]
        assert all(len(values) == 1 for values in fixed)


@given(grids, subsets)
def test_groups_along_some_axes_and_along_the_others_have_one_rank_in_common(grid, along):
    """Otherwise a reduction over one and then the other would count a rank twice or not at all."""
    others = set(AXES) - along
    for group in grid.groups(*along):
        for crossing in grid.groups(*others):
            assert len(set(group) & set(crossing)) == 1


@given(grids)
def test_embedding_groups_are_the_first_and_the_last_stage(grid):
    for group, pipeline in zip(grid.embedding_groups(), grid.groups("pp"), strict=True):
        assert group == ((pipeline[0], pipeline[-1]) if grid.pp > 1 else (pipeline[0],))


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_grid_has_no_coordinates(rank):
    with pytest.raises(ValueError, match=rf"rank {rank} is not in 0\.\.3 of Grid\(tp=2"):
        Grid(tp=2, dp=2).coordinates(rank)
