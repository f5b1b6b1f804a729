"""The time of each action of a rank, for `log.trace`.

On a GPU the marks are events in its stream, because kernels run later than their launch.
"""

import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_lite.pipeline.actions import Action

Timed = tuple[Action | str, float, float]  # action, start and end in seconds


class Clock(NamedTuple):
    """The machine whose clock a timeline was measured with, and the origin on that clock, in seconds."""

    machine: str
    origin: float


class Timeline:
    """A list of spans that are not nested: actions of the pipeline and other parts of the training step."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Action | str, Any, Any]] = []
        machine = _machine()  # before the origin, because it reads a file
        self._origin = self._begun = self._now()
        self.clock = Clock(machine, time.perf_counter() if self._on_gpu else self._origin)

    def begin(self, what: Action | str) -> None:
        self._begun = self._now()

    def end(self, what: Action | str) -> None:
        self._marks.append((what, self._begun, self._now()))

    def seconds(self) -> list[Timed]:
        """All spans, in seconds since the origin."""
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
    """The spans of all ranks on one timeline, whose origin is the earliest one.

    The processes of a machine share a clock (`perf_counter` is Linux's CLOCK_MONOTONIC). Clocks of different machines
    cannot be compared, so on each machine the rank that left the barrier first has its origin at 0.
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
    """A name of this machine; the kernel's random boot id, because host names are not always unique."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()
