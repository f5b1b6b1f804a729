"""The whole of a pretraining run, from a config to a finished run directory.

    initialize_megatron -> get_model / setup_model_and_optimizer -> datasets -> train -> final evaluation

Each of these is a function that a script of your own can call in the same order, with its own model or data.
"""

import math
import os
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from megatron_lite.checkpoint.lock import locked
from megatron_lite.config.schema import Config
from megatron_lite.config.stages import layer_counts
from megatron_lite.data.blended import Splits, check_order_is_kept
from megatron_lite.data.statistics import bytes_per_token, unigram_entropy
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.errors import ConfigError, NoCheckpoint, StoppedEarly, counted
from megatron_lite.model.build import get_model
from megatron_lite.parallel.agreement import on_all, on_first
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.simulate import bubble
from megatron_lite.training.corpora import data_lines, open_splits, wanted_samples
from megatron_lite.training.evaluate import evaluate, evaluation_samples
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.logs import RunLog, write_config
from megatron_lite.training.loop import train
from megatron_lite.training.memory import num_local_parameters, num_parameters_of_model
from megatron_lite.training.run import Run
from megatron_lite.training.setup import ModelProvider, setup_model_and_optimizer
from megatron_lite.training.state import TrainState, num_microbatches
from megatron_lite.training.streams import survive_lost_output
from megatron_lite.training.trace import EQUAL_STAGES

DatasetsProvider = Callable[[Run], Splits]
MANY_SAMPLES = 20_000_000  # whose order takes seconds to make
NO_TOKEN = -1  # equals no id; `validate` has made sure that data.eod_mask_loss comes with a tokenizer


def pretrain(
    config: Config,
    model_provider: ModelProvider = get_model,
    datasets_provider: DatasetsProvider | None = None,
    *,
    hint: Callable[[Config], str] | None = None,
) -> TrainState:
    """Trains to `train.iterations` and returns the final counters; goes on from the newest checkpoint of the run.

    Collective: every process of the launch calls it with the same config. Raises a MegatronLiteError whose text
    is for the user; StoppedEarly means that a signal ended it with a checkpoint saved. `hint` explains a folder to load
    from that holds no checkpoint: its text follows the error's.
    """
    survive_lost_output(Path(config.run.dir))
    try:
        return run_to_end(config, model_provider, datasets_provider)
    except NoCheckpoint as error:
        raise NoCheckpoint(f"{error}{hint(config) if hint else ''}") from error
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their locals hold groups
        raise
    finally:
        finalize_megatron()


def run_to_end(config: Config, model_provider: ModelProvider, datasets_provider: DatasetsProvider | None) -> TrainState:
    """What `pretrain` does between joining the process group and leaving it."""
    began, started = time.monotonic(), launch_time()
    ctx, rng = initialize_megatron(config)
    with ExitStack() as at_the_end:
        lock = at_the_end.enter_context(locked(Path(config.run.dir), world=ctx.world))
        if ctx.world.is_first:
            Path(config.run.exit_code_file).unlink(missing_ok=True)  # of the run before
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of each machine, for they may not share the folder
            shutil.rmtree(Path(config.run.dir) / "heartbeat", ignore_errors=True)
        run = setup_model_and_optimizer(config, ctx, rng, model_provider)
        log = RunLog(run.config, ctx, run.state, lock)
        at_the_end.callback(log.close)
        at_the_end.callback(run.saver.close, log.say)
        announce(run, log, time.monotonic() - began)
        samples = wanted_samples(config.train, ctx.dp.size)[0]
        if samples > MANY_SAMPLES and datasets_provider is None:
            log.say(f" > making or reading the order of {samples:,} training samples, which can take minutes")
        datasets = (datasets_provider or build_splits)(run)
        announce_data(run, datasets, log)
        if log.active:
            write_config(run.config)
        return train_and_evaluate(run, datasets, run.tokenizer, log, started)


def launch_time() -> float:
    """When this run was started, on the monotonic clock: through restarts, the launcher's own start."""
    launched = os.environ.get("MEGATRON_LITE_LAUNCHED")
    return time.monotonic() - (time.time() - float(launched) if launched else 0.0)


def build_splits(run: Run) -> Splits:
    """Training, validation and test data of `data.paths`, as long as the run needs them.

    The first rank of each machine writes the index files while the others wait; then all map them. An error of one
    rank is raised on every rank.
    """
    config, state = run.config, run.state
    if not config.data.paths:
        raise ConfigError("data.paths is empty; give the prefix of a .bin/.idx pair that `preprocess` has written")
    wanted = wanted_samples(config.train, run.ctx.dp.size)

    def build() -> Splits:
        return open_splits(config, wanted, run.origin.get("tokenizer", ""))

    if state.consumed_samples:
        check_order_is_kept(
            list(config.data.paths),
            config.data.split,
            seq_length=config.data.seq_length,
            old_num_samples=state.train_samples,
            new_num_samples=wanted[0],
            consumed=state.consumed_samples,
        )
    state.train_samples = wanted[0]
    is_builder = os.environ.get("LOCAL_RANK", "0") == "0"
    splits = on_all(lambda: build() if is_builder else None, run.ctx.world)
    return on_all(lambda: splits or build(), run.ctx.world)


