"""Rotary embeddings equal explicit complex rotations, and scores depend on distances only."""

import math

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.rotary import RotaryTable, apply_rotary

CPU = torch.device("cpu")


def table_of(head_dim=8, base=10000.0, **fields):
    return RotaryTable(ModelConfig(position="rotary", head_dim=head_dim, rotary_base=base, **fields))


def test_pairs_are_rotated_by_position_times_frequency():
    """Pairs are (i, i + d/2), as Llama weights need; other codes pair neighbours."""
    s, b, n, d, base = 7, 2, 3, 8, 100.0
    x = torch.randn(s, b, n, d, dtype=torch.float64)
    got = apply_rotary(x, *table_of(d, base)(s, device=CPU, dtype=torch.float64))
    want = torch.empty_like(x)
    for position in range(s):
        for i in range(d // 2):
            angle = position * base ** (-2 * i / d)
            rotation = complex(math.cos(angle), math.sin(angle))
            pair = torch.complex(x[position, ..., i], x[position, ..., i + d // 2]) * rotation
            want[position, ..., i], want[position, ..., i + d // 2] = pair.real, pair.imag
    assert_close(got, want, rtol=0, atol=1e-13)  # fp64 rounding


def test_gradients_equal_finite_differences():
    """The rotation is in place in a copy, so it must not change x."""
    x = torch.randn(5, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    tables = table_of(8, 100.0, rotary_percent=0.5)(5, device=CPU, dtype=torch.float64)
    kept = x.detach().clone()
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, *tables), x)
    assert torch.equal(x, kept)


def test_scores_depend_on_the_distance_only():
    d, table = 16, table_of(16, 10000.0)
    query, key = torch.randn(1, 1, 1, d, dtype=torch.float64), torch.randn(1, 1, 1, d, dtype=torch.float64)
    tables = table(50, device=CPU, dtype=torch.float64)
    queries, keys = (apply_rotary(x.expand(50, 1, 1, d), *tables).squeeze() for x in (query, key))
    scores = queries @ keys.T
    for distance in (0, 3, 11):
        along = scores.diagonal(-distance)
        assert_close(along, along[0].expand_as(along), rtol=0, atol=1e-12)
    assert scores.diagonal(-3)[0] != scores.diagonal(-11)[0]


def test_a_longer_sequence_extends_the_table_and_a_shorter_one_reads_its_start():
    table = table_of(8, 10000.0)
    short = table(4, device=CPU, dtype=torch.float32)
    long = table(9, device=CPU, dtype=torch.float32)
    assert long[0].shape == (9, 1, 1, 4)
    assert torch.equal(long[1][:4], short[1])
    assert torch.equal(table(4, device=CPU, dtype=torch.float32)[0], short[0])


def test_16_bit_input_is_rotated_by_fp32_angles():
    """In bf16 the cosine of position 4001 would be off by up to 2^-9."""
    table = table_of(8, 10000.0)
    x = torch.randn(4096, 1, 1, 8, dtype=torch.bfloat16)
    cos, sin = table(4096, device=CPU, dtype=torch.bfloat16)
    assert cos.dtype == torch.float32
    want = apply_rotary(x.double(), *table(4096, device=CPU, dtype=torch.float64))
    got = apply_rotary(x, cos, sin)
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), want, rtol=2**-8, atol=1e-5)


FACTORS = {"rotary_short_factors": (1.0, 1.1, 1.3, 2.0), "rotary_long_factors": (1.5, 2.5, 4.0, 8.0)}
SCALINGS = {
    "linear": ({"rotary_scaling_factor": 3.0}, {"factor": 3.0}),
    "dynamic": ({"rotary_scaling_factor": 3.0}, {"factor": 3.0}),
    "yarn": ({"rotary_scaling_factor": 8.0}, {"factor": 8.0}),
    "yarn with a ramp": (
        {"rotary_scaling_factor": 8.0, "rotary_ramp": (0.5, 3.0), "rotary_attention_factor": 1.5},
        {"factor": 8.0, "beta_slow": 0.5, "beta_fast": 3.0, "attention_factor": 1.5},
    ),
    "llama3": (
        {"rotary_scaling_factor": 8.0, "rotary_ramp": (1.0, 6.0)},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 6.0},
    ),
    "longrope": (
        {"rotary_scaling_factor": 4.0, **FACTORS},
        {"factor": 4.0, "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.5, 4.0, 8.0]},
    ),
}


@pytest.mark.parametrize("extent", [20, 64, 200])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_frequencies_equal_those_of_transformers(scaling, percent, extent):
    """1e-5: transformers computes in fp32. The model was first trained with 64 positions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = scaling.split()[0]
    ours, theirs = SCALINGS[scaling]
    size = int(8 / percent)
    table = table_of(
        size,
        100.0,
        rotary_scaling=kind,
        rotary_percent=percent,
        rotary_original_positions=64,
        max_position_embeddings=256,
        **ours,
    )
    original = {} if kind in ("linear", "dynamic") else {"original_max_position_embeddings": 64}
    parameters = {"rope_type": kind, "rope_theta": 100.0, "partial_rotary_factor": percent, **original, **theirs}
    config = LlamaConfig(head_dim=size, max_position_embeddings=64, rope_parameters=parameters)
    want, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=extent)
    assert_close(table.frequencies(max(extent, 64)).float(), want, rtol=1e-5, atol=0)
    assert table.attention_factor == pytest.approx(factor, rel=1e-12)
    cos, sin = table(16, extent=extent, device=CPU, dtype=torch.float64)
    assert_close(cos[3, 0, 0], (3 * want.double()).cos() * factor, rtol=0, atol=1e-4)
    assert_close(sin[3, 0, 0], (3 * want.double()).sin() * factor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_the_number_of_positions_in_use_selects_the_angles(scaling):
    """A table of a longer text must not serve a shorter one, nor the other way round."""
    table = table_of(8, 100.0, rotary_scaling=scaling, rotary_original_positions=8, **SCALINGS[scaling][0])
    short = table(8, extent=8, device=CPU, dtype=torch.float64)[0]
    long = table(8, extent=16, device=CPU, dtype=torch.float64)[0]
    assert not torch.equal(short, long)
    assert torch.equal(table(8, extent=8, device=CPU, dtype=torch.float64)[0], short)


def test_only_the_first_part_of_a_head_is_rotated():
    x = torch.randn(5, 2, 3, 8, dtype=torch.float64)
    tables = table_of(8, 100.0, rotary_percent=0.5)(5, device=CPU, dtype=torch.float64)
    assert tables[0].shape == (5, 1, 1, 2)
    got = apply_rotary(x, *tables)
    assert torch.equal(got[..., 4:], x[..., 4:])
    assert_close(got[..., :4], apply_rotary(x[..., :4], *tables), rtol=0, atol=0)
