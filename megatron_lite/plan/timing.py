"""How long a pass takes: its kernels one after another, and communication beside them until its result is needed.

A kernel takes as long as its products, its memory traffic or its launch (`roofline.py`). An operation of communication
starts when it is called, after earlier ones of its communicator; the kernels behind a wait begin when it has ended. So
communication that the real code overlaps with computing costs nothing here, until it is longer. On a measured CPU
nothing overlaps: Gloo needs the cores.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lite.plan.communication import Communicator, Operation, Wait
from megatron_lite.plan.kernels import Kernel
from megatron_lite.plan.links import Machines
from megatron_lite.plan.measured import MeasuredDevice
from megatron_lite.plan.roofline import seconds
from megatron_lite.plan.stage import Event


@dataclass
class Played:
    """The time of events in a row."""

    seconds: float = 0.0
    compute: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # waits for communication, by group
    in_flight: float = 0.0  # the end of the last operation, if nothing waits for it


class TimeOfEvent(NamedTuple):
    """The start and end of a kernel or an operation of communication."""

    event: Kernel | Operation
    start: float
    end: float


def play(events: Iterable[Event], machines: Machines, spans: list[TimeOfEvent] | None = None) -> Played:
    """The time of these events on one rank, if its peers are always ready. `spans` gets the time of each event."""
    device = machines.device
    played = Played()
    ends: dict[Communicator, list[float]] = defaultdict(list)
    groups: dict[Communicator, str] = {}
    for event in events:
        if isinstance(event, Kernel):
            needed = device.kernel_time(event) if isinstance(device, MeasuredDevice) else seconds(event, device)
            played.seconds += needed
            played.compute += needed
            if spans is not None:
                spans.append(TimeOfEvent(event, played.seconds - needed, played.seconds))
        elif isinstance(event, Operation):
            before = ends[event.communicator][-1] if ends[event.communicator] else 0.0
            end = max(played.seconds, before) + machines.seconds(event)
            ends[event.communicator].append(end)
            if spans is not None:
                spans.append(TimeOfEvent(event, max(played.seconds, before), end))
            played.in_flight = max(played.in_flight, end)
            groups[event.communicator] = event.group
            if isinstance(device, MeasuredDevice):
                _wait(Wait(event.communicator, 0, 0), ends[event.communicator], played, event.group)
        else:
            _wait(event, ends[event.communicator], played, groups.get(event.communicator, ""))
    return played


def _wait(wait: Wait, ends: list[float], played: Played, group: str) -> None:
    """Let the wait's last operation end. It is counted from the newest one: older ones may not be in `ends`."""
    place = len(ends) - 1 - (wait.started - wait.awaited)
    if place >= 0 and ends[place] > played.seconds:
        played.exposed[group] += ends[place] - played.seconds
        played.seconds = ends[place]
