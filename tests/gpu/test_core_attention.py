"""torch's implementations of attention on a GPU against the dense reference in fp64."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.config.attention import Request, obstacles
from megatron_lite.errors import ConfigError
from megatron_lite.model.core_attention import IMPLEMENTATIONS, math_attention, sdpa_attention
from megatron_lite.model.masks import Mask
from tests.helpers.attention_parts import in_parts
from tests.helpers.masks import attention_inputs, random_documents
from tests.helpers.triton_cases import with_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTH = 1500
MASKS = {
    "full": Mask(causal=False),
    "causal": Mask(),
    "window": Mask(window=300),
    "documents": Mask(documents=random_documents(2, LENGTH, seed=0, mean_size=300)),
}
CASES = [(name, mask) for name in ("sdpa", "flex", "flash") for mask in MASKS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "mask"), CASES)
def test_an_implementation_gives_the_dense_result_and_gradients(name, mask, dtype):
    """Kernels round scores, P or dS, and the results; in fp32 sums of up to 1,500 values round too."""
    chosen = MASKS[mask]
    if chosen.documents is not None:
        chosen = replace(chosen, documents=chosen.documents.cuda())
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    reasons = list(obstacles(name, Request(LENGTH, 64, chosen.kinds, 0.0, 0.0, precision, "cuda", trains=True)))
    if reasons:
        pytest.skip("; ".join(reasons))
    drawn = attention_inputs(2, LENGTH, 2, 64, seed=0, dtype=dtype)
    *leaves, grad = (x.detach().cuda().requires_grad_() for x in drawn)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = {"mask": chosen, "scale": 0.125, "dropout": 0.0, "softcap": 0.0}
    out, lse, *gradients = with_gradients(IMPLEMENTATIONS[name], leaves, grad.detach(), **options)
    want, want_lse, *want_gradients = with_gradients(math_attention, exact, grad.detach().double(), **options)
    if lse is not None:
        assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)
    for ours, exact_result in zip((out, *gradients), (want, *want_gradients), strict=True):
        bound = {torch.bfloat16: 3, torch.float32: 100}[dtype] * torch.finfo(dtype).eps
        assert_close(ours.double(), exact_result, rtol=0, atol=bound * exact_result.abs().max().item())


def test_a_fall_back_to_stored_scores_is_an_error():
    """Head size 516, no multiple of 8, has no fused kernel; torch would store 2,048 x 2,048 scores of each head."""
    x = torch.zeros(1, 2, 2048, 516, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="torch has no fused kernel for it, so it would store all scores"):
        sdpa_attention(x, x, x, mask=Mask(), scale=1.0, dropout=0.0, softcap=0.0)


@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_the_sum_of_parts_gives_the_dense_result_and_gradients(name, mask):
    """Ring attention on GPUs calls these kernels with their log-sum-exp; bf16 rounds each part's output once more."""
    if name == "triton":
        pytest.importorskip("triton")
    chosen = MASKS[mask]
    if chosen.documents is not None:
        chosen = replace(chosen, documents=chosen.documents.cuda())
    drawn = attention_inputs(2, LENGTH, 2, 64, seed=0, dtype=torch.bfloat16)
    *leaves, grad = (x.detach().cuda() for x in drawn)
    exact = [x.double().requires_grad_() for x in leaves]
    options = {"scale": 0.125, "softcap": 0.0}
    out, lse, *gradients = in_parts(name, [*leaves, grad], chosen, torch.arange(LENGTH) // 500, **options)
    want, want_lse, *wanted = with_gradients(math_attention, exact, grad.double(), mask=chosen, dropout=0.0, **options)
    assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)
    for ours, exact_result in zip((out, *gradients), (want, *wanted), strict=True):
        bound = 5 * torch.finfo(torch.bfloat16).eps * exact_result.abs().max().item()
        assert_close(ours.double(), exact_result, rtol=0, atol=bound)
