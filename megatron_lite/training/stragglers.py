"""Stragglers: ranks that compute longer than others on the same work.

Ranks wait for each other, so a step takes equally long on all of them. The time in collectives is therefore subtracted,
in one iteration of every `log.interval`. Only ranks of one pipeline stage are compared, because stages differ.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.parallel.waiting import record_waits
from megatron_lite.training.run import Run
from megatron_lite.training.timeline import Timeline

# A straggler exceeds the median of the others by this factor, and by these seconds.
LONGER, SECONDS = 1.5, 0.02
IN_A_ROW = 3  # measurements; two happen by chance on a busy machine


class Stragglers:
    """The measurements; a rank that is slow in `IN_A_ROW` of them is a straggler."""

    def __init__(self, run: Run):
        self._run = run
        self._work = 0.0  # seconds of computation on this rank
        self._late: dict[int, int] = {}  # measurements in a row, by rank

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
        """The message about stragglers in the newest measurements; empty without one.

        Communicates: a small object over the world.
        """
        own = (self._run.ctx.pp.rank, self._work, socket.gethostname())
        of_ranks = all_gather_objects(own, self._run.ctx.world)
        late, lines = {}, []
        for rank, (stage, seconds, host) in enumerate(of_ranks):
            others = [time for other, (at, time, _) in enumerate(of_ranks) if at == stage and other != rank]
            usual = median(others) if others else seconds
            if seconds > LONGER * usual and seconds - usual > SECONDS:
                late[rank] = self._late.get(rank, 0) + 1
                if late[rank] >= IN_A_ROW:
                    lines.append(
                        f"rank {rank} on {host} needs {seconds:.2f} s of computation per iteration; the median of the "
                        f"other ranks of its stage is {usual:.2f} s"
                    )
        self._late = late
        return f"STRAGGLER: {'; '.join(lines)}" if lines else ""


def _total(timeline: Timeline) -> float:
    return sum(end - start for _, start, end in timeline.seconds())
