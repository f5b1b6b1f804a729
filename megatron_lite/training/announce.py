"""The lines that a run prints at its start and end."""

import math
import socket
from collections import Counter
from collections.abc import Iterator

from megatron_lite.config.attention import DESCRIPTIONS, request_of, select
from megatron_lite.config.schema import Config
from megatron_lite.config.stages import layer_counts
from megatron_lite.data.blended import Splits
from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.simulate import bubble
from megatron_lite.text import counted, listed, named_ranks
from megatron_lite.training.corpora import data_lines, wanted_samples
from megatron_lite.training.logs import RunLog
from megatron_lite.training.memory import num_local_parameters, num_parameters_of_model
from megatron_lite.training.run import Run
from megatron_lite.training.state import num_microbatches

EQUAL_STAGES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # durations, as the published formulas assume
ENOUGH_MICROBATCHES = 4  # for each stage; Huang et al., GPipe, arXiv 1811.06965, section 2.3
MANY_SAMPLES = 20_000_000  # building an order of this length takes seconds


def announce(run: Run, log: RunLog, seconds: float, *, builds_splits: bool) -> None:
    """Print layout, sizes and schedule in Megatron-LM's words, before the data is opened."""
    config, grid = run.config, run.ctx.grid
    count = num_local_parameters(run)
    model = config.model
    log.say(
        f"using world size: {grid.world_size}, data-parallel size: {grid.dp}, context-parallel size: {grid.cp}, "
        f"tensor-model-parallel size: {grid.tp}, pipeline-model-parallel size: {grid.pp}, "
        f"device: {run.ctx.device.type}, precision: {config.train.precision}"
    )
    log.say(
        f" > padded vocab (size: {model.vocab_size}) with {model.padded_vocab - model.vocab_size} dummy tokens "
        f"(new size: {model.padded_vocab})"
    )
    log.say(f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {count}")
    if grid.pp > 1:
        log.say(f" > {pipeline_line(run)}")
    for line in slow_layout_lines(run):
        log.say(f" > {line}")
    attention, why = select(model.attention, request_of(config, run.ctx.device.type, trains=True))
    log.say(f" > attention: {attention}, {DESCRIPTIONS[attention]} ({why})")
    if config.sync.is_local or config.sync.delay:
        log.say(f" > sync: {sync_line(config, grid.dp, count)}")
    log.say(f"time to initialize megatron (seconds): {seconds:.1f}")
    samples = wanted_samples(config.train, grid.dp)[0]
    if samples > MANY_SAMPLES and builds_splits:
        log.say(f" > building or reading the order of {samples:,} training samples, which can take minutes")


def announce_data(run: Run, datasets: Splits, log: RunLog) -> None:
    """Print the data of a step, and of the run from each corpus. Communicates: one value over pp."""
    data, samples = run.config.data, run.config.train.global_batch(run.ctx.dp.size)
    log.say(
        f" > model: {num_parameters_of_model(run):,} parameters; a step reads {counted(samples, 'sequence')} of "
        f"{counted(data.seq_length, 'token')}, together {samples * data.seq_length:,}"
    )
    if log.active:
        for line in data_lines(run.config, datasets, wanted_samples(run.config.train, run.ctx.dp.size)):
            log.say(f" > {line}")


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

    Communicates: with tensor parallelism the host names over the world.
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
    hosts = all_gather_objects(socket.gethostname(), run.ctx.world)
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


def announce_start(run: Run, log: RunLog) -> None:
    log.date("before the start of training step")
    train = run.config.train
    log.say(
        f"training from iteration {run.state.iteration} to {train.iterations}, "
        f"{train.global_batch(run.ctx.dp.size)} sequences of {run.config.data.seq_length} tokens each"
    )


def announce_end(run: Run, log: RunLog) -> None:
    log.say(
        f"{run.config.run.dir}: training is done at iteration {run.state.iteration} of {run.config.train.iterations}; "
        "raise train.iterations for more, or start a new run.dir"
    )
