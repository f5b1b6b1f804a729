"""One optimizer step. Read this file to see what an iteration of training does.

The loss of every token is divided by the number of target tokens in the global batch, counted before any
forward. So neither micro-batch size, nor accumulation, nor data parallelism, nor unequal masks change the
result: gradients are sums, over tokens, micro-batches and ranks alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.errors import TrainingError
from megatron_lite.optim.deepspeed import DeepSpeedOptimizer
from megatron_lite.optim.lr import learning_rate
from megatron_lite.parallel.collectives import all_gather, all_reduce
from megatron_lite.parallel.context import Group
from megatron_lite.pipeline.engine import Forward
from megatron_lite.pipeline.p2p import Message
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.initialize import DTYPES
from megatron_lite.training.replicas import check_copies_equal, check_replicas_equal
from megatron_lite.training.run import Run
from megatron_lite.training.state import due


@dataclass(frozen=True)
class StepReport:
    """What an iteration shows."""

    loss: float  # mean over the target tokens of the global batch, nats
    grad_norm: float  # before clipping
    lr: float
    loss_scale: float
    skipped: bool  # nothing was changed
    bad: str = ""  # nan: loss or gradient norm not finite, and no loss scale mends it; spike: loss too high
    bad_ranks: str = ""  # where the loss is not finite, for a message


def train_step(run: Run, microbatches: list[Batch]) -> StepReport:
    """One optimizer step over the global batch, of which `microbatches` are this data-parallel rank's share."""
    target_tokens = count_target_tokens(microbatches, run.ctx.dp)
    lr = learning_rate(run.config.optim, run.state.optimizer_steps, run.config.train.iterations)
    loss_scale = run.optimizer.scaler.scale
    run.ddp.zero_grad()
    # A rank that steps on its own takes its share of the batch for the whole: the mean over ranks of such gradients is
    # that of the batch.
    shares = run.ctx.dp.size if run.config.sync.is_local else 1
    loss_sum = forward_backward(run, microbatches, loss_grad=shares * loss_scale / target_tokens)
    with run.progress.during("finalize_grads"):
        finalize_grads(run.ddp, run.table, run.ctx)
    loss = mean_loss(run, loss_sum, target_tokens)
    if due(run.state.iteration + 1, run.config.faults.check_replicas):
        # Before the step: it would overwrite a damaged weight of low precision with its master.
        with run.progress.during("check_replicas"):
            check_replicas_equal(run)
    run.saver.wait_for_copy()
    faults, can_mend = run.config.faults, run.optimizer.scaler.can_shrink
    is_spike = run.state.is_spike(loss, faults)
    # Its gradients may be finite all the same. DeepSpeed would keep them, and where training stops nobody minds.
    is_refused = (
        not (math.isfinite(loss) or can_mend or faults.on_nan == "stop") and run.config.parallel.ddp != "deepspeed"
    )
    with run.progress.during("optimizer"):
        outcome = run.optimizer.skip() if is_spike or is_refused else run.optimizer.step(lr)
    if run.config.train.debug:
        run.ddp.wait_for_params()
        check_copies_equal(run.params, run.table, run.ctx)
    is_finite = math.isfinite(loss) and math.isfinite(outcome.grad_norm)
    is_mended = outcome.skipped and can_mend
    bad = "spike" if is_spike else "" if is_finite or is_mended else "nan"
    skipped = outcome.skipped or bool(bad)
    advance(run, microbatches, skipped=skipped)
    if not skipped:
        run.state.remember(loss)
    where = ranks_with_bad_loss(loss_sum, run.ctx.world) if bad == "nan" else ""
    return StepReport(loss, outcome.grad_norm, lr, loss_scale, skipped, bad, where)


def mean_loss(run: Run, loss_sum: Tensor, target_tokens: float) -> float:
    """Of the target tokens of the global batch, nats, and the same on every rank, to the bit: what is done about a bad
    one must be. Communicates: a number over the world, in which each rank of dp has a sum [1] of its own and all of its
    model-parallel ranks the same one."""
    copies = run.ctx.world.size / run.ctx.dp.size
    return all_reduce(loss_sum.clone(), run.ctx.world).item() / copies / target_tokens


