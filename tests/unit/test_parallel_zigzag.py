"""The zig-zag order of the tokens of a sequence over context-parallel ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.zigzag import in_rank_order, in_sequence_order, local_tokens, positions


def test_a_rank_has_a_chunk_from_the_start_and_one_from_the_end():
    assert [positions(16, rank, 4).tolist() for rank in range(4)] == [
        [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]
    ]  # fmt: skip
    assert positions(3, 0, 1).tolist() == [0, 1, 2]


@given(size=st.integers(1, 5), chunk=st.integers(1, 4), dim=st.integers(0, 2))
def test_the_tokens_of_all_ranks_are_the_sequence_once(size, chunk, dim):
    """A lost token would have no loss, and one that two ranks have would count twice."""
    shape = [2, 3, 4]
    shape[dim] = 2 * size * chunk
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    ranks = [local_tokens(full, Group("cp", tuple(range(size)), rank), dim) for rank in range(size)]
    for rank, local in enumerate(ranks):
        assert torch.equal(local, full.index_select(dim, positions(shape[dim], rank, size).long()))
    joined = torch.cat(ranks, dim)
    assert torch.equal(in_sequence_order(joined, size, dim), full)
    assert torch.equal(in_rank_order(full, size, dim), joined)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_computes_as_many_causal_scores(size):
    """A query at position p has p + 1 scores; contiguous blocks would give the last rank most of the work."""
    length = 8 * size
    scores = {int((positions(length, rank, size) + 1).sum()) for rank in range(size)}
    assert scores == {length * (length + 1) // 2 // size}
