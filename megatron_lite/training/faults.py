"""When numbers go bad: a loss that is not finite or far above the recent ones.

    stop       training ends, and what is saved is from before
    skip       the step changes nothing, and its data is not learned from
    rollback   everything goes back to the newest checkpoint but the place in the data: what was consumed since then is
               counted as skipped, so that the run ends where it would have ended

The last two are what is done by hand about loss spikes: Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1.
"""

import math

from megatron_lite.checkpoint.directory import find_latest
from megatron_lite.checkpoint.saver import Say
from megatron_lite.errors import TrainingError
from megatron_lite.training.checkpointing import load_or_fall_back, load_run
from megatron_lite.training.run import Run
from megatron_lite.training.start import checkpoints_of
from megatron_lite.training.step import StepReport


def answer_bad_numbers(run: Run, report: StepReport, say: Say) -> None:
    """After each iteration: does with a bad one what `faults` says. Raises TrainingError where that is to stop.

    Collective over the world where it rolls back.
    """
    faults, state = run.config.faults, run.state
    if not report.bad:
        if not report.skipped:  # a loss scale that shrinks is no good iteration yet
            state.bad_in_a_row = 0
        return
    state.bad_in_a_row += 1
    what = description(run, report)
    answer = faults.on_nan if report.bad == "nan" else faults.on_spike
    if answer == "stop":
        raise TrainingError(f"{what}; training stops. {advice(run, report)}")
    if state.bad_in_a_row > faults.patience:
        raise TrainingError(
            f"{what}; these were {state.bad_in_a_row} bad iterations in a row, and faults.patience is "
            f"{faults.patience}: training stops. {advice(run, report)}"
        )
    if answer == "skip":
        say(f" SKIPPED {what}: nothing is changed, and its data is not learned from")
    else:
        roll_back(run, report, what, say)


def description(run: Run, report: StepReport) -> str:
    if report.bad == "spike":
        mean = run.state.loss_mean
        return (
            f"iteration {run.state.iteration}: the loss is {report.loss:.4g}, {report.loss / mean:.1f} times the mean "
            f"of recent ones ({mean:.4g})"
        )
    return (
        f"iteration {run.state.iteration}: the loss is {report.loss} and the gradient norm {report.grad_norm}"
        f"{report.bad_ranks}"
    )


def advice(run: Run, report: StepReport) -> str:
    late = run.config.sync.mode == "delayed" and math.isfinite(report.loss)
    delay = run.config.sync.delay if late else 0
    source = f"iteration {run.state.iteration - delay}, where that gradient is from" if delay else "this iteration"
    return (
        f"Lower optim.lr, lengthen optim.warmup_iterations or look at the data of {source}; what was saved is from "
        "before it"
    )


def roll_back(run: Run, report: StepReport, what: str, say: Say) -> None:
    """Loads the newest checkpoint, and goes on with the data that comes after the bad iteration. Collective."""
    bad, root = run.state, checkpoints_of(run.config.run.dir)
    run.saver.wait(say)
    newest = find_latest(root, world=run.ctx.world)
    if newest is None:
        raise TrainingError(f"{what}; there is no checkpoint to roll back to: training stops. {advice(run, report)}")
    rollbacks = bad.rollbacks + 1 if newest == bad.rolled_back_to else 1
    if rollbacks > run.config.faults.patience:
        raise TrainingError(
            f"{what}; training went back to iteration {newest} {bad.rollbacks} times already, and faults.patience is "
            f"{bad.rollbacks}: training stops. {advice(run, report)}"
        )
    say(f" ROLLING BACK from {what}")
    with run.progress.during("rolling back"):
        load_or_fall_back(run, load_run, root, newest, is_own=True)
    state = run.state
    state.skipped += bad.iteration - state.iteration
    say(
        f" weights and optimizer are those of iteration {state.iteration}; the data of iterations "
        f"{state.iteration + 1} to {bad.iteration} is skipped, and training goes on with iteration {bad.iteration + 1}"
    )
    state.rolled_back_to, state.rollbacks = state.iteration, rollbacks
    state.iteration, state.consumed_samples = bad.iteration, bad.consumed_samples
    state.train_samples, state.bad_in_a_row = bad.train_samples, bad.bad_in_a_row
