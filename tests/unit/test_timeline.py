"""Timelines of several ranks, put on one."""

import time

import torch

from megatron_lite.training import timeline
from megatron_lite.training.timeline import Clock, Timeline, together


def test_ranks_of_one_machine_keep_the_distance_of_their_clocks():
    """The other machine's clock began elsewhere: of it only the distances between its own ranks are known."""
    spans = [("optimizer", 0.25, 0.5)]
    clocks = [Clock("a", 100.5), Clock("a", 100.0), Clock("b", 7.125), Clock("b", 7.0)]
    found = together([(clock, spans) for clock in clocks])
    assert found == [[("optimizer", 0.25 + late, 0.5 + late)] for late in (0.5, 0.0, 0.125, 0.0)]


def test_what_it_takes_to_name_the_machine_is_before_the_origin(monkeypatch):
    """A clock that is read later than the origin moves all spans of a rank."""
    monkeypatch.setattr(timeline, "_machine", lambda: time.sleep(0.01) or "a")
    watch = timeline.Timeline(torch.device("cpu"))
    watch.begin("it")
    watch.end("it")
    [(_, start, _)] = watch.seconds()
    assert 0 <= start < 0.01
    assert time.perf_counter() - (watch.clock.origin + start) < 0.01


def test_two_timelines_of_a_process_are_apart_by_the_time_between_them():
    device = torch.device("cpu")
    first = Timeline(device)
    time.sleep(0.02)
    second = Timeline(device)
    for each in (first, second):
        each.begin("both")
    for each in (first, second):
        each.end("both")
    [(_, one, _)], [(_, other, _)] = together([(each.clock, each.seconds()) for each in (first, second)])
    assert first.clock.machine == second.clock.machine != ""
    assert abs(one - other) < 0.02 <= second.clock.origin - first.clock.origin
