"""Bad values: a loss or gradient that is not finite, or a loss far above the recent ones.

    stop       training ends; the newest checkpoint is from before the bad iteration
    skip       the step changes no weight, and the model does not learn from its data
    rollback   everything but the position in the data returns to the newest checkpoint; iterations since then count as
               skipped, so the run ends at the same iteration as without the rollback

Skip and rollback automate the manual answer to loss spikes of Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_lite.checkpoint.directory import read_latest
from megatron_lite.checkpoint.saver import Say
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import Group
from megatron_lite.training.checkpointing import load_or_fall_back, load_run
from megatron_lite.training.run import Run
from megatron_lite.training.start import checkpoints_of
from megatron_lite.training.state import StepReport


class Verdict(NamedTuple):
    """The result of an optimizer step and of the judgement of its values."""

    grad_norm: float
    skipped: bool
    bad: str  # see StepReport


def step_unless_bad(run: Run, loss: float, lr: float, measured: Sequence[float]) -> Verdict:
    """Run the optimizer step, without effect where loss or gradients are bad. Collective over the world.

    An overflow that a smaller loss scale can mend is skipped and is not bad.
    """
    optimizer, on_nan = run.optimizer, run.config.faults.on_nan
    can_mend = optimizer.scaler.can_shrink
    is_spike = run.state.is_spike(loss, run.config.faults)
    # Gradients can be finite although the loss is not. With on_nan=stop that does not matter: training ends.
    has_bad_loss = not math.isfinite(loss) and not can_mend and on_nan != "stop" and run.ddp.can_skip
    outcome = optimizer.skip(measured) if is_spike or has_bad_loss else optimizer.step(lr, measured)
    is_finite = math.isfinite(loss) and math.isfinite(outcome.grad_norm)
    is_mended = outcome.skipped and can_mend
    bad = "spike" if is_spike else "" if is_finite or is_mended else "nan"
    return Verdict(outcome.grad_norm, outcome.skipped or bool(bad), bad)


def ranks_with_bad_loss(own: torch.Tensor, world: Group) -> str:
    """The ranks whose own loss `[1]` is not finite. Communicates: one value per rank over the world."""
    losses = all_gather(own, world, dim=0).tolist()
    bad = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    return f" (the loss of rank {', '.join(bad)} is not finite)" if bad and world.size > 1 else ""


def answer_bad_values(run: Run, report: StepReport, say: Say) -> None:
    """Apply `faults` to a bad iteration: raise TrainingError, skip or roll back. Collective over the world."""
    faults, state = run.config.faults, run.state
    if not report.bad:
        if not report.skipped:  # an overflow skip does not reset the counter
            state.bad_in_a_row = 0
        return
    state.bad_in_a_row += 1
    what = description(run, report)
    answer = faults.on_nan if report.bad == "nan" else faults.on_spike
    if answer == "stop":
        raise TrainingError(f"{what}; training stops. {advice(run, report)}")
    if state.bad_in_a_row > faults.patience:
        raise TrainingError(
            f"{what}; {state.bad_in_a_row} bad iterations in a row exceed faults.patience ({faults.patience}); "
            f"training stops. {advice(run, report)}"
        )
    if answer == "skip":
        say(f"SKIPPED {what}: no weight changes")
    else:
        roll_back(run, report, what, say)


def description(run: Run, report: StepReport) -> str:
    """The iteration and its bad value, for messages."""
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
    """What a user can do about a bad value, for messages. A delayed gradient names the iteration that computed it."""
    late = run.config.sync.mode == "delayed" and math.isfinite(report.loss)
    delay = run.config.sync.delay if late else 0
    source = f"iteration {run.state.iteration - delay}, which computed that gradient" if delay else "this iteration"
    return (
        f"Lower optim.lr, lengthen optim.warmup_iterations or look at the data of {source}; the newest checkpoint "
        "is from before it"
    )


def roll_back(run: Run, report: StepReport, what: str, say: Say) -> None:
    """Load the newest checkpoint, and continue with the data after the bad iteration. Collective over the world."""
    bad, root = run.state, checkpoints_of(run.config.run.dir)
    run.saver.wait(say)
    newest = on_first(lambda: read_latest(root), run.ctx.world)
    if newest is None:
        raise TrainingError(f"{what}; no checkpoint exists to roll back to; training stops. {advice(run, report)}")
    rollbacks = bad.rollbacks + 1 if newest == bad.rolled_back_to else 1
    if rollbacks > run.config.faults.patience:
        raise TrainingError(
            f"{what}; {bad.rollbacks} rollbacks to iteration {newest} reach faults.patience; training stops. "
            f"{advice(run, report)}"
        )
    say(f"ROLLING BACK from {what}")
    with run.progress.during("rolling back"):
        load_or_fall_back(run, load_run, root, newest)
    state = run.state
    state.skipped += bad.iteration - state.iteration
    say(
        f"weights and optimizer are those of iteration {state.iteration}; the data of iterations "
        f"{state.iteration + 1} to {bad.iteration} is skipped, and training continues at iteration {bad.iteration + 1}"
    )
    state.rolled_back_to, state.rollbacks = state.iteration, rollbacks
    state.iteration, state.consumed_samples = bad.iteration, bad.consumed_samples
    state.train_samples, state.bad_in_a_row = bad.train_samples, bad.bad_in_a_row
    state.eval_samples, state.order_start = bad.eval_samples, bad.order_start
    state.evaluated_at = bad.evaluated_at
