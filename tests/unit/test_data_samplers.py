"""The stateless sampler has Megatron's order and the same global batch for every data-parallel size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.samplers import microbatch_indices


@pytest.mark.parametrize(("dp_rank", "expected"), [(0, [[12, 13], [16, 17]]), (1, [[14, 15], [18, 19]])])
def test_a_step_is_divided_by_micro_batch_and_then_by_rank(dp_rank, expected):
    """As in Megatron: of every micro_batch_size * dp indices, rank r takes slice r of micro_batch_size."""
    assert microbatch_indices(12, 2, 2, dp_rank, 2) == expected


@given(
    consumed=st.integers(0, 10**12),
    num_microbatches=st.integers(1, 5),
    micro_batch_size=st.integers(1, 5),
    dp_size=st.integers(1, 5),
)
def test_ranks_together_read_the_next_samples_once_each(consumed, num_microbatches, micro_batch_size, dp_size):
    """Otherwise a sample would be repeated or skipped, and a step would depend on dp."""
    seen = [
        index
        for rank in range(dp_size)
        for batch in microbatch_indices(consumed, num_microbatches, micro_batch_size, rank, dp_size)
        for index in batch
    ]
    total = num_microbatches * micro_batch_size * dp_size
    assert sorted(seen) == list(range(consumed, consumed + total))
