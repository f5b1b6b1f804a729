"""Ranks that compute longer than others on the same work, for which all others wait.

The time of a step is the same on all ranks, because they wait for each other. So the time that a rank waits in
collectives is taken out, in one iteration of every `log.interval`. Ranks of one pipeline stage are compared: stages
differ by design.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from megatron_lite.checkpoint.agreement import all_gathered
from megatron_lite.parallel.waiting import record_waits
from megatron_lite.training.run import Run
from megatron_lite.training.timeline import Timeline

# How much longer than the median of the others, and by how many seconds at least.
LONGER, SECONDS = 1.5, 0.02


class Stragglers:
    """Takes the time of some steps; names a rank that is late in two of them in a row, which is more than noise."""

    def __init__(self, run: Run):
        self._run = run
        self._work = 0.0  # seconds of this rank's own
        self._late: set[int] = set()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around the step whose time is taken."""
        whole, waits = Timeline(self._run.ctx.device), Timeline(self._run.ctx.device)
        whole.begin("step")
        record_waits(waits)
        try:
            yield
        finally:
            record_waits(None)
        whole.end("step")
        self._work = _total(whole) - _total(waits)

    def line(self) -> str:
        """Who is late, by the last step that was measured; empty when nobody is.

        Communicates: a small object over the world.
        """
        own = (self._run.ctx.pp.rank, self._work, socket.gethostname())
        of_ranks = all_gathered(own, self._run.ctx.world)
        late, lines = set(), []
        for rank, (stage, seconds, host) in enumerate(of_ranks):
            others = [time for other, (at, time, _) in enumerate(of_ranks) if at == stage and other != rank]
            usual = median(others) if others else seconds
            if seconds > LONGER * usual and seconds - usual > SECONDS:
                late.add(rank)
                if rank in self._late:
                    lines.append(
                        f"rank {rank} on {host} computes for {seconds:.2f} s an iteration, others {usual:.2f} s"
                    )
        self._late = late
        return f" STRAGGLER: {'; '.join(lines)}" if lines else ""


def _total(timeline: Timeline) -> float:
    return sum(end - start for _, start, end in timeline.seconds())
