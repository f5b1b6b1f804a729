"""Timelines of several ranks, put on one."""

import pytest
import torch

from megatron_lite.plan.trace import Clock, _machine, together
from megatron_lite.training import timeline
from megatron_lite.training.timeline import Timeline


@pytest.fixture
def clock(monkeypatch):
    """The time that the machine's clock shows, as a list of one value."""
    now = [1000.0]
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now[0])
    return now


def test_ranks_of_one_machine_keep_the_distance_of_their_clocks():
    """The other machine's clock began elsewhere: of it only the distances between its own ranks are known."""
    spans = [("optimizer", 0.25, 0.5)]
    clocks = [Clock("a", 100.5), Clock("a", 100.0), Clock("b", 7.125), Clock("b", 7.0)]
    found = together([(clock, spans) for clock in clocks])
    assert found == [[("optimizer", 0.25 + late, 0.5 + late)] for late in (0.5, 0.0, 0.125, 0.0)]


def test_simultaneous_spans_of_two_ranks_stay_simultaneous(clock):
    """The origins of the ranks differ by the time at which each left the barrier."""
    timelines = []
    for late in (0.0, 7.0):
        clock[0] += late
        timelines.append(Timeline(torch.device("cpu")))
    for each in timelines:
        clock[0] = 2000.0
        each.begin("it")
        clock[0] = 2000.5
        each.end("it")
    first, second = together([(Clock("a", each.origin), each.seconds()) for each in timelines])
    assert first == second == [("it", 1000.0, 1000.5)]


def test_a_machine_has_one_name():
    """Otherwise its ranks would count as ranks of different machines, whose clocks cannot be compared."""
    assert _machine() == _machine() != ""
