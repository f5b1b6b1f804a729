"""Timers: the seconds of each phase on this rank, and their comparison over the ranks."""

import pytest
import torch

from megatron_lite.parallel.context import Group
from megatron_lite.pipeline.actions import Action
from megatron_lite.training import timeline
from megatron_lite.training.progress import Progress
from megatron_lite.training.timers import PhaseTime, Timers, timers_line

ONE = Group("world", (0,), 0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets, in place of the machine's."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(timeline.time, "perf_counter", lambda: Clock.now)
    return Clock


def spend(progress: Progress, clock, what: Action | str, seconds: float) -> None:
    with progress.during(what):
        clock.now += seconds


def progress_with_timers() -> Progress:
    progress = Progress()
    progress.timers = Timers(torch.device("cpu"))
    return progress


def test_phases_of_iterations_are_means_and_others_are_sums(clock):
    """A mean over the wrong number of iterations would not add up to their time."""
    progress = progress_with_timers()
    for _ in range(4):
        spend(progress, clock, Action("F", 0), 1.0)
        spend(progress, clock, Action("F", 1), 1.0)
        spend(progress, clock, Action("I", 0), 0.5)
        spend(progress, clock, Action("W", 0), 0.25)
        clock.now += 10.0  # of no phase
        progress.timers.end_iteration()
        spend(progress, clock, "saving a checkpoint", 3.0)
    times = progress.timers.compared(ONE)
    assert times == {
        "forward-compute": PhaseTime(2.0, 2.0, 0),
        "backward-compute": PhaseTime(0.75, 0.75, 0),
        "save-checkpoint": PhaseTime(12.0, 12.0, 0),
    }
    assert progress.timers.compared(ONE) == {}, "the timers start again from zero"


def test_of_nested_parts_the_outer_one_counts(clock):
    """The forwards of an evaluation are not those of training, and a second count would exceed the wall time."""
    progress = progress_with_timers()
    with progress.during("evaluation"):
        spend(progress, clock, Action("F", 0), 1.0)
        clock.now += 1.0
    spend(progress, clock, "an unknown part", 5.0)
    assert progress.timers.compared(ONE) == {"evaluation": PhaseTime(2.0, 2.0, 0)}


def test_the_line_names_the_slowest_rank():
    """The reader looks for one machine."""
    times = {"forward-compute": PhaseTime(0.01, 0.02, 3), "save-checkpoint": PhaseTime(1.0, 1.5, 0)}
    assert timers_line(times, 4) == (
        " timers (ms per iteration): forward-compute 10.0 to 20.0 (rank 3); outside of iterations (ms in all): "
        "save-checkpoint 1000.0 to 1500.0 (rank 0)"
    )
    assert timers_line({"optimizer": PhaseTime(0.001, 0.001, 0)}, 1) == " timers (ms per iteration): optimizer 1.0"
