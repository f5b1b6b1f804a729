"""Timelines of several ranks, put on one."""

import time

import torch

from megatron_lite.training.timeline import Clock, Timeline, together


def test_ranks_of_one_machine_keep_the_distance_of_their_clocks():
    """The other machine's clock began elsewhere: of it only the distances between its own ranks are known."""
    spans = [("optimizer", 0.25, 0.5)]
    clocks = [Clock("a", 100.5), Clock("a", 100.0), Clock("b", 7.125), Clock("b", 7.0)]
    found = together([(clock, spans) for clock in clocks])
    assert found == [[("optimizer", 0.25 + late, 0.5 + late)] for late in (0.5, 0.0, 0.125, 0.0)]


def test_two_timelines_of_a_process_are_apart_by_the_time_between_them():
    device = torch.device("cpu")
    first = Timeline(device)
    time.sleep(0.02)
    second = Timeline(device)
    for timeline in (first, second):
        timeline.begin("both")
    for timeline in (first, second):
        timeline.end("both")
    [(_, one, _)], [(_, other, _)] = together([(each.clock, each.seconds()) for each in (first, second)])
    assert first.clock.machine == second.clock.machine != ""
    assert abs(one - other) < 0.02 <= second.clock.origin - first.clock.origin
