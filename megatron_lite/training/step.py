"""One optimizer step. Read this file to see what an iteration of training does.

The loss of every token is divided by the number of target tokens in the global batch, counted before any forward.
Gradients are sums over tokens, micro-batches and ranks. So neither micro-batch size, nor accumulation, nor data
or context parallelism, nor unequal masks change the result.
"""

import math

import torch
from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.errors import TrainingError
from megatron_lite.model.t5 import table_rows
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.waiting import read
from megatron_lite.parallel.zigzag import local_tokens, positions
from megatron_lite.pipeline.engine import Value
from megatron_lite.pipeline.p2p import Message
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.faults import ranks_with_bad_loss, step_unless_bad
from megatron_lite.training.forward_step import Means, Sums, forward_of, means_of, sum_over_pipeline
from megatron_lite.training.replicas import check_copies_if_debug, check_replicas_if_due
from megatron_lite.training.run import Run
from megatron_lite.training.state import StepReport


def train_step(run: Run, microbatches: list[Batch]) -> StepReport:
    """One optimizer step over the global batch, of which `microbatches` are the share of this rank of dp and cp."""
    with run.progress.during("loss over all ranks"):
        target_tokens = count_target_tokens(microbatches, run.ctx)
    lr = run.hooks.learning_rate(run.config.optim, run.state.optimizer_steps, run.config.train.iterations)
    loss_scale = run.optimizer.scaler.scale
    with run.progress.during("optimizer"):
        run.ddp.zero_grad()
    loss_grad = torch.full_like(target_tokens, loss_scale) / target_tokens  # torch multiplies a float by a reciprocal
    sums = forward_backward(run, microbatches, loss_grad)
    with run.progress.during("finalize_grads"):
        finalize_grads(run.ddp, run.table, run.ctx)
    means, measured = means_and_measures(run, sums, target_tokens)
    check_replicas_if_due(run)
    if run.saver.is_copying:
        with run.progress.during("saving a checkpoint"):
            run.saver.wait_for_copy()  # the optimizer overwrites what a background save copies
    with run.progress.during("optimizer"):
        verdict = step_unless_bad(run, means.loss, lr, measured)
    check_copies_if_debug(run)
    advance(run, microbatches, means.loss, skipped=verdict.skipped)
    bad_ranks = ranks_with_bad_loss(sums[:1], run.ctx.world) if verdict.bad == "nan" else ""
    losses = means.named(run.hooks.forward_step)
    return StepReport(means.loss, verdict.grad_norm, lr, loss_scale, verdict.skipped, verdict.bad, bad_ranks, losses)


def means_and_measures(run: Run, total: Tensor, target_tokens: Tensor) -> tuple[Means, list[float]]:
    """The means of the global batch, and the values of `Optimizer.measure`: one wait of the host for the device. Also
    decides about requests to stop.

        total          [2 + 2 * scalars]  the sums of this rank's tokens, equal on all ranks of mp
        target_tokens  []                 of the global batch

    Communicates: `total` and the counts of requests over the world, and as `Optimizer.measure`.
    """
    step, world, size = run.hooks.forward_step, run.ctx.world, len(total)
    with run.progress.during("loss over all ranks"):
        sums = all_reduce(torch.cat([total, run.stop.requests(total.device)]), world)
    with run.progress.during("optimizer"):
        measures = run.optimizer.measure().to(total.device)
    with run.progress.during("loss over all ranks"):
        values = read(torch.cat([sums, target_tokens[None], measures]), "the loss and the gradient norm", world)
    run.stop.decide(values[size : len(sums)])
    means = means_of([value / run.ctx.mp.size for value in values[:size]], run.scalar_names[step])
    counted, *measured = values[len(sums) :]
    factor = rescale_grads(run, counted, means.targets)
    return means, [square * factor**2 for square in measured[:1]] + measured[1:]


