"""The times of a phase are compared over all ranks."""

from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.actions import Action
from megatron_lite.training import timeline
from megatron_lite.training.progress import Progress
from megatron_lite.training.timers import PhaseTime, Timers


def compared(seconds: list[float]) -> dict[str, PhaseTime]:
    """The times after one iteration, whose forward takes each rank its seconds; rank 1 also waits."""
    ctx = ParallelContext.create(Grid(dp=dist.get_world_size()), torch.device("cpu"), 60.0)
    clock = SimpleNamespace(now=0.0)
    with patch.object(timeline, "time", SimpleNamespace(perf_counter=lambda: clock.now)):
        progress = Progress()
        progress.timers = Timers(ctx.device)
        with progress.during(Action("F", 0)):
            clock.now += seconds[ctx.rank]
        if ctx.rank == 1:
            with progress.during("pipeline wait"):
                clock.now += 0.5
        progress.timers.end_iteration()
        return progress.timers.compared(ctx.world)


def test_every_rank_gets_the_fastest_and_the_slowest_time(ranks):
    """A rank without the phase counts as zero seconds, otherwise the ranks would gather unequal tensors."""
    expected = {"forward-compute": PhaseTime(1.0, 3.0, 2), "pipeline-wait": PhaseTime(0.0, 0.5, 1)}
    assert ranks(3, compared, [2.0, 1.0, 3.0]) == [expected] * 3
