"""One optimizer step. Read this file to see what an iteration of training does.

The loss of every token is divided by the number of target tokens in the global batch, counted before any forward.
Gradients are sums over tokens, micro-batches and ranks. So neither micro-batch size, nor accumulation, nor data
or context parallelism, nor unequal masks change the result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.errors import TrainingError
from megatron_lite.model.masks import Mask
from megatron_lite.optim.lr import learning_rate
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.zigzag import local_tokens, positions
from megatron_lite.pipeline.engine import Forward
from megatron_lite.pipeline.p2p import Message
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.faults import ranks_with_bad_loss, step_unless_bad
from megatron_lite.training.replicas import check_copies_if_debug, check_replicas_if_due
from megatron_lite.training.run import Run
from megatron_lite.training.state import StepReport


def train_step(run: Run, microbatches: list[Batch]) -> StepReport:
    """One optimizer step over the global batch, of which `microbatches` are the share of this rank of dp and cp."""
    target_tokens = count_target_tokens(microbatches, run.ctx.dp_cp)
    lr = learning_rate(run.config.optim, run.state.optimizer_steps, run.config.train.iterations)
    loss_scale = run.optimizer.scaler.scale
    run.ddp.zero_grad()
    loss_sum = forward_backward(run, microbatches, loss_scale / target_tokens)
    with run.progress.during("finalize_grads"):
        finalize_grads(run.ddp, run.table, run.ctx)
    loss = mean_loss(run, loss_sum, target_tokens)
    check_replicas_if_due(run)
    run.saver.wait_for_copy()  # the optimizer overwrites what a background save copies
    with run.progress.during("optimizer"):
        verdict = step_unless_bad(run, loss, lr)
    check_copies_if_debug(run)
    advance(run, microbatches, loss, skipped=verdict.skipped)
    bad_ranks = ranks_with_bad_loss(loss_sum, run.ctx.world) if verdict.bad == "nan" else ""
    return StepReport(loss, verdict.grad_norm, lr, loss_scale, verdict.skipped, verdict.bad, bad_ranks)


def mean_loss(run: Run, loss_sum: Tensor, target_tokens: float) -> float:
    """The mean loss per target token of the global batch, in nats, bitwise equal on all ranks.

    loss_sum  [1]  of this rank's tokens, equal on all ranks of mp
    Communicates: one value over the world.
    """
    copies = run.ctx.mp.size
    return all_reduce(loss_sum.clone(), run.ctx.world).item() / copies / target_tokens


def forward_backward(run: Run, microbatches: list[Batch], loss_grad: float) -> Tensor:
    """The sum of all token losses of `microbatches`, `[1]`, on every rank of pp; leaves gradients in `run.ddp`.

    loss_grad  the gradient of that sum: the loss scale over the target tokens of the global batch
    Communicates: hidden states over pp, keys and values over cp, gradients over dp_cp, and one value over pp.
    """
    if run.config.sync.is_local:
        # Under local SGD a rank uses its own gradients. Their mean over dp is the gradient of the global batch.
        loss_grad *= run.ctx.dp.size
    parallel = run.config.parallel
    losses = run.ddp.forward_backward(
        run.engine,
        build_schedule(parallel.schedule, run.ctx.pp.size, len(microbatches), len(run.model)),
        forward_of(run, microbatches, run.ddp.module),
        message_of(run.config, microbatches[0].tokens, run.ctx.device),
        loss_grad,
        run.progress,
    )
    return sum_over_pipeline(run, losses)


def forward_of(run: Run, microbatches: list[Batch], module: Callable[[int], nn.Module]) -> Forward:
    """A function that runs one micro-batch through one chunk; on the last stage it returns the sum of the token
    losses."""
    packing = [packing_of(batch) for batch in microbatches]

    def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
        batch = microbatches[number]
        given = (batch.tokens, batch.labels) if hidden is None else (batch.tokens, batch.labels, hidden)
        output = module(chunk)(*given, **packing[number])
        is_last = chunk * run.ctx.pp.size + run.ctx.pp.rank == run.engine.last_stage
        return masked_sum(output, batch.loss_mask) if is_last else output

    return forward


def packing_of(batch: Batch) -> dict[str, Any]:
    """The keyword arguments of a chunk that describe the documents of this micro-batch; none without documents.

    A causal mask needs no lengths: padding is at the end, where no token sees it.
    """
    given: dict[str, Any] = {}
    if batch.position_ids is not None:
        given["position_ids"] = batch.position_ids
    if batch.documents is not None:
        given["mask"] = Mask(documents=batch.documents)
    return given


def local_batches(microbatches: list[Batch], cp: Group) -> list[Batch]:
    """The tokens of this context-parallel rank: [b, s/cp], with their positions in the sequence. Documents and lengths,
    from which masks are made, remain those of the full sequence."""
    return microbatches if cp.size == 1 else [_local_batch(batch, cp) for batch in microbatches]


def _local_batch(batch: Batch, cp: Group) -> Batch:
    tokens, labels, loss_mask = (local_tokens(x, cp, dim=1) for x in batch[:3])
    if batch.position_ids is not None:
        position_ids = local_tokens(batch.position_ids, cp, dim=1)
    else:
        position_ids = positions(batch.tokens.shape[1], cp.rank, cp.size).to(tokens.device)[None].long()
    return Batch(tokens, labels, loss_mask, position_ids, batch.documents, batch.lengths)


def message_of(config: Config, tokens: Tensor, device: torch.device) -> Message:
    """The hidden state that stages send for micro-batches like `tokens` [b, s], this rank's: [s, b, h], or [s/tp, b, h]
    under sequence parallelism."""
    batch, length = tokens.shape
    if config.parallel.sequence:
        length //= config.parallel.tensor
    dtype = PRECISIONS[config.train.precision]
    if config.model.fp32_residual:
        dtype = torch.promote_types(dtype, torch.float32)
    return Message((length, batch, config.model.hidden_size), dtype, device)


def sum_over_pipeline(run: Run, losses: list[Tensor]) -> Tensor:
    """The sum of losses that only the last stage has, [1], on every rank of pp, in fp64."""
    total = torch.zeros(1, dtype=torch.float64, device=run.ctx.device)
    for loss in losses:
        total += loss
    return all_reduce(total, run.ctx.pp)


def masked_sum(losses: Tensor, loss_mask: Tensor) -> Tensor:
    """The sum of the losses of target tokens. Raises TrainingError for losses of another shape.

    losses     [s, b]  as the model's last stage returned them
    loss_mask  [b, s]  1 for target tokens, 0 for others
    """
    if not isinstance(losses, Tensor) or losses.shape != loss_mask.t().shape:
        got = list(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise TrainingError(
            f"the model's last stage returned {got}; it must return the loss of every token, [s, b] = "
            f"{list(loss_mask.t().shape)}"
        )
    return (losses * loss_mask.t()).sum()


def count_target_tokens(microbatches: list[Batch], dp_cp: Group) -> float:
    """The number of target tokens in the global batch, at least 1: an empty batch has a loss of 0, not nan.

    Communicates: one value over dp_cp.
    """
    here = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in microbatches]).sum()
    return max(1.0, all_reduce(here.reshape(1), dp_cp).item())


def advance(run: Run, microbatches: list[Batch], loss: float, skipped: bool) -> None:
    """Advance the counters; a skipped step consumes its samples but is not an optimizer step."""
    run.state.iteration += 1
    run.state.consumed_samples += len(microbatches) * run.config.train.micro_batch_size * run.ctx.dp.size
    run.state.optimizer_steps += not skipped
    run.state.skipped += skipped
    if not skipped:
        run.state.remember(loss)
