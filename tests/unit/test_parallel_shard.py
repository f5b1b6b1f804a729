"""Split and join of tensors, compared with plain indexing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.parallel.shard import ParamMeta, Shard, declare


@st.composite
def sharded_tensors(draw):
    """A full tensor of different values, its Shard, and the number of ranks."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    ndim = draw(st.integers(1, 3))
    dim = draw(st.one_of(st.none(), st.integers(0, ndim - 1)))
    parts = tuple(size * share for share in draw(st.lists(st.integers(1, 4), max_size=3)))
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    if dim is None:
        parts = ()
    else:
        shape[dim] = sum(parts) if parts else size * shape[dim]
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    units = tuple(draw(st.sampled_from([u for u in (1, size, part) if not (size % u and u % size)])) for part in parts)
    return full, Shard(dim, parts, units if dim == 0 and draw(st.booleans()) else ()), size


@given(sharded_tensors())
def test_join_is_the_inverse_of_split(tensor):
    full, shard, size = tensor
    slices = [shard.split(full, rank, size) for rank in range(size)]
    assert torch.equal(shard.join(slices), full)
    for local in slices:
        assert tuple(local.shape) == shard.local_shape(full.shape, size)


@given(sharded_tensors())
def test_ranges_are_the_indices_of_the_slice_in_the_full_tensor(tensor):
    full, shard, size = tensor
    if shard.dim is None:
        return
    for rank in range(size):
        indices = [i for a, b in shard.ranges(full.shape[shard.dim], rank, size) for i in range(a, b)]
        assert torch.equal(shard.split(full, rank, size), full.index_select(shard.dim, torch.tensor(indices)))


def test_fused_query_key_value_gives_each_rank_heads_of_all_three():
    """Two equal halves of the rows would give rank 0 only queries."""
    names = [f"q{i}" for i in range(4)] + [f"k{i}" for i in range(2)] + [f"v{i}" for i in range(2)]
    rows = torch.arange(8)
    slices = [Shard(0, (4, 2, 2)).split(rows, rank, 2) for rank in range(2)]
    assert [[names[i] for i in rank] for rank in slices] == [["q0", "q1", "k0", "v0"], ["q2", "q3", "k1", "v1"]]


def test_ranks_beyond_the_number_of_groups_hold_copies_of_their_neighbours():
    """Rank r's query heads belong to the group that it holds; another group would be attention to other keys."""
    names = [f"q{i}" for i in range(4)] + ["k0", "k1", "v0", "v1"]
    shard, rows = Shard(0, (4, 2, 2), (4, 2, 2)), torch.arange(8)
    slices = [shard.split(rows, rank, 4) for rank in range(4)]
    assert [[names[i] for i in rank] for rank in slices] == [
        ["q0", "k0", "v0"], ["q1", "k0", "v0"], ["q2", "k1", "v1"], ["q3", "k1", "v1"]
    ]  # fmt: skip
    found = [[tuple(copied) for copied in shard.copied((8,), rank, 4)] for rank in range(4)]
    assert found[0] == [(1, 2, 0, 2, True), (2, 3, 0, 2, True)]
    assert found[1] == [(1, 2, 0, 2, False), (2, 3, 0, 2, False)]
    assert found[2] == [(1, 2, 1, 2, True), (2, 3, 1, 2, True)]
    assert shard.copied((8, 10), 3, 4)[1] == (20, 30, 1, 2, False)
    assert not any(shard.copied((8,), rank, 2) for rank in range(2))
    assert not Shard(0, (4, 2, 2)).copied((8,), 0, 2)


def test_a_checkpoint_from_before_units_has_the_same_shards():
    """Its layout.json does not have them; a run must not take it for another model."""
    assert Shard(0, (4, 2, 2)) == Shard(0, (4, 2, 2), (4, 2, 2))


def test_an_unsharded_tensor_is_full_on_every_rank():
    full = torch.randn(3)
    assert not Shard().is_split
    assert Shard().split(full, 1, 2) is full
    assert Shard().local_shape((3,), 2) == (3,)


@pytest.mark.parametrize("use", ["split", "local_shape"])
def test_a_part_that_does_not_divide_is_an_error(use):
    arguments = {"split": (torch.zeros(6, 2), 0, 2), "local_shape": ((6, 2), 2)}[use]
    with pytest.raises(ValueError, match=r"a block of 3 along dim 0 of \(6, 2\) does not divide over 2 ranks"):
        getattr(Shard(0, (3, 3)), use)(*arguments)
    with pytest.raises(ValueError, match=r"parts \(4, 4\) of dim 0 do not add up to its size in \(6, 2\)"):
        getattr(Shard(0, (4, 4)), use)(*arguments)


def test_a_parameter_carries_its_description():
    parameter = torch.nn.Parameter(torch.zeros(2))
    meta = ParamMeta(shape=(4,), shard=Shard(0), init="zeros", decay=False)
    assert declare(parameter, meta) is parameter
    assert parameter.meta is meta
