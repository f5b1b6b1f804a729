"""Attention in parts: their sum is attention over all keys, and each part finds its share of the gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.model.core_attention import math_attention
from megatron_lite.model.masks import Mask
from tests.helpers.attention_parts import in_parts
from tests.helpers.masks import attention_inputs, make_mask, masks_and_sizes


def assert_parts_equal_the_reference(name: str, sizes: dict, mask: Mask, softcap: float, dtype: torch.dtype) -> None:
    drawn = {key: sizes[key] for key in ("batch", "length", "groups", "head_size", "seed")}
    *leaves, grad = attention_inputs(**drawn, dtype=dtype)
    options = {"scale": 0.3, "softcap": softcap}
    out, lse = math_attention(*leaves, mask=mask, dropout=0.0, **options)
    out.backward(grad)
    generator = torch.Generator().manual_seed(sizes["seed"])
    owner = torch.randint(3, (sizes["length"],), generator=generator)
    want = [out.detach(), lse, *(x.grad for x in leaves)]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for found, expected in zip(in_parts(name, [*leaves, grad], mask, owner, **options), want, strict=True):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["math", "tiled", "sdpa"])
@settings(max_examples=40, deadline=None)
@given(sizes=masks_and_sizes(), softcap=st.sampled_from([0.0, 2.0]))
def test_the_sum_of_parts_equals_attention_over_all_keys(name, sizes, softcap):
    """Any keys in any part, some of which no query sees: only the order of sums differs."""
    kinds = tuple(kind for kind in sizes["kinds"] if kind != "window" or name != "sdpa")
    mask = make_mask(kinds, batch=sizes["batch"], length=sizes["length"], seed=sizes["seed"], window=sizes["window"])
    assert_parts_equal_the_reference(name, sizes, mask, 0.0 if name == "sdpa" else softcap, torch.float64)
