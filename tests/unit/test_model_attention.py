"""The fused kernel and the plain reference of attention against a loop over positions."""

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.model.attention import math_attention, sdpa_attention


def inputs(dtype=torch.float64, groups=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 9, 8), (3, groups, 9, 8), (3, groups, 9, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def loop_over_positions(query, key, value):
    out = torch.zeros_like(query)
    num_heads, num_groups = query.shape[1], key.shape[1]
    for head in range(num_heads):
        group = head * num_groups // num_heads  # neighbouring heads share a group
        for t in range(query.shape[2]):
            scores = key[:, group, : t + 1] @ query[:, head, t, :, None] / query.shape[-1] ** 0.5
            out[:, head, t] = (scores.softmax(1) * value[:, group, : t + 1]).sum(1)
    return out


@pytest.mark.parametrize("attend", [sdpa_attention, math_attention])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_equals_a_loop_over_heads_and_positions(attend, groups):
    """In fp64: an fp32 softmax would be off by 1e-7, another order of groups by far more."""
    query, key, value = inputs(groups=groups)
    want = loop_over_positions(query, key, value)
    weight = torch.randn(want.shape, dtype=torch.float64)
    want_grads = torch.autograd.grad((want * weight).sum(), (query, key, value))
    got = attend(query, key, value, 0.0)
    got_grads = torch.autograd.grad((got * weight).sum(), (query, key, value))
    assert_close(got, want, rtol=0, atol=1e-12)
    assert_close(got_grads, want_grads, rtol=0, atol=1e-12)


def test_the_reference_computes_its_softmax_in_fp32():
    """bf16 scores near 300 are multiples of 2, so probabilities would be off by factors."""
    query, key, value = (x.detach() for x in inputs(torch.bfloat16, groups=4))
    key = key + 37 * query.sign()
    want = math_attention(query.float(), key.float(), value.float(), 0.0)
    got = math_attention(query, key, value, 0.0)
    assert_close(got.float(), want, rtol=0, atol=0.35)
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("length", [9, 513])
@pytest.mark.parametrize(("dtype", "roundings"), [(torch.bfloat16, 3), (torch.float16, 3), (torch.float32, 32)])
def test_every_dtype_and_length_gives_the_exact_result_rounded(dtype, roundings, length):
    """bf16 has separate code for up to 512 tokens. 16-bit kernels round scores, probabilities and results but sum
    in fp32. In fp32, sums of up to 513 values round by about the square root of their number."""
    query, key, value = (torch.randn(2, 4, length, 8, generator=torch.manual_seed(i)).to(dtype) for i in range(3))
    leaves, exact = ([x.to(kind).requires_grad_() for x in (query, key, value)] for kind in (dtype, torch.float64))
    got, want = sdpa_attention(*leaves, 0.0), math_attention(*exact, 0.0)
    weight = torch.randn(want.shape, generator=torch.manual_seed(3)).to(dtype)
    got_grads = torch.autograd.grad(got, leaves, weight)
    want_grads = torch.autograd.grad(want, exact, weight.double())
    eps = torch.finfo(dtype).eps
    for ours, reference in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert_close(ours.double(), reference, rtol=0, atol=roundings * eps * reference.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", [sdpa_attention, math_attention])
def test_dropout_keeps_the_mean_of_the_output(attend, dtype):
    """With values of 1, the output is 1 without dropout and 1 on average with it. Bounds are five standard errors."""
    query = key = torch.zeros(8, 4, 64, 8, dtype=dtype)
    torch.manual_seed(0)
    out = attend(query, key, torch.ones_like(query), 0.25)[..., 0].float()
    count = torch.arange(1, 65)
    deviation = (1 / 3 / count).sqrt()  # of a mean of `count` values that are 4/3, or 0 with probability 1/4
    assert ((out - 1).mean((0, 1)).abs() < 5 * deviation / 32**0.5).all()
    assert (out[:, :, 1:].var((0, 1)) > 0).all()