def ranks_with_bad_loss(own: Tensor, world: Group) -> str:
    """Names the ranks whose own loss `[1]` is not finite. Communicates: a number over the world."""
    losses = all_gather(own, world, dim=0).tolist()
    bad = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    return f" (the loss of rank {', '.join(bad)} is not finite)" if bad and world.size > 1 else ""


def forward_backward(run: Run, microbatches: list[Batch], loss_grad: float) -> Tensor:
    """Gradients of every micro-batch, summed into main_grad; returns the sum of their token losses, [1].

    The sum is the same on every rank of pp. Communicates: what the pipeline does, and a number over pp.
    """
    parallel = run.config.parallel
    forward = forward_of(run, microbatches, run.ddp.module)
    if isinstance(run.ddp, DeepSpeedOptimizer):
        return sum_over_pipeline(run, run.ddp.forward_backward(forward, len(microbatches), loss_grad))
    losses = run.engine.run(
        build_schedule(parallel.schedule, run.ctx.pp.size, len(microbatches), len(run.model)),
        forward,
        message_of(run.config, microbatches[0].tokens, run.ctx.device),
        begin_backward=run.ddp.begin_backward,
        loss_grad=loss_grad,
        recorder=run.progress,
    )
    return sum_over_pipeline(run, losses)


def forward_of(run: Run, microbatches: list[Batch], module: Callable[[int], nn.Module]) -> Forward:
    """One micro-batch through one chunk, on the last stage to the sum of its token losses."""

    def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
        batch = microbatches[number]
        given = (batch.tokens, batch.labels) if hidden is None else (batch.tokens, batch.labels, hidden)
        output = module(chunk)(*given)
        is_last = chunk * run.ctx.pp.size + run.ctx.pp.rank == run.engine.last_stage
        return masked_sum(output, batch.loss_mask) if is_last else output

    return forward


def message_of(config: Config, tokens: Tensor, device: torch.device) -> Message:
    """The hidden state that goes from stage to stage for micro-batches like `tokens` [b, s]: [s, b, h], and under
    sequence parallelism [s/tp, b, h]."""
    batch, length = tokens.shape
    if config.parallel.sequence:
        length //= config.parallel.tensor
    dtype = DTYPES[config.train.precision]
    if config.model.fp32_residual:
        dtype = torch.promote_types(dtype, torch.float32)
    return Message((length, batch, config.model.hidden_size), dtype, device)


def sum_over_pipeline(run: Run, losses: list[Tensor]) -> Tensor:
    """Sum of losses that only the last stage knows, [1], on every rank of pp, in fp64."""
    total = torch.zeros(1, dtype=torch.float64, device=run.ctx.device)
    for loss in losses:
        total += loss
    return all_reduce(total, run.ctx.pp)


def masked_sum(losses: Tensor, loss_mask: Tensor) -> Tensor:
    """Sum over the target tokens.

    losses     [s, b]  of each token, as the model's last stage returned them; else TrainingError
    loss_mask  [b, s]  1 for target tokens, 0 for others
    """
    if not isinstance(losses, Tensor) or losses.shape != loss_mask.t().shape:
        got = list(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise TrainingError(
            f"the model returned {got}, but its last stage returns the loss of every token, [s, b] = "
            f"{list(loss_mask.t().shape)}; the mean over the target tokens of the global batch is taken here"
        )
    return (losses * loss_mask.t()).sum()


def count_target_tokens(microbatches: list[Batch], dp: Group) -> float:
    """Target tokens in the global batch; at least 1, so that an empty batch gives a loss of 0 and not nan.

    Communicates: one all-reduce of a number over dp.
    """
    here = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in microbatches]).sum()
    return max(1.0, all_reduce(here.reshape(1), dp).item())


def advance(run: Run, microbatches: list[Batch], skipped: bool) -> None:
    """Moves the counters on; a skipped step consumes its samples but is no optimizer step."""
    samples = len(microbatches) * run.config.train.micro_batch_size * run.ctx.dp.size
    run.state.iteration += 1
    run.state.consumed_samples += samples
    run.state.optimizer_steps += not skipped
    run.state.skipped += skipped
