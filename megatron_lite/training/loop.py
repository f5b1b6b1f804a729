"""Iterations until the end, or until someone asks to stop, with evaluations and checkpoints on the way."""

import math
import time
from collections.abc import Callable

from megatron_lite.data.blended import Dataset
from megatron_lite.errors import StoppedEarly, TrainingError
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.evaluate import evaluate, loader
from megatron_lite.training.logs import RunLog
from megatron_lite.training.memory import memory_line
from megatron_lite.training.run import Run
from megatron_lite.training.signals import StopRequest
from megatron_lite.training.state import global_batch_size, num_microbatches
from megatron_lite.training.step import StepReport, train_step
from megatron_lite.training.trace import TRACED_ITERATION, traced_step


def train(
    run: Run,
    train_set: Dataset,
    valid_set: Dataset | None,
    eod: int,
    log: RunLog,
    final_evaluation: Callable[[], None],
) -> None:
    """Runs iterations from `run.state` to `train.iterations`; saves at intervals and at the end.

    The final evaluation comes after the last save, and is not interrupted by a stop signal.
    Raises StoppedEarly, after saving, when a rank was asked to stop, and TrainingError when numbers went bad.
    """
    config, state = run.config, run.state
    first = state.iteration + 1
    traced = min(state.iteration + TRACED_ITERATION, config.train.iterations) if config.log.trace else 0
    with StopRequest() as stop, loader(run, train_set, eod) as batches:
        while state.iteration < config.train.iterations:
            started = time.perf_counter()
            samples = global_batch_size(config.train, run.ctx.dp.size, state.consumed_samples)
            count = num_microbatches(config.train, run.ctx.dp.size, state.consumed_samples)
            portion = batches.get(state.consumed_samples, count)
            is_traced = state.iteration + 1 == traced
            report = traced_step(run, portion, log.say) if is_traced else train_step(run, portion)
            log.iteration(state, report, samples, time.perf_counter() - started)
            if state.iteration == first:  # by now everything that stays has been made
                log.say(f" > {memory_line(run)}")
            refuse_bad_numbers(run, report)
            last = state.iteration == config.train.iterations
            if valid_set is not None and not last and due(state.iteration, config.train.eval_interval):
                log.evaluation(state, evaluate(run, valid_set, eod), f"iteration {state.iteration}")
            signal = "" if last else stop.agreed(run.ctx)
            run.saver.report(log.say)
            if last or signal or due(state.iteration, config.checkpoint.interval):
                save_run(run, log.say, must_be_done=bool(last or signal))
            if signal:
                raise StoppedEarly(
                    f"exiting program after receiving {signal}: stopped at iteration {state.iteration} of "
                    f"{config.train.iterations} with a checkpoint saved; run the same command again to go on"
                )
        final_evaluation()


def due(iteration: int, interval: int) -> bool:
    """Whether something that happens every `interval` iterations (0: never) happens after this one."""
    return interval > 0 and iteration % interval == 0


def refuse_bad_numbers(run: Run, report: StepReport) -> None:
    """Stops training when the loss or the gradient norm is not finite and no loss scaler can mend it.

    No checkpoint holds what came of it: the newest is from before this iteration.
    """
    mended = report.skipped and run.config.train.precision == "fp16"
    if mended or (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
        return
    delay = run.config.sync.delay if run.config.sync.mode == "delayed" else 0
    source = f"iteration {run.state.iteration - delay}, where that gradient is from" if delay else "this iteration"
    raise TrainingError(
        f"iteration {run.state.iteration}: the loss is {report.loss} and the gradient norm {report.grad_norm}; "
        f"training stops. Lower optim.lr, lengthen optim.warmup_iterations or look at the data of {source}; the "
        "newest checkpoint is from before it"
    )
