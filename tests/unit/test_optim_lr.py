"""optim/lr.py against Megatron-LM's values, values computed by hand and the properties of a schedule."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.schema import OptimConfig
from megatron_lite.optim.lr import learning_rate


def optim(schedule: str, **fields) -> OptimConfig:
    return OptimConfig(**{"schedule": schedule, "lr": 1e-3, "min_lr": 1e-4, "warmup_iterations": 100, **fields})


# Megatron-LM counts samples; with a global batch of one these are its values for warmup 100, decay 1000.
COSINE = {0: 0.0, 50: 5e-4, 100: 1e-3, 550: 5.5e-4, 1000: 1e-4, 1001: 1e-4}


@pytest.mark.parametrize(("steps_done", "expected"), COSINE.items())
def test_cosine_equals_megatron(steps_done, expected):
    """Otherwise loss curves could not be compared with those of Megatron-LM."""
    assert learning_rate(optim("cosine"), steps_done, total=1000) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "steps_done", "expected"),
    [
        ("constant", 0, 0.0),
        ("constant", 5000, 1e-3),
        ("linear", 550, 5.5e-4),
        ("linear", 775, 3.25e-4),
        ("linear", 1000, 1e-4),
        ("inverse-square-root", 400, 5e-4),
        ("inverse-square-root", 900, 1e-3 / 3),
        ("wsd", 101, 1e-3),
        ("wsd", 900, 1e-3),  # the last tenth decays
        ("wsd", 950, 5.5e-4),
        ("wsd", 1000, 1e-4),
    ],
)
def test_other_schedules_equal_values_computed_by_hand(schedule, steps_done, expected):
    """Another curve would train another model under the same config."""
    assert learning_rate(optim(schedule), steps_done, total=1000) == pytest.approx(expected, rel=1e-12)


def test_inverse_square_root_without_warmup_starts_at_the_peak_and_stops_at_the_floor():
    """The formula alone would divide by zero at step 0, and would fall below min_lr."""
    config = optim("inverse-square-root", warmup_iterations=0)
    rates = [learning_rate(config, n, total=1000) for n in (0, 1, 4, 100, 1000)]
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 1e-4, 1e-4], rel=1e-12)


def test_wsd_decays_over_wsd_decay_iterations():
    """By default the last tenth decays."""
    config = optim("wsd", wsd_decay_iterations=400)
    assert learning_rate(config, 600, total=1000) == 1e-3
    assert learning_rate(config, 800, total=1000) == pytest.approx(5.5e-4, rel=1e-12)


def test_decay_ends_at_decay_iterations_rather_than_at_the_end_of_the_run():
    """A run may continue at min_lr."""
    config = optim("linear", decay_iterations=300)
    assert [learning_rate(config, n, total=1000) for n in (200, 300, 999)] == pytest.approx([5.5e-4, 1e-4, 1e-4])


decaying = st.sampled_from(["linear", "cosine", "inverse-square-root", "wsd"])


@given(decaying, st.integers(0, 50), st.integers(51, 200), st.integers(0, 1))
def test_rates_rise_to_the_peak_and_then_fall_to_the_floor(schedule, warmup, end, min_factor):
    """A jump or a rise after warmup would show as a spike in the loss."""
    config = optim(schedule, warmup_iterations=warmup, min_lr=1e-4 * min_factor, wsd_decay_iterations=end - warmup)
    rates = [learning_rate(config, n, total=end) for n in range(end + 20)]
    assert rates[0] == (0.0 if warmup else config.lr)
    assert rates[warmup] == pytest.approx(config.lr, rel=1e-12) and max(rates) <= config.lr * (1 + 1e-12)
    assert all(a < b for a, b in pairwise(rates[: warmup + 1]))
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert rates[end + 1] == config.min_lr and all(map(math.isfinite, rates))
