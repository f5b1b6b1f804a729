"""The bf16 attention of the CPU rounds as little as torch's kernel. Machines without bf16 units can compute it too."""

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.model import bf16_attention
from megatron_lite.model.core_attention import math_attention, sdpa_attention
from megatron_lite.model.masks import CAUSAL
from tests.helpers.masks import attention_inputs

SCALE = 16**-0.5


def with_gradients(attend, leaves, grad):
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def exact(query, key, value):
    return math_attention(query, key, value, mask=CAUSAL, scale=SCALE, dropout=0.0, softcap=0.0)[0]


def products(query, key, value):
    return bf16_attention.attention(query, key, value, SCALE, 0.0)


def kernel(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)


def errors(attend, factor, length):
    """For output and gradients, the norm of the difference from exact attention over that of exact attention."""
    *leaves, grad = (x.detach() for x in attention_inputs(2, length, 3, 16, seed=0, dtype=torch.bfloat16, heads=3))
    leaves[0] *= factor
    got = with_gradients(attend, [x.requires_grad_() for x in leaves], grad)
    want = with_gradients(exact, [x.detach().double().requires_grad_() for x in leaves], grad.double())
    return [((ours - x).norm() / x.norm()).item() for ours, x in zip(got, want, strict=True)]


@pytest.mark.parametrize("length", [2, 100, 700, 2100])
@pytest.mark.parametrize("factor", [0.1, 1, 20])
def test_output_and_gradients_round_as_little_as_torchs_kernel(monkeypatch, length, factor):
    """With small, usual and very large scores, in several blocks of keys and of heads. An error of 1% is that of two or
    three roundings to bf16. Scores of 300 that are rounded to bf16 would be off by 1."""
    monkeypatch.setattr(bf16_attention, "CACHED_SCORES", 4 * 256 * length)
    output, *gradients = errors(products, factor, length)
    of_kernel, *of_gradients = errors(kernel, factor, length)
    assert output == of_kernel < 0.003
    assert all(ours < max(0.01, 1.5 * peer) for ours, peer in zip(gradients, of_gradients, strict=True))


def test_all_sizes_of_blocks_give_the_same_gradients(monkeypatch):
    """The number of heads of a block depends on the number of threads, and gradients must not."""
    *leaves, grad = attention_inputs(2, 600, 3, 16, seed=0, dtype=torch.bfloat16, heads=3)
    at_once = with_gradients(products, leaves, grad)
    monkeypatch.setattr(bf16_attention, "CACHED_SCORES", 0)
    assert_close(with_gradients(products, leaves, grad), at_once, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("has_units", "dtype", "dropout", "length", "called"),
    [
        (True, torch.bfloat16, 0.0, 600, True),
        (True, torch.bfloat16, 0.5, 512, True),
        (True, torch.bfloat16, 0.5, 600, False),
        (True, torch.float16, 0.0, 600, False),
        (False, torch.bfloat16, 0.0, 600, False),
    ],
)
def test_sdpa_calls_it_where_it_is_faster(monkeypatch, has_units, dtype, dropout, length, called):
    calls = []
    monkeypatch.setattr(bf16_attention, "has_bf16_units", lambda: has_units)
    monkeypatch.setattr(bf16_attention, "attention", lambda query, *_: calls.append(query) or query)
    query = torch.zeros(1, 1, length, 8, dtype=dtype)
    sdpa_attention(query, query, query, mask=CAUSAL, scale=SCALE, dropout=dropout, softcap=0.0)
    assert bool(calls) == called
