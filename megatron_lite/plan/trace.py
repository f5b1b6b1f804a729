"""`log.trace`: the timeline of one iteration on every rank, with its measured and its simulated bubble.

Each timeline begins when its rank leaves a barrier, so clocks of different machines may differ. The file has the format
of Chrome's trace viewer; https://ui.perfetto.dev opens it.
"""

import json
import platform
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from megatron_lite.data.loader import Batch
from megatron_lite.files import atomic_write
from megatron_lite.parallel.agreement import gather_objects
from megatron_lite.parallel.collectives import barrier
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.pipeline.actions import Action
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.simulate import Span
from megatron_lite.plan.bubbles import bubble, idle_share
from megatron_lite.plan.layout_lines import EQUAL_STAGES
from megatron_lite.training.metrics import write_errors
from megatron_lite.training.run import Run
from megatron_lite.training.state import StepReport
from megatron_lite.training.step import train_step
from megatron_lite.training.timeline import Timed, Timeline


class Clock(NamedTuple):
    """The machine whose clock a timeline was measured with, and the origin on that clock, in seconds."""

    machine: str
    origin: float


def traced_step(run: Run, microbatches: list[Batch], say: Callable[[str], None]) -> StepReport:
    """Run `train_step`, write its timeline to `run.dir/trace.json` on rank 0, and print the bubble. Collective."""
    if run.ctx.device.type == "cuda":
        torch.cuda.synchronize()
    barrier(run.ctx.world)
    run.progress.timeline = timeline = Timeline(run.ctx.device)
    report = train_step(run, microbatches)
    run.progress.timeline = None
    timelines = gather_timelines(timeline, run.ctx.world)
    if run.ctx.world.is_first:
        path = Path(run.config.run.dir) / "trace.json"
        with write_errors(path.parent):
            atomic_write(path, json.dumps(chrome_trace(timelines, run.ctx)))
        found = bubbles(run, timelines, len(microbatches))
        say(
            f"pipeline of iteration {run.state.iteration}, {run.config.parallel.schedule}, {len(microbatches)} "
            f"micro-batches: bubble {found.measured:.3f} measured, {found.predicted:.3f} predicted from the mean time "
            f"of each stage's actions, {found.equal:.3f} with equal stages; timeline in {path}"
        )
    return report


def gather_timelines(timeline: Timeline, world: Group) -> list[list[Timed]]:
    """The spans of all ranks by one clock on rank 0, an empty list elsewhere."""
    return together(gather_objects((Clock(_machine(), timeline.origin), timeline.seconds()), world))


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


def chrome_trace(timelines: list[list[Timed]], ctx: ParallelContext) -> dict[str, Any]:
    """One row for each rank, with times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, timeline in enumerate(timelines):
        place = ", ".join(f"{axis} {at}" for axis, at in ctx.grid.coordinates(rank).items())
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({place})"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for what, start, end in timeline:
            category = what.op if isinstance(what, Action) else "step"
            times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
            events.append({"ph": "X", "name": str(what), "cat": category, "pid": rank, "tid": 0, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@dataclass(frozen=True)
class Bubbles:
    """The idle share of the ranks of a pipeline."""

    measured: float
    predicted: float  # simulated with the mean time of each stage's actions
    equal: float  # simulated with equal stages


def bubbles(run: Run, timelines: list[list[Timed]], num_microbatches: int) -> Bubbles:
    """The bubbles of rank 0's pipeline; `timelines` has those of all ranks."""
    pp = run.ctx.pp
    spans = [
        Span(stage, what, start, end)
        for stage, rank in enumerate(pp.ranks)
        for what, start, end in timelines[rank]
        if isinstance(what, Action)
    ]
    times: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for span in spans:
        times[span.rank, span.action.op, span.action.chunk].append(span.end - span.start)
    mean = {key: fmean(values) for key, values in times.items()}
    schedule = build_schedule(run.config.parallel.schedule, pp.size, num_microbatches, len(run.model))
    return Bubbles(
        measured=idle_share(spans, num_ranks=pp.size),
        predicted=bubble(schedule, lambda action, rank: mean[rank, action.op, action.chunk]),
        equal=bubble(schedule, lambda action, rank: EQUAL_STAGES[action.op]),
    )
