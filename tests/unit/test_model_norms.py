"""Norms equal their formulas in every dtype."""

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.norms import Norm, SplitRMSNorm, build_head_norm
from tests.helpers.model_runs import layer_options

KINDS = {
    "layernorm": {"norm": "layernorm"},
    "layernorm without bias": {"norm": "layernorm", "norm_bias": False},
    "rmsnorm": {"norm": "rmsnorm"},
    "zero-centered rmsnorm": {"norm": "rmsnorm", "zero_centered_norm": True},
}


def with_random_weights(kind, dtype):
    norm = Norm(ModelConfig(**KINDS[kind]), layer_options(dtype), 48, partial=False)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(48))
    return norm


def by_formula(norm, x):
    """The norm, computed in fp64."""
    x, weight = x.double(), norm.weight.double() + norm.zero_centered
    if not norm.is_rms:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * weight
    return x + norm.bias.double() if norm.bias is not None else x


@pytest.mark.parametrize("kind", KINDS)
def test_norm_follows_its_formula_in_fp64(kind):
    """1e-12: fp64 rounding of sums of 48 numbers. An fp32 step inside would be off by 1e-7."""
    norm = with_random_weights(kind, torch.float64)
    x = torch.randn(5, 3, 48, dtype=torch.float64) * 3 + 2
    assert_close(norm(x), by_formula(norm, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        *((kind, torch.float64) for kind in KINDS),
        *(("rmsnorm", dtype) for dtype in (torch.float16, torch.bfloat16)),
        ("zero-centered rmsnorm", torch.bfloat16),
    ],
)
def test_gradients_of_a_norm_are_those_of_its_formula(kind, dtype):
    """2e-12: fp64 rounding. In 16 bits the gradients of RMSNorm are rounded once, from fp32 sums."""
    norm = with_random_weights(kind, dtype)
    x = (torch.randn(5, 3, 48) * 3 + 2).to(dtype).requires_grad_()
    grad = torch.randn(5, 3, 48).to(dtype)
    inputs = [x, *norm.parameters()]
    got = torch.autograd.grad(norm(x), inputs, grad)
    want = torch.autograd.grad(by_formula(norm, x), inputs, grad.double())
    eps = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    for ours, formula in zip(got, want, strict=True):
        assert ours.dtype == dtype
        assert_close(ours, formula, rtol=2 * eps, atol=2 * eps)


def test_an_fp32_residual_stream_gets_fp32_gradients_and_16_bit_weights_get_theirs():
    """1e-6 for x: fp32 rounding. Its gradient rounded to bf16 would be off by 2e-3."""
    norm = with_random_weights("rmsnorm", torch.bfloat16)
    x, grad = (torch.randn(5, 3, 48) * 3).requires_grad_(), torch.randn(5, 3, 48).bfloat16()
    got = torch.autograd.grad(norm(x), [x, norm.weight], grad)
    want = torch.autograd.grad(by_formula(norm, x), [x, norm.weight], grad.double())
    assert [ours.dtype for ours in got] == [torch.float32, torch.bfloat16]
    for ours, formula, tolerance in zip(got, want, (1e-6, 2**-8), strict=True):
        assert_close(ours.double(), formula.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "weight_bytes"), [("rmsnorm", 2), ("zero-centered rmsnorm", 4)])
def test_rmsnorm_on_the_cpu_keeps_its_input_and_one_value_per_token(kind, weight_bytes):
    """torch's own keeps two fp32 tensors of the size of the input."""
    norm, x = with_random_weights(kind, torch.bfloat16), torch.randn(5, 3, 48).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        norm(x)
    assert sum(tensor.nbytes for tensor in kept) == x.nbytes + 48 * weight_bytes + 5 * 3 * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_16_bit_input_are_not_computed_in_16_bits(kind, dtype):
    """With mean 30 and deviation 1/4, a bf16 variance would have no correct digit and an fp16 sum of squares would
    overflow. Only the normalised value and the output are rounded."""
    norm = with_random_weights(kind, dtype)
    x = (torch.randn(5, 3, 48) / 4 + 30).to(dtype)
    want = by_formula(norm, x)
    eps = torch.finfo(dtype).eps
    assert_close(norm(x).double(), want, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("kind", KINDS)
def test_wider_input_is_normalised_in_its_dtype_and_rounded_once(kind):
    """Rounding an fp32 residual stream before the norm would lose its precision."""
    norm = with_random_weights(kind, torch.bfloat16)
    x = torch.randn(5, 3, 48) + 300
    got = norm(x)
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), by_formula(norm, x), rtol=2**-8, atol=2e-3)  # 2e-3: fp32 rounding of mean 300 vs. 1


def test_norms_are_not_decayed_and_start_as_identity():
    norm = Norm(ModelConfig(), layer_options(torch.float32), 8, partial=False)
    meta = {key: p.meta for key, p in norm.named_parameters()}
    assert {key: (m.init, m.decay, m.shard.is_split) for key, m in meta.items()} == {
        "weight": ("ones", False, False),
        "bias": ("zeros", False, False),
    }


def test_a_zero_centered_norm_starts_as_identity():
    """Its weight is what is added to 1."""
    norm = Norm(ModelConfig(norm="rmsnorm", zero_centered_norm=True), layer_options(torch.float32), 8, partial=False)
    assert norm.weight.meta.init == "zeros"


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_over_all_heads_follows_its_formula(zero_centered):
    """1e-12: fp64 rounding. A norm of each head would differ by the spread of the heads' sizes."""
    config = ModelConfig(hidden_size=48, num_heads=6, qk_norm="full", norm="rmsnorm", zero_centered_norm=zero_centered)
    norm = build_head_norm(config, layer_options(torch.float64), 6)
    assert isinstance(norm, SplitRMSNorm)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(48))
    x = torch.randn(5, 3, 6, 8, dtype=torch.float64) * torch.arange(1, 7)[:, None]
    flat = x.flatten(2)
    want = flat / (flat.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight + zero_centered)
    assert_close(norm(x), want.view_as(x), rtol=0, atol=1e-12)
