"""Timers: the seconds that each phase of training takes on each rank, under Megatron-LM's names where it has one.

Every rank measures all iterations. At each `log.interval` the ranks compare their means, so a slow rank is known by its
number and phase. On a GPU the seconds are those of its stream, because kernels run later than their launch.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import Group
from megatron_lite.pipeline.actions import Action
from megatron_lite.training.timeline import Timeline

PHASES = {  # by the name of a part of an iteration; actions have the letter of their operation
    "data": "batch-generator",
    "F": "forward-compute",
    "B": "backward-compute",
    "I": "backward-compute",
    "W": "backward-compute",
    "pipeline wait": "pipeline-wait",
    "finalize_grads": "all-grads-sync",
    "loss over all ranks": "loss-sync",
    "check_replicas": "check-replicas",
    "optimizer": "optimizer",
    "loading a checkpoint": "load-checkpoint",
    "rolling back": "load-checkpoint",
    "saving a checkpoint": "save-checkpoint",
    "evaluation": "evaluation",
}
NAMES = tuple(dict.fromkeys(PHASES.values()))
OUTSIDE = ("load-checkpoint", "save-checkpoint", "evaluation")  # of iterations


class PhaseTime(NamedTuple):
    """The seconds of a phase on the fastest and the slowest rank: for one iteration, or in all for an `OUTSIDE` one."""

    min_seconds: float
    max_seconds: float
    slowest_rank: int


class Timers:
    """This rank's seconds in each phase since the last call of `compared`. Of nested parts the outer one counts."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)  # by phase
        self._iterations = 0
        self._depth = 0
        self._now, self._before = Timeline(device), Timeline(device)

    def begin(self, what: Action | str) -> None:
        self._depth += 1
        if self._depth == 1:
            self._now.begin(what)

    def end(self, what: Action | str) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._now.end(what)

    def end_iteration(self) -> None:
        """Add up the iteration before this one: a GPU has finished it, so nothing waits."""
        self._iterations += 1
        self._add(self._before)
        self._now, self._before = Timeline(self._device), self._now

    def compared(self, world: Group) -> dict[str, PhaseTime]:
        """The times of every phase that took any, equal on every rank; the timers start again from zero.

        Communicates: three values per phase over the world.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for timeline in (self._before, self._now):
            self._add(timeline)
        self._now, self._before = Timeline(self._device), Timeline(self._device)
        means = [self._seconds[name] / (1 if name in OUTSIDE else max(self._iterations, 1)) for name in NAMES]
        own = torch.tensor(means, dtype=torch.float64, device=self._device)
        most, least = all_reduce(torch.stack((own, -own)), world, "max")
        # The lowest rank with the most seconds, negative: collectives of this package have no minimum.
        slowest = all_reduce(torch.where(own == most, -world.rank, -world.size).to(own), world, "max")
        self._seconds.clear()
        self._iterations = 0
        rows = torch.stack((-least, most, -slowest)).t().tolist()
        return {name: PhaseTime(a, b, int(rank)) for name, (a, b, rank) in zip(NAMES, rows, strict=True) if b}

    def _add(self, timeline: Timeline) -> None:
        for what, start, end in timeline.seconds():
            if name := PHASES.get(what.op if isinstance(what, Action) else what):
                self._seconds[name] += end - start


def timers_line(times: Mapping[str, PhaseTime], num_ranks: int) -> str:
    """The phases for the log, in milliseconds: on one rank, or from the fastest to the slowest rank."""

    def shown(time: PhaseTime) -> str:
        if num_ranks == 1:
            return f"{1000 * time.max_seconds:.1f}"
        return f"{1000 * time.min_seconds:.1f} to {1000 * time.max_seconds:.1f} (rank {time.slowest_rank})"

    inside = [f"{name} {shown(time)}" for name, time in times.items() if name not in OUTSIDE]
    outside = [f"{name} {shown(time)}" for name, time in times.items() if name in OUTSIDE]
    parts = [f"timers (ms per iteration): {', '.join(inside)}"] if inside else []
    parts += [f"outside of iterations (ms in all): {', '.join(outside)}"] if outside else []
    return f" {'; '.join(parts)}"
