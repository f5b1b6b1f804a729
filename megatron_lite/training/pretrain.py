"""A pretraining run, from a config to a finished run directory.

    initialize_megatron -> get_model / setup_model_and_optimizer -> datasets -> train -> final evaluation

A custom script can call the same functions in the same order, with its own model or data.
"""

import math
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from megatron_lite.checkpoint.lock import locked
from megatron_lite.checkpoint.match import STARTS_TEXTS
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import missing_corpora_paths, raise_any
from megatron_lite.data.blended import Splits
from megatron_lite.data.index_cache import Check, compare_checksums, trust_checksums
from megatron_lite.errors import ConfigError, NoCheckpoint
from megatron_lite.model.build import get_model
from megatron_lite.parallel.agreement import on_all, on_first, same
from megatron_lite.training.announce import announce, announce_data, announce_end, announce_start
from megatron_lite.training.corpora import check_documents_end, check_lengths, open_splits, starts_with, wanted_samples
from megatron_lite.training.evaluate import Evaluation
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.logs import RunLog, write_config
from megatron_lite.training.loop import train
from megatron_lite.training.metrics import ANY_RANK, HEARTBEATS, check_run_dir
from megatron_lite.training.provider import ModelProvider
from megatron_lite.training.run import Hooks, Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.signals import StopRequest
from megatron_lite.training.state import TrainState

DatasetsProvider = Callable[[Run], Splits]
NO_TOKEN = -1  # equals no token id; `validate` checks that data.eod_mask_loss has a tokenizer


def pretrain(
    config: Config,
    model_provider: ModelProvider = get_model,
    datasets_provider: DatasetsProvider | None = None,
    *,
    hooks: Hooks | None = None,
    hint: Callable[[Config], str] | None = None,
) -> TrainState:
    """Train to `train.iterations`, from the newest checkpoint of the run if there is one; return the final counters.

    Collective: every process calls it with the same config. Raise a MegatronLiteError with a message for the user;
    StoppedEarly follows a request to stop, after a checkpoint was saved. `hint` explains a folder that is not a
    checkpoint, after the message about it.
    """
    hooks = hooks or Hooks()
    if config.log.trace and hooks.traced_step is None:
        raise ConfigError("log.trace is true, which training.pretrain alone cannot do; call megatron_lite.pretrain")
    if config.train.tasks and hooks.tasks is None:
        raise ConfigError("train.tasks is given, which training.pretrain alone cannot do; call megatron_lite.pretrain")
    try:
        return run_to_end(config, model_provider, datasets_provider, hooks)
    except NoCheckpoint as error:
        raise NoCheckpoint(f"{error}{hint(config) if hint else ''}") from error
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # local variables refer to groups
        raise
    finally:
        finalize_megatron()


def run_to_end(
    config: Config,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider | None,
    hooks: Hooks,
) -> TrainState:
    """The run, from joining the process group to its end."""
    started = launch_time()
    ctx, rng = initialize_megatron(config)
    with ExitStack() as at_the_end:
        # Machines may not share the folder, so the first rank of each one looks after the files of its ranks.
        ranks = [ANY_RANK] if ctx.world.is_first else [f"{rank:05d}" for rank in ctx.host.ranks]
        on_all(lambda: check_run_dir(config, ranks) if ctx.host.is_first else None, ctx.world)
        lock = at_the_end.enter_context(locked(Path(config.run.dir), world=ctx.world))
        if ctx.world.is_first:
            Path(config.run.exit_code_file).unlink(missing_ok=True)  # of an earlier start
        if ctx.host.is_first:
            folder = Path(config.run.dir)
            for stale in (*folder.glob(HEARTBEATS.format(rank=ranks[0])), folder / "heartbeat" / "hang"):
                stale.unlink(missing_ok=True)  # an old alarm would end this run
        run = setup_model_and_optimizer(config, ctx, rng, model_provider, hooks)
        log = RunLog(run.config, ctx, run.state, lock)
        at_the_end.callback(log.close)
        at_the_end.callback(run.saver.close, log.say)
        announce(run, log, builds_splits=datasets_provider is None)
        datasets = (datasets_provider or build_splits)(run)
        announce_data(run, datasets, log)
        on_first(lambda: write_config(run.config), run.ctx.world)
        return train_and_evaluate(run, datasets, log, started)


def launch_time() -> float:
    """The start of this run on the monotonic clock; the launcher keeps the first start through restarts."""
    launched = os.environ.get("MEGATRON_LITE_LAUNCHED")
    return time.monotonic() - (time.time() - float(launched) if launched else 0.0)


def build_splits(run: Run) -> Splits:
    """Training, validation and test data of `data.paths`, with as many samples as the run needs, in its planned order.

    The first rank of each machine writes missing index files and compares the checksums; then all ranks map them. Only
    ranks of an unknown machine, or with other paths than its first rank, also compare. Collective over the world.
    """
    config, state = run.config, run.state
    raise_any(missing_corpora_paths(config))
    wanted = wanted_samples(config.train, run.ctx.dp.size, state)

    def build(check: Check) -> Splits:
        return open_splits(config, wanted, run.tokenizer, run.origin.get("tokenizer", ""), state, check)

    is_builder = os.environ.get("LOCAL_RANK", "0") == "0"
    splits = on_all(lambda: build(compare_checksums) if is_builder else None, run.ctx.world)
    one_cache = same((os.getcwd(), config.data.paths, config.data.cache_dir), run.ctx.host)
    check = trust_checksums if one_cache and not run.ctx.host.is_first else compare_checksums
    return on_all(lambda: splits or build(check), run.ctx.world)


def train_and_evaluate(run: Run, datasets: Splits, log: RunLog, started: float) -> TrainState:
    """The training loop, then the losses of the finished model on validation and test data."""
    train_config, state = run.config.train, run.state
    eod = run.tokenizer.eod if run.tokenizer is not None else NO_TOKEN
    state.evaluated_at = on_first(log.evaluated_at, run.ctx.world)
    evaluation = Evaluation(run, datasets, eod, log)
    on_all(lambda: check_lengths(datasets, train_config, run.ctx.dp.size, state), run.ctx.world)
    if state.iteration >= train_config.iterations:
        evaluation.evaluate_finished_model()  # an earlier start may have ended before its evaluation
        announce_end(run, log)
        return state
    assert datasets.train is not None, "check_lengths checks it"
    check_documents_end(run.config, datasets.train, eod)
    if run.tokenizer is not None and starts_with(datasets.train, run.tokenizer.bos):
        run.origin[STARTS_TEXTS] = True
    announce_start(run, log)
    with StopRequest(started + (train_config.exit_duration or math.inf)) as run.stop:
        train(run, datasets.train, eod, log, evaluation)
    return run.state
