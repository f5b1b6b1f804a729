"""The training loop: iterations until the end or a stop request, with evaluations and checkpoints."""

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from megatron_lite.data.blended import Dataset
from megatron_lite.data.loader import PrefetchingLoader
from megatron_lite.errors import MegatronLiteError, StoppedEarly
from megatron_lite.parallel.waiting import LostRanks
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.evaluate import Evaluation, build_loader
from megatron_lite.training.faults import answer_bad_values
from megatron_lite.training.logs import RunLog, is_printed
from megatron_lite.training.run import Observer, Run
from megatron_lite.training.state import due, global_batch_size, num_microbatches
from megatron_lite.training.step import local_batches, train_step
from megatron_lite.training.timers import PhaseTime

COLLECTION_INTERVAL = 50  # iterations between two collections of young garbage, the same ones on every rank
TRACED_ITERATION = 3  # of this start; the first two also allocate memory and compile


def train(run: Run, train_set: Dataset, eod: int, log: RunLog, evaluation: Evaluation) -> None:
    """Run iterations from `run.state` to `train.iterations`, save at intervals and at the end, then evaluate.

    Raise StoppedEarly after a stop request and a save, TrainingError for bad values or lost ranks.
    """
    config = run.config
    with ExitStack() as during:
        iterate = Iterations(run, log, [during.enter_context(observer(run)) for observer in run.hooks.observers])
        batches = during.enter_context(build_loader(run, train_set, eod))
        during.enter_context(errors_with_place(run))
        during.enter_context(garbage_collected_by_hand())
        evaluation.evaluate_if_due()  # an evaluation that a stop request interrupted
        while run.state.iteration < config.train.iterations:
            iterate(batches)
            if run.state.iteration % COLLECTION_INTERVAL == 0:
                gc.collect(1)
            is_last = run.state.iteration == config.train.iterations
            reason = ""
            if not is_last:
                evaluation.evaluate_if_due()
                reason = reason_to_stop(run)
            run.saver.report(log.say)
            if is_last or reason or due(run.state.iteration, config.checkpoint.interval):
                with run.progress.during("saving a checkpoint"), run.stop.saving():
                    save_run(run, log.say, must_be_done=is_last or bool(reason))
            if reason:
                raise StoppedEarly(
                    f"exiting program {reason}: stopped at iteration {run.state.iteration} of "
                    f"{config.train.iterations}, and saved a checkpoint; run the same command again to continue"
                )
        evaluation.evaluate_finished_model()
    if run.progress.timers is not None:
        log.times(run.state, run.progress.timers.compared(run.ctx.world))


def reason_to_stop(run: Run) -> str:
    """The reason to stop after this iteration, equal on every rank; empty without one. Several ranks have decided in
    `train_step` or in an evaluation; one rank decides now."""
    reason = run.stop.reason if run.ctx.world.size > 1 else run.stop.agreed(run.ctx)
    if not reason and run.state.iteration == run.config.train.exit_iteration:
        return "because train.exit_iteration is reached"
    return reason


class Iterations:
    """A call trains on one global batch, logs it, and checks for bad values."""

    def __init__(self, run: Run, log: RunLog, observers: Sequence[Observer]) -> None:
        self._run, self._log, self._observers = run, log, observers
        self._first = run.state.iteration + 1
        self._traced = 0
        self._traced_step = run.hooks.traced_step if run.config.log.trace else None
        if self._traced_step is not None:
            self._traced = min(run.state.iteration + TRACED_ITERATION, run.config.train.iterations)

    def __call__(self, batches: PrefetchingLoader) -> None:
        run, log, config = self._run, self._log, self._run.config
        state, dp = run.state, run.ctx.dp.size
        number = state.iteration + 1
        run.progress.iteration = number
        started = time.perf_counter()
        samples = global_batch_size(config.train, dp, state.consumed_samples)
        count = num_microbatches(config.train, dp, state.consumed_samples)
        with run.progress.during("data"):
            portion = local_batches(batches.get(state.consumed_samples, count), run.ctx.cp)
        if self._traced_step is not None and number == self._traced:
            report = self._traced_step(run, portion, log.say)
        else:
            with ExitStack() as during:
                for observer in self._observers:
                    during.enter_context(observer.during_step(number))
                report = train_step(run, portion)
        tokens = sum(batch.tokens.numel() for batch in portion) * dp * run.ctx.cp.size
        report = replace(report, tokens=tokens, seconds=time.perf_counter() - started)
        log.iteration(state, report, samples, report.seconds, self._times(number))
        if number == self._first and (line := run.hooks.memory_line(run)):  # all long-lived memory is allocated by now
            log.say(line)
        for observer in self._observers:
            if line := observer.after_step():
                log.say(line)
        answer_bad_values(run, report, log.say)
        if run.hooks.after_step is not None:
            run.hooks.after_step(run, report)

    def _times(self, number: int) -> dict[str, PhaseTime]:
        """The times of the phases, in an iteration whose line is printed. Then collective over the world."""
        timers = self._run.progress.timers
        if timers is None:
            return {}
        timers.end_iteration()
        return timers.compared(self._run.ctx.world) if is_printed(number, self._run.config.log) else {}


@contextmanager
def garbage_collected_by_hand() -> Iterator[None]:
    """A context without automatic garbage collection: its pauses would come at another time on each rank, and all
    others would wait. torchtitan does the same."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def errors_with_place(run: Run) -> Iterator[None]:
    """Add the current place in the iteration to errors; the launcher compares failures by it."""
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