def rescale_grads(run: Run, target_tokens: float, targets: float) -> float:
    """Divide the gradients by the targets that the forward step has counted, where they are not the target tokens.

    Returns the factor of the gradients. Raises TrainingError where the engine cannot.
    """
    if targets in (target_tokens, 0.0) or math.isnan(targets):
        return 1.0
    if not run.ddp.can_rescale:
        raise TrainingError(
            f"the forward step returned {targets:g} targets, and the loss mask of the batch has {target_tokens:g}; "
            f"{run.config.engine} with sync.mode {run.config.sync.mode} needs them equal; use parallel.ddp: local or "
            "fsdp, with sync.mode: every_step"
        )
    factor = target_tokens / targets
    if run.ddp.main_grads:
        torch._foreach_mul_(list(run.ddp.main_grads.values()), factor)  # pyright: ignore[reportPrivateImportUsage]
    return factor


def forward_backward(run: Run, microbatches: list[Batch], loss_grad: Value) -> Tensor:
    """The sums of the forward step over `microbatches`, as `Sums.total` has them, on every rank of pp; leaves gradients
    in `run.ddp`.

    loss_grad  the gradient of the sum of losses: the loss scale over the target tokens of the global batch
    Communicates: hidden states over pp, keys and values over cp, gradients over dp_cp, and the sums over pp.
    """
    if run.config.sync.is_local:
        # Under local SGD a rank uses its own gradients. Their mean over dp is the gradient of the global batch.
        loss_grad = loss_grad * run.ctx.dp.size
    parallel, step = run.config.parallel, run.hooks.forward_step
    sums = Sums(run.scalar_names.get(step), run.ctx.device)
    run.ddp.forward_backward(
        run.engine,
        build_schedule(parallel.schedule, run.ctx.pp.size, len(microbatches), len(run.model)),
        forward_of(run, microbatches, run.ddp.module, step, sums),
        message_of(run.config, microbatches[0], run.ctx.device),
        loss_grad,
        run.progress,
    )
    with run.progress.during("loss over all ranks"):
        return sum_over_pipeline(run, step, sums)


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
    local = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    if batch.token_types is not None:
        local["token_types"] = local_tokens(batch.token_types, cp, dim=1)
    return batch._replace(**local)


def message_of(config: Config, like: Batch, device: torch.device) -> Message:
    """The hidden state that stages send for micro-batches like this one of this rank: [s, b, h], or [s/tp, b, h] under
    sequence parallelism; in an encoder_decoder both streams and the tables of relative positions (`model/t5.py`)."""
    batch, length = like.tokens.shape
    length += 0 if like.decoder_tokens is None else like.decoder_tokens.shape[1]
    if config.parallel.sequence:
        length //= config.parallel.tensor
    if like.decoder_tokens is not None:
        length += table_rows(config.model, batch, config.parallel.tensor)
    dtype = PRECISIONS[config.train.precision]
    if config.model.fp32_residual:
        dtype = torch.promote_types(dtype, torch.float32)
    return Message((length, batch, config.model.hidden_size), dtype, device)


def count_target_tokens(microbatches: list[Batch], ctx: ParallelContext) -> Tensor:
    """[] in fp64: the number of target tokens in the global batch, at least 1: an empty batch has a loss of 0, not nan.

    Communicates: one value over dp if the loader has counted, else over dp_cp; the host does not wait for it.
    """
    counted = [batch.num_targets for batch in microbatches]
    if None in counted:
        here, group = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in microbatches]).sum(), ctx.dp_cp
    else:  # a copy from the host would wait for a GPU; `full` does not
        here, group = torch.full((), sum(counted), dtype=torch.float64, device=ctx.device), ctx.dp  # type: ignore[arg-type]
    return all_reduce(here, group).clamp(min=1.0)


def advance(run: Run, microbatches: list[Batch], loss: float, skipped: bool) -> None:
    """Advance the counters; a skipped step consumes its samples but is not an optimizer step."""
    run.state.iteration += 1
    run.state.consumed_samples += len(microbatches) * run.config.train.micro_batch_size * run.ctx.dp.size
    run.state.optimizer_steps += not skipped
    run.state.skipped += skipped
    if not skipped:
        run.state.remember(loss)
