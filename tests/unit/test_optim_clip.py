"""optim/clip.py in one process: the rank that counts a parameter, the precision of the norm, and the coefficient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.optim.clip import clip_coefficient, counts_here, grad_sums, norm_of
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, Shard

CTX = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=10)


def meta(shape: tuple[int, ...], **fields) -> ParamMeta:
    return ParamMeta(shape, fields.pop("shard", Shard()), "normal", **fields)


def grad_norm(grads, table, ctx):
    return norm_of(grad_sums(grads, table, ctx).tolist())


@pytest.mark.parametrize("grid", [Grid(tp=2, dp=2, pp=2), Grid(tp=4), Grid(tp=2, cp=2, dp=2)])
def test_every_element_of_the_model_counts_on_exactly_one_rank_of_a_model_group(grid):
    """A replicated or tied parameter that counted twice would make the norm too large."""
    views = [ParallelContext.at(grid, rank) for rank in range(grid.world_size)]
    for group in grid.groups("tp"):  # one pipeline stage of one model
        members = [views[rank] for rank in group]
        assert sum(counts_here(meta((4, 4)), ctx) for ctx in members) == 1
        assert sum(counts_here(meta((4, 4), shard=Shard(0)), ctx) for ctx in members) == grid.tp
        assert sum(counts_here(meta((4, 4), tied=True, tied_to="original"), ctx) for ctx in members) == 0
        assert sum(counts_here(meta((4, 4), tied=True), ctx) for ctx in members) == 1


def test_the_norm_of_a_large_fp32_gradient_has_seven_correct_digits():
    """A plain fp32 sum loses 6e-4 here, and the loss depends on how the tensor is sharded."""
    grad = torch.randn(20_000_000, generator=torch.Generator().manual_seed(1))
    expected = grad.double().norm().item()
    assert grad_norm({"w": grad}, {"w": meta((20_000_000,))}, CTX) == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_fp64_gradients_has_the_precision_of_fp64():
    """In an fp64 run, a norm in fp32 would make the layouts differ through the clip coefficient."""
    grads = {"w": torch.tensor([1.0, 1e-9], dtype=torch.float64), "b": torch.tensor([1e-9], dtype=torch.float64)}
    table = {"w": meta((2,)), "b": meta((1,))}
    assert grad_norm(grads, table, CTX) ** 2 - 1 == pytest.approx(2e-18, abs=5e-16)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("tied_to", ["", "w"])
def test_an_inf_or_nan_anywhere_makes_the_norm_not_finite(bad, tied_to):
    """Also in a copy that does not count: the step would otherwise be applied."""
    grads = {"w": torch.ones(3), "copy": torch.tensor([1.0, bad])}
    assert not math.isfinite(grad_norm(grads, {"w": meta((3,)), "copy": meta((2,), tied_to=tied_to)}, CTX))


@given(st.floats(0, 1e30), st.floats(1e-6, 1e6))
def test_clipping_limits_the_norm_and_leaves_smaller_gradients_unchanged(norm, limit):
    coefficient = clip_coefficient(norm, limit)
    assert 0 <= coefficient <= 1 and coefficient * norm <= limit * (1 + 1e-12)
    assert coefficient == 1 or norm + 1e-6 > limit


def test_a_limit_of_zero_turns_clipping_off():
    """Taken literally, it would make every gradient zero."""
    assert clip_coefficient(1e9, 0.0) == 1.0
