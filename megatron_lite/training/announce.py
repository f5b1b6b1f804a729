"""The lines that a run prints at its start and end."""

from megatron_lite.config.attention import DESCRIPTIONS, request_of, select
from megatron_lite.data.blended import Splits
from megatron_lite.text import counted
from megatron_lite.training.corpora import wanted_samples
from megatron_lite.training.logs import RunLog
from megatron_lite.training.memory import num_local_parameters, num_parameters_of_model
from megatron_lite.training.run import Run

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
    for line in run.hooks.layout_lines(run):
        log.say(f" > {line}")
    attention, why = select(model.attention, request_of(config, run.ctx.device.type, trains=True))
    log.say(f" > attention: {attention}, {DESCRIPTIONS[attention]} ({why})")
    log.say(f"time to initialize megatron (seconds): {seconds:.1f}")
    samples = wanted_samples(config.train, grid.dp, run.state)[0]
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
        wanted = wanted_samples(run.config.train, run.ctx.dp.size, run.state)
        for line in run.hooks.data_lines(run.config, datasets, wanted):
            log.say(f" > {line}")


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
