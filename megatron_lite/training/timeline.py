"""What a rank did when, for `log.trace`.

On a GPU the marks are events in its stream: what counts is when the work was done, not when it was asked for.
"""

import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_lite.pipeline.actions import Action

Timed = tuple[Action | str, float, float]  # what, from second, to second


class Clock(NamedTuple):
    """Which clock a timeline was measured with, and what it showed at the origin, in seconds."""

    machine: str
    origin: float


class Timeline:
    """A list of spans, not nested: actions of the pipeline, and what the training step does beside them."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Action | str, Any, Any]] = []
        machine = _machine()  # takes a while
        self._origin = self._begun = self._now()
        self.clock = Clock(machine, time.perf_counter() if self._on_gpu else self._origin)

    def begin(self, what: Action | str) -> None:
        self._begun = self._now()

    def end(self, what: Action | str) -> None:
        self._marks.append((what, self._begun, self._now()))

    def seconds(self) -> list[Timed]:
        """Everything that was recorded, in seconds since this timeline was made."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [(what, self._since_origin(start), self._since_origin(end)) for what, start, end in self._marks]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_origin(self, mark: Any) -> float:
        return self._origin.elapsed_time(mark) / 1000 if self._on_gpu else mark - self._origin


def together(timelines: list[tuple[Clock, list[Timed]]]) -> list[list[Timed]]:
    """The spans of all ranks on one time line, which begins where the first rank began.

    The processes of a machine read one clock (`perf_counter` is Linux's CLOCK_MONOTONIC). What another machine's clock
    says at the same moment is unknown; of each machine the rank that left the barrier first has its origin at 0.
    """
    zero: dict[str, float] = {}
    for clock, _ in timelines:
        zero[clock.machine] = min(clock.origin, zero.get(clock.machine, clock.origin))
    late = [clock.origin - zero[clock.machine] for clock, _ in timelines]
    return [
        [(what, start + delay, end + delay) for what, start, end in spans]
        for delay, (_, spans) in zip(late, timelines, strict=True)
    ]


def _machine() -> str:
    """The same in every process that reads one clock: names are not always unique, what the kernel drew at boot is."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()
