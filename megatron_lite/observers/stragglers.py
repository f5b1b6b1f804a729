"""Stragglers: ranks that compute longer than others on the same work.

Ranks wait for each other, so a step takes equally long on all of them. The time in collectives is therefore subtracted,
in one iteration of every `log.interval`. Only ranks of one pipeline stage are compared, because stages differ. Each
compares itself with the others, and reports if it is late.
"""

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

import torch

from megatron_lite.parallel.agreement import gather_objects, same
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.waiting import record_waits
from megatron_lite.training.run import Observer, Run
from megatron_lite.training.state import due
from megatron_lite.training.timeline import Timeline

# A straggler exceeds the median of the others by this factor, and by these seconds.
LONGER, SECONDS = 1.5, 0.02
IN_A_ROW = 3  # measurements; two happen by chance on a busy machine


class Stragglers(Observer):
    """The measurements; a rank that is slow in `IN_A_ROW` of them is a straggler."""

    def __init__(self, run: Run):
        self._run = run
        self._is_measured = False
        self._work = 0.0  # seconds of computation on this rank
        self._late = 0  # measurements in a row in which this rank was slow

    def during_step(self, number: int) -> AbstractContextManager[object]:
        self._is_measured = due(number, self._run.config.log.interval) and self._run.ctx.world.size > 1
        return self.measured() if self._is_measured else nullcontext()

    def after_step(self) -> str:
        is_measured, self._is_measured = self._is_measured, False
        return self.line() if is_measured else ""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """A context for the measured step."""
        step, waits = Timeline(self._run.ctx.device), Timeline(self._run.ctx.device)
        step.begin("step")
        record_waits(waits)
        try:
            yield
        finally:
            record_waits(None)
        step.end("step")
        self._work = _total(step) - _total(waits)

    def line(self) -> str:
        """The message about stragglers in the newest measurements, on the first rank; empty without one.

        Communicates: a value of each rank over tp and dp_cp, and a hash over the world.
        """
        ctx, seconds, report = self._run.ctx, self._work, ""
        own = torch.tensor([seconds], dtype=torch.float64, device=ctx.device)
        others = all_gather(all_gather(own, ctx.tp, dim=0), ctx.dp_cp, dim=0).tolist()
        others.remove(seconds)
        usual = median(others) if others else seconds
        is_late = seconds > LONGER * usual and seconds - usual > SECONDS
        self._late = self._late + 1 if is_late else 0
        if self._late >= IN_A_ROW:
            report = (
                f"rank {ctx.rank} on {socket.gethostname()} needs {seconds:.2f} s of computation per iteration; the "
                f"median of the other ranks of its stage is {usual:.2f} s"
            )
        reports = [] if same(report, ctx.world) else list(filter(None, gather_objects(report, ctx.world)))
        return f"STRAGGLER: {'; '.join(reports)}" if reports else ""


def _total(timeline: Timeline) -> float:
    return sum(end - start for _, start, end in timeline.seconds())
