"""On two tensor-parallel ranks, recomputation and split backward give bitwise equal losses and gradients."""

import pytest
import torch

from tests.helpers.recomputed_models import KINDS, assert_same_bits, train


@pytest.mark.parametrize(
    ("dtype", "sequence"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_and_split_backward_change_no_bit_on_two_ranks(ranks, kind, dtype, sequence):
    """Attention dropout differs over tp; recomputed from the wrong random stream, it would be wrong on some rank."""
    layout = {"tp": 2, "sequence": sequence}
    want = ranks(2, train, KINDS[kind], recompute="none", dtype=dtype, **layout)
    assert not torch.equal(want[0].draws[1], want[1].draws[1])  # the tensor-parallel streams
    for recompute, halves in (("selective", False), ("full", False), ("none", True), ("full", True)):
        got = ranks(2, train, KINDS[kind], recompute=recompute, dtype=dtype, halves=halves, **layout)
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)
            assert (one.num_jobs > 0) is halves
