"""What the ranks send each other in a step beside gradients and hidden states: sums, and requests to stop."""

import os
import re
import signal
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from megatron_lite.errors import StoppedEarly
from megatron_lite.plan import communication
from megatron_lite.plan.communication import CommunicationRecorder, record_step
from megatron_lite.training.step import train_step
from tests.helpers.runs import train_to_end
from tests.helpers.tiny import tiny_config

TARGETS, SUMS_OF_STAGES, NORM = ("dp", ()), ("pp", (2,)), ("mp", (2,))
# The loss, the number of its targets and the counts of four requests; whether any gradient is not finite.
OF_ALL_RANKS = [("world", (6,)), ("world", ())]
LAYOUTS = {
    "dp": ({}, [TARGETS, *OF_ALL_RANKS]),
    "tp": ({"tensor": 2}, [TARGETS, NORM, *OF_ALL_RANKS]),
    "tp, cp and pp": (
        {"tensor": 2, "pipeline": 2, "context": 2, "sequence": True},
        [TARGETS, SUMS_OF_STAGES, NORM, *OF_ALL_RANKS],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_has_no_collective_of_the_host(monkeypatch, name):
    """The host would wait for the slowest rank while its GPU has no work, and every rank would need a connection of the
    CPU to others. A rank of 4096 starts as many operations as one of 16."""
    devices: set[str] = set()

    class Watching(CommunicationRecorder):
        def _record(self, op, parameters, args):
            found = [each for given in args for each in (given if isinstance(given, list) else [given])]
            devices.update(each.device.type for each in found if isinstance(each, Tensor))
            super()._record(op, parameters, args)

    monkeypatch.setattr(communication, "CommunicationRecorder", Watching)
    parallel, wanted = LAYOUTS[name]
    config = tiny_config("gpt", **{f"parallel__{field}": value for field, value in parallel.items()})
    counts = []
    for world_size in (16, 4096):
        operations = record_step(config, world_size - 1, world_size, num_microbatches=2)
        counts.append(Counter((each.name, each.group) for each in operations))
        small = [each for each in operations if each.tensors[0][1] == "float64"]
        assert {each.name for each in small} == {"all_reduce"}
        assert sorted((each.group, each.tensors[0][0]) for each in small) == sorted(wanted)
    assert devices == {"meta"}
    assert counts[0] == counts[1]


def stopped_by_rank_1(folder: str, is_early: bool) -> str:
    """Train with a signal to rank 1 in iteration 2, before or after its losses are summed; returns the message."""

    def step(run, microbatches):
        has_signal = run.ctx.rank == 1 and run.state.iteration == 1
        if has_signal and is_early:
            os.kill(os.getpid(), signal.SIGUSR1)
        report = train_step(run, microbatches)
        if has_signal and not is_early:
            os.kill(os.getpid(), signal.SIGUSR1)
        return report

    with mock.patch("megatron_lite.training.loop.train_step", step), pytest.raises(StoppedEarly) as raised:
        train_to_end(Path(folder), "gpt", train__iterations=6)
    return str(raised.value)


@pytest.mark.parametrize(("is_early", "last"), [(True, 2), (False, 3)])
def test_a_signal_stops_all_ranks_after_one_iteration(ranks, tmp_path, is_early, last):
    """A rank that stops alone leaves the others in a collective, and its checkpoint without their shards."""
    messages = ranks.within(60.0)(2, stopped_by_rank_1, str(tmp_path), is_early)
    assert messages[0] == messages[1]
    assert re.match(rf"exiting program after receiving SIGUSR1: stopped at iteration {last} of 6, ", messages[0])
