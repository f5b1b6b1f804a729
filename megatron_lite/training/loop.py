"""Iterations until the end, or until someone asks to stop, with evaluations and checkpoints on the way."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megatron_lite.data.blended import Dataset
from megatron_lite.errors import MegatronLiteError, StoppedEarly
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.waiting import LostRanks
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.evaluate import evaluate, loader
from megatron_lite.training.faults import answer_bad_numbers
from megatron_lite.training.logs import RunLog
from megatron_lite.training.memory import memory_line
from megatron_lite.training.run import Run
from megatron_lite.training.signals import StopRequest
from megatron_lite.training.state import due, global_batch_size, num_microbatches
from megatron_lite.training.step import train_step
from megatron_lite.training.stragglers import Stragglers
from megatron_lite.training.trace import TRACED_ITERATION, traced_step
from megatron_lite.training.watchdog import Watchdog


def train(
    run: Run,
    train_set: Dataset,
    valid_set: Dataset | None,
    eod: int,
    log: RunLog,
    final_evaluation: Callable[[Callable[[], str]], None],
    deadline: float,
) -> None:
    """Runs iterations from `run.state` to `train.iterations`; saves at intervals and at the end.

    `deadline`, on the monotonic clock, is when `train.exit_duration` has passed. The final evaluation comes after the
    last save; one that a stop signal interrupts is made at the next start.
    Raises StoppedEarly, after saving, when the run was asked to stop, and TrainingError when numbers went bad or other
    ranks are gone.
    """
    config, state = run.config, run.state
    first = state.iteration + 1
    traced = min(state.iteration + TRACED_ITERATION, config.train.iterations) if config.log.trace else 0
    stragglers = Stragglers(run)
    watchdog = Watchdog(
        run.progress,
        Path(config.run.dir),
        rank=run.ctx.rank,
        world_size=run.ctx.grid.world_size,
        hang_timeout=config.train.hang_timeout,
    )
    with StopRequest(deadline) as stop, watchdog, loader(run, train_set, eod) as batches, named_place(run):
        if state.iteration and not on_first(lambda: log.has_evaluation(state), run.ctx.world):
            evaluate_where_due(run, valid_set, eod, log, stop)  # a stop signal has interrupted it
        while run.state.iteration < config.train.iterations:
            state = run.state
            run.progress.iteration = state.iteration + 1
            started = time.perf_counter()
            samples = global_batch_size(config.train, run.ctx.dp.size, state.consumed_samples)
            count = num_microbatches(config.train, run.ctx.dp.size, state.consumed_samples)
            portion = batches.get(state.consumed_samples, count)
            is_traced = state.iteration + 1 == traced
            compares = due(state.iteration + 1, config.log.interval) and run.ctx.world.size > 1 and not is_traced
            if is_traced:
                report = traced_step(run, portion, log.say)
            else:
                with stragglers.measured() if compares else nullcontext():
                    report = train_step(run, portion)
            log.iteration(state, report, samples, time.perf_counter() - started)
            if state.iteration == first:  # by now everything that stays has been made
                log.say(f" > {memory_line(run)}")
            if compares and (line := stragglers.line()):
                log.say(line)
            answer_bad_numbers(run, report, log.say)
            state = run.state
            last = state.iteration == config.train.iterations
            if not last:
                evaluate_where_due(run, valid_set, eod, log, stop)
            reason = "" if last else stop.agreed(run.ctx)
            if not last and state.iteration == config.train.exit_iteration:
                reason = reason or "because train.exit_iteration is reached"
            run.saver.report(log.say)
            if last or reason or due(state.iteration, config.checkpoint.interval):
                with run.progress.during("saving a checkpoint"), stop.saving():
                    save_run(run, log.say, must_be_done=bool(last or reason))
            if reason:
                raise StoppedEarly(
                    f"exiting program {reason}: stopped at iteration {state.iteration} of "
                    f"{config.train.iterations}, and saved a checkpoint; run the same command again to continue"
                )
        with run.progress.during("the final evaluation"):
            final_evaluation(lambda: stop.agreed(run.ctx))


def evaluate_where_due(run: Run, valid_set: Dataset | None, eod: int, log: RunLog, stop: StopRequest) -> None:
    """Logs the loss on validation data after every `train.eval_interval` iterations, unless it is time to stop."""
    if valid_set is not None and due(run.state.iteration, run.config.train.eval_interval):
        loss = evaluate(run, valid_set, eod, lambda: bool(stop.agreed(run.ctx)))
        if loss is not None:
            log.evaluation(run.state, loss, f"iteration {run.state.iteration}")


@contextmanager
def named_place(run: Run) -> Iterator[None]:
    """Says where in the iteration ranks were lost, or what nobody has foreseen went wrong: an error that comes again
    elsewhere is another one to the launcher, which starts ranks again after it."""
    try:
        yield
    except LostRanks as error:
        raise LostRanks(f"{run.progress.where()}: {error}") from error
    except MegatronLiteError:
        raise
    except Exception as error:
        if sys.version_info >= (3, 11):
            error.add_note(f"in {run.progress.where()}")
        raise
