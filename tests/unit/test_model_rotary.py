"""Rotary embeddings equal explicit complex rotations, and scores depend on distances only."""

import math

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
