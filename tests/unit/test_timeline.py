"""Timelines of several ranks, put on one."""

import pytest
import torch

from megatron_lite.training import timeline
from megatron_lite.training.timeline import Clock, Timeline, together


@pytest.fixture
def clock(monkeypatch):
    """What the machine's clock shows, a list of one number; finding the machine's name takes 100 seconds."""
    now = [1000.0]

    def machine() -> str:
        now[0] += 100.0
        return "a"

    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timeline, "_machine", machine)
    return now


def test_ranks_of_one_machine_keep_the_distance_of_their_clocks():
    """The other machine's clock began elsewhere: of it only the distances between its own ranks are known."""
    spans = [("optimizer", 0.25, 0.5)]
    clocks = [Clock("a", 100.5), Clock("a", 100.0), Clock("b", 7.125), Clock("b", 7.0)]
    found = together([(clock, spans) for clock in clocks])
    assert found == [[("optimizer", 0.25 + late, 0.5 + late)] for late in (0.5, 0.0, 0.125, 0.0)]


def test_what_two_ranks_do_at_one_time_is_at_one_time(clock):
    """However long each took before its origin."""
    timelines = []
    for late in (0.0, 7.0):
        clock[0] += late
        timelines.append(Timeline(torch.device("cpu")))
    for each in timelines:
        clock[0] = 2000.0
        each.begin("it")
        clock[0] = 2000.5
        each.end("it")
    first, second = together([(each.clock, each.seconds()) for each in timelines])
    assert first == second == [("it", 900.0, 900.5)]


def test_processes_of_one_machine_say_so():
    assert Timeline(torch.device("cpu")).clock.machine == Timeline(torch.device("cpu")).clock.machine != ""
