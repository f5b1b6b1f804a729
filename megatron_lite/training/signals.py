"""Stopping on request: a signal to any rank becomes one decision of all ranks at the end of an iteration."""

import signal
from types import FrameType

import torch

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Remembers the first stop signal that arrives while it is in force.

    A second one changes nothing: launchers and schedulers both deliver the same signal.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def agreed(self, ctx: ParallelContext) -> str:
        """Name of a signal that some rank received, the same on every rank; empty when there was none.

        Communicates: one all-reduce of a number over the world.
        """
        flag = torch.tensor([self._received], device=ctx.device)
        number = int(all_reduce(flag, ctx.world, op="max").item())
        return signal.Signals(number).name if number else ""
