"""The lines that a run prints at its start and end."""

from megatron_lite.config.attention import DESCRIPTIONS, request_of, select
from megatron_lite.data.blended import Splits
from megatron_lite.text import counted
from megatron_lite.training.corpora import wanted_samples
from megatron_lite.training.logs import RunLog
from megatron_lite.training.memory import num_parameters_of_model
from megatron_lite.training.run import Run
from megatron_lite.training.state import global_batch_size

MANY_SAMPLES = 20_000_000  # building an order of this length takes seconds


def announce(run: Run, log: RunLog, *, builds_splits: bool) -> None:
    """Print model, layout and attention, before the data is opened. Communicates: one value over pp."""
    config, grid, model = run.config, run.ctx.grid, run.config.model
    log.say(
        f"model: {num_parameters_of_model(run):,} parameters; {counted(model.total_layers, 'layer')}, hidden size "
        f"{model.hidden_size:,}, vocabulary {model.vocab_size:,}"
    )
    log.say(
        f"layout: {counted(grid.world_size, 'rank')} on {run.ctx.device.type} (tensor {grid.tp}, pipeline {grid.pp}, "
        f"context {grid.cp}, data {grid.dp}), precision {config.train.precision}"
    )
    attention, why = select(model.attention, request_of(config, run.ctx.device.type, trains=True))
    log.say(f"attention: {attention}, {DESCRIPTIONS[attention]} ({why})")
    for line in run.hooks.layout_lines(run):
        log.say(line)
    samples = wanted_samples(config.train, grid.dp, run.state)[0]
    if samples > MANY_SAMPLES and builds_splits:
        log.say(f"building or reading the order of {samples:,} training samples, which can take minutes")


def announce_data(run: Run, datasets: Splits, log: RunLog) -> None:
    """Print the data of the run from each corpus."""
    if log.active:
        wanted = wanted_samples(run.config.train, run.ctx.dp.size, run.state)
        for line in run.hooks.data_lines(run.config, datasets, wanted):
            log.say(line)


def announce_start(run: Run, log: RunLog) -> None:
    """Print the iterations, and the batch of the first one and after a ramp."""
    train, length, dp = run.config.train, run.config.data.seq_length, run.ctx.dp.size
    full, batch = train.global_batch(dp), global_batch_size(train, dp, run.state.consumed_samples)
    ramp = f" ({batch} at first, for the batch ramps up)" if batch < full else ""
    log.say(
        f"training from iteration {run.state.iteration} to {train.iterations}, {full} sequences of {length} tokens "
        f"each{ramp}; all files are in {run.config.run.dir}"
    )


def announce_end(run: Run, log: RunLog) -> None:
    log.say(
        f"{run.config.run.dir}: training is done at iteration {run.state.iteration} of {run.config.train.iterations}; "
        "raise train.iterations for more, or start a new run.dir"
    )
