"""Lines about a run's layout: its schedule, what it waits for, and its sums over data-parallel ranks."""

import math
import socket
from collections import Counter
from collections.abc import Iterator

from megatron_lite.config.schema import Config
from megatron_lite.config.stages import layer_counts
from megatron_lite.parallel.agreement import gather_objects, same
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.plan.bubbles import bubble
from megatron_lite.plan.memory_line import num_local_parameters
from megatron_lite.text import counted, listed, named_ranks
from megatron_lite.training.run import Run
from megatron_lite.training.state import num_microbatches

EQUAL_STAGES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # durations, as the published formulas assume
ENOUGH_MICROBATCHES = 4  # for each stage; Huang et al., GPipe, arXiv 1811.06965, section 2.3


def layout_lines(run: Run) -> Iterator[str]:
    """The lines that a run prints at its start. Communicates: as `slow_layout_lines`."""
    config, grid = run.config, run.ctx.grid
    if grid.pp > 1:
        yield pipeline_line(run)
    yield from slow_layout_lines(run)
    if config.sync.is_local or config.sync.delay:
        yield f"sync: {sync_line(config, grid.dp, num_local_parameters(run))}"


def pipeline_line(run: Run) -> str:
    """The schedule, the layers of each stage, and the bubble with equal stages."""
    parallel = run.config.parallel
    count = num_microbatches(run.config.train, run.ctx.dp.size, run.state.consumed_samples)
    counts = layer_counts(run.config.model, parallel)
    schedule = build_schedule(parallel.schedule, parallel.pipeline, count, parallel.virtual_pipeline)
    idle = bubble(schedule, lambda action, rank: EQUAL_STAGES[action.op])
    return (
        f"pipeline schedule {parallel.schedule} with {count} micro-batches, layers of each stage: "
        f"{' '.join(map(str, counts))}; bubble {idle:.3f} if stages were equal"
    )


def slow_layout_lines(run: Run) -> Iterator[str]:
    """Lines about a layout that waits much: few micro-batches for each stage, tensor parallelism between machines.

    Communicates: with tensor parallelism a hash over tp and one over the world, and the first rank gets the names of
    all machines where a group spans several.
    """
    config, grid = run.config, run.ctx.grid
    count = num_microbatches(config.train, grid.dp, run.state.consumed_samples)
    wanted = ENOUGH_MICROBATCHES * grid.pp
    if grid.pp > 1 and count < wanted:
        yield (
            f"{counted(count, 'micro-batch', 'micro-batches')} for {grid.pp} pipeline stages; the bubble is small with "
            f"{wanted} or more: raise train.global_batch_size, or lower train.micro_batch_size"
        )
    if grid.tp == 1:
        return
    host = socket.gethostname()
    is_inside = same(host, run.ctx.tp)
    hosts = [] if same(is_inside, run.ctx.world) and is_inside else gather_objects(host, run.ctx.world)
    if not hosts:
        return
    spanning = next((ranks for ranks in grid.groups("tp") if len({hosts[rank] for rank in ranks}) > 1), None)
    if spanning is not None:
        machines = listed(sorted({hosts[rank] for rank in spanning}))
        fits = math.gcd(grid.tp, *Counter(hosts).values())
        yield (
            f"the tensor-parallel group of {named_ranks(spanning)} spans {machines}, so every layer waits for the "
            f"network; parallel.tensor: {fits} fits into a machine"
        )


def sync_line(config: Config, dp: int, parameters: int) -> str:
    """The delay between data-parallel ranks, and the bytes that a rank sends.

    A ring all-reduce over n ranks sends 2 (n - 1) / n times the bytes that it sums.
    """
    sync = config.sync
    if sync.mode == "delayed":
        late = counted(sync.delay, "iteration")
        return (
            f"gradients are applied {late} late, and their sums may take as long; no weight changes in the first "
            f"{late}, and the gradients of the last {late} are not used"
        )
    megabytes = 2 * (dp - 1) / dp * parameters * (8 if config.train.precision == "fp64" else 4) / 1e6
    in_fragments = f" in {sync.fragments} fragments" if sync.fragments > 1 else ""
    in_flight = f", in flight for {counted(sync.delay, 'iteration')}" if sync.delay else ""
    return (
        f"{sync.mode}, an outer step every {counted(sync.interval, 'iteration')}{in_fragments}{in_flight}; a rank's "
        f"steps reach the other ranks at most {counted(sync.interval + sync.delay, 'iteration')} later; "
        f"{megabytes / sync.interval:,.1f} MB a step over data-parallel ranks instead of {megabytes:,.1f}"
    )