def announce(run: Run, log: RunLog, seconds: float) -> None:
    """The first lines of a run, with Megatron-LM's words."""
    config, grid = run.config, run.ctx.grid
    count = num_local_parameters(run)
    model = config.model
    log.say(
        f"using world size: {grid.world_size}, data-parallel size: {grid.dp}, "
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
    if config.sync.is_local or config.sync.delay:
        log.say(f" > sync: {sync_line(config, grid.dp, count)}")
    log.say(f"time to initialize megatron (seconds): {seconds:.1f}")


def announce_data(run: Run, datasets: Splits, log: RunLog) -> None:
    """What a step reads and what the run reads of each corpus. Communicates: a number over pp."""
    data, samples = run.config.data, run.config.train.global_batch(run.ctx.dp.size)
    log.say(
        f" > model: {num_parameters_of_model(run):,} parameters; a step reads {counted(samples, 'sequence')} of "
        f"{counted(data.seq_length, 'token')}, together {samples * data.seq_length:,}"
    )
    if log.active:
        for line in data_lines(run.config, datasets, wanted_samples(run.config.train, run.ctx.dp.size)):
            log.say(f" > {line}")


def pipeline_line(run: Run) -> str:
    """Schedule, layers of each stage, and the share of time that stages wait if all take equally long."""
    parallel = run.config.parallel
    count = num_microbatches(run.config.train, run.ctx.dp.size, run.state.consumed_samples)
    counts = layer_counts(run.config.model, parallel)
    schedule = build_schedule(parallel.schedule, parallel.pipeline, count, parallel.virtual_pipeline)
    idle = bubble(schedule, lambda action, rank: EQUAL_STAGES[action.op])
    return (
        f"pipeline schedule {parallel.schedule} with {count} micro-batches, layers of each stage: "
        f"{' '.join(map(str, counts))}; bubble {idle:.3f} if stages were equal"
    )


def sync_line(config: Config, dp: int, parameters: int) -> str:
    """How late data-parallel ranks learn of each other, and how much one of them sends: a ring of n ranks sends
    2 (n - 1) / n times what it sums."""
    sync = config.sync
    if sync.mode == "delayed":
        late = counted(sync.delay, "iteration")
        return (
            f"gradients are applied {late} late, and may travel over data-parallel ranks as long; no weight moves in "
            f"the first {late}, and what the last {late} gave is not used"
        )
    megabytes = 2 * (dp - 1) / dp * parameters * (8 if config.train.precision == "fp64" else 4) / 1e6
    in_fragments = f" in {sync.fragments} fragments" if sync.fragments > 1 else ""
    under_way = f", under way for {counted(sync.delay, 'iteration')}" if sync.delay else ""
    return (
        f"{sync.mode}, an outer step every {counted(sync.interval, 'iteration')}{in_fragments}{under_way}; what a rank "
        f"learns reaches the others at most {counted(sync.interval + sync.delay, 'iteration')} later; "
        f"{megabytes / sync.interval:,.1f} MB a step over data-parallel ranks instead of {megabytes:,.1f}"
    )


def train_and_evaluate(
    run: Run, datasets: Splits, tokenizer: Tokenizer | None, log: RunLog, started: float
) -> TrainState:
    """The training loop, at its end with the losses of the finished model on validation and test data."""
    eod = tokenizer.eod if tokenizer is not None else NO_TOKEN
    total = run.config.train.iterations
    validate_too = run.config.train.eval_iterations > 0

    def final_evaluation(stops: Callable[[], str] = str) -> None:
        for name, split in (("validation", datasets.valid), ("test", datasets.test)):
            is_done = on_first(lambda name=name: log.has_evaluation(run.state, name), run.ctx.world)
            if split is not None and validate_too and not is_done:
                loss = evaluate(run, split, eod, lambda: bool(stops()))
                if loss is None:
                    raise StoppedEarly(
                        f"exiting program {stops()}: training is done at iteration {run.state.iteration}, and saved, "
                        "but not its final evaluation; run the same command again for that"
                    )
                log.evaluation(run.state, loss, f"the end of training, iteration {run.state.iteration}", name)
                if name == "validation" and log.active:
                    log.say(in_context(loss, split, evaluation_samples(run), tokenizer))

    if run.state.iteration >= total:
        final_evaluation()  # of a run that ended after its last save, before that was done
        log.say(
            f"{run.config.run.dir}: training is done at iteration {run.state.iteration} of {total}; "
            f"ask for more with train.iterations, or start anew with another run.dir"
        )
        return run.state
    if datasets.train is None:
        raise ConfigError("data.split gives the training part nothing; make its first number larger than 0")
    log.say(
        f"training from iteration {run.state.iteration} to {total}, "
        f"{run.config.train.global_batch(run.ctx.dp.size)} sequences of {run.config.data.seq_length} tokens each"
    )
    valid_set = datasets.valid if validate_too else None
    deadline = started + (run.config.train.exit_duration or math.inf)
    train(run, datasets.train, valid_set, eod, log, final_evaluation, deadline)
    return run.state


def in_context(loss: float, split, samples: int, tokenizer: Tokenizer | None) -> str:
    """The validation loss beside that of a model that knows only how frequent each token is."""
    entropy = unigram_entropy(split, samples)
    text = f"validation loss {loss:.3f} nats/token, unigram entropy {entropy:.3f} nats/token"
    if tokenizer is not None:
        text += f", {loss / math.log(2) / bytes_per_token(split, samples, tokenizer):.3f} bits per byte of source text"
    return text
