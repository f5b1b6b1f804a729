"""optim/scaler.py: Megatron-LM's rule for the loss scale."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.schema import OptimConfig
from megatron_lite.optim.scaler import DynamicLossScaler, LossScaler, build_scaler


def scaler(initial: float = 65536.0, min_scale: float = 1.0) -> DynamicLossScaler:
    return DynamicLossScaler(initial, min_scale=min_scale, growth_interval=3, hysteresis=2)


def test_scales_equal_those_of_megatron():
    """The second overflow halves the scale, and so does each further one until a full clean interval has passed."""
    made, scales = scaler(), []
    for overflow in (1, 1, 1, 0, 1, 0, 0, 0, 1):
        made.update(bool(overflow))
        scales.append(made.scale)
    assert scales == [65536, 32768, 16384, 16384, 8192, 8192, 8192, 16384, 16384]


def test_the_scale_stops_at_its_minimum():
    """Below it, a smaller scale cannot fix an overflow, and the run must report it."""
    made = scaler(initial=8.0, min_scale=4.0)
    for _ in range(5):
        made.update(True)
    assert made.scale == 4.0 and not made.can_shrink


@given(st.lists(st.booleans(), max_size=40), st.lists(st.booleans(), max_size=40))
def test_a_restored_scaler_continues_like_one_that_was_not_stopped(before, after):
    """Another scale after a resume would skip other steps."""
    first, restored = scaler(), scaler(initial=2.0)
    for overflow in before:
        first.update(overflow)
    restored.load_state_dict(first.state_dict())
    for overflow in after:
        first.update(overflow)
        restored.update(overflow)
        assert restored.state_dict() == first.state_dict()


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_stays_a_power_of_two(overflows):
    """Scaling and unscaling then change no bit of a gradient."""
    made = scaler()
    for overflow in overflows:
        made.update(overflow)
        assert math.frexp(made.scale)[0] == 0.5 and made.scale >= 1.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_only_fp16_is_scaled(precision):
    """A scale in another precision would only add work."""
    made = build_scaler(OptimConfig(), precision)
    made.update(True)
    assert type(made) is LossScaler and made.scale == 1.0 and not made.can_shrink
    made.load_state_dict(made.state_dict())
    assert made.scale == 1.0


def test_the_settings_of_the_fp16_scaler_come_from_the_config():
    """A default in place of a setting would be silent."""
    made = build_scaler(
        OptimConfig(initial_loss_scale=1024.0, loss_scale_window=2, hysteresis=1, min_loss_scale=256.0), "fp16"
    )
    scales = []
    for overflow in (True, True, True, False, False):
        made.update(overflow)
        scales.append(made.scale)
    assert scales == [512, 256, 256, 256, 512]
