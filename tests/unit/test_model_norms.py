"""Norms equal their formulas in every dtype."""

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.model.norms import LayerNorm, RMSNorm
from tests.helpers.model_runs import layer_options


def with_random_weights(kind, dtype):
    norm = kind(48, 1e-5, layer_options(dtype))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(48))
    return norm


def by_formula(norm, x):
    """The norm, computed in fp64."""
    x, weight = x.double(), norm.weight.double()
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * weight
    return x + norm.bias.double() if isinstance(norm, LayerNorm) else x


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norm_follows_its_formula_in_fp64(kind):
    """1e-12: fp64 rounding of sums of 48 numbers. An fp32 step inside would be off by 1e-7."""
    norm = with_random_weights(kind, torch.float64)
    x = torch.randn(5, 3, 48, dtype=torch.float64) * 3 + 2
    assert_close(norm(x), by_formula(norm, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_16_bit_input_are_not_computed_in_16_bits(kind, dtype):
    """With mean 30 and deviation 1/4, a bf16 variance would have no correct digit and an fp16 sum of squares would
    overflow. Only the normalised value and the output are rounded."""
    norm = with_random_weights(kind, dtype)
    x = (torch.randn(5, 3, 48) / 4 + 30).to(dtype)
    want = by_formula(norm, x)
    eps = torch.finfo(dtype).eps
    assert_close(norm(x).double(), want, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_wider_input_is_normalised_in_its_dtype_and_rounded_once(kind):
    """Rounding an fp32 residual stream before the norm would lose its precision."""
    norm = with_random_weights(kind, torch.bfloat16)
    x = torch.randn(5, 3, 48) + 300
    got = norm(x)
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), by_formula(norm, x), rtol=2**-8, atol=2e-3)  # 2e-3: fp32 rounding of mean 300 vs. 1


def test_norms_are_not_decayed_and_start_as_identity():
    meta = {key: p.meta for key, p in LayerNorm(8, 1e-5, layer_options(torch.float32)).named_parameters()}
    assert {key: (m.init, m.decay, m.shard.is_split) for key, m in meta.items()} == {
        "weight": ("ones", False, False),
        "bias": ("zeros", False, False),
    }
