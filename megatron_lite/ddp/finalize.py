"""The sums of gradients over tp and embd, after every micro-batch has run.

A word embedding that is also the head is on two pipeline stages, and its gradient is the sum of both stages' gradients.
The sum of two values has the same bits in either order, so both copies stay equal.

A parameter that is replicated over tp gets its full gradient on each rank, except under sequence parallelism: there a
norm has only its rank's s/tp of the sequence, and its gradients must be summed (not averaged: the loss is a sum over
tokens). The same is true for copies of a key/value group, and for a norm of each head: each rank has the gradient from
its own heads.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable, tied_names


def finalize_grads(ddp: DataParallel, table: ParamTable, ctx: ParallelContext) -> None:
    """Complete `ddp.main_grads`: the gradients of the global batch.

    The ranks of tp and embd have one rank in dp_cp, so they own the same range of a sharded parameter.

    Communicates: waits for the sums over dp_cp; one all-reduce over tp of all gradients that are partial there; one
    of the tied embedding's gradient, [v/tp, h], over embd.
    """
    ddp.finish_grad_sync()
    if not ddp.has_grads:
        return
    partial = list(_partial_over_tp(ddp, table, ctx)) if ctx.tp.size > 1 else []
    if partial:
        total = all_reduce(torch.cat([each.slots.flatten() for each in partial]), ctx.tp)
        for each, summed in zip(partial, total.split([each.slots.numel() for each in partial]), strict=True):
            each.grad.copy_(summed.view_as(each.slots)[each.slot].view_as(each.grad))
    for name in tied_names(table):
        if (grad := ddp.main_grads.get(name)) is not None:
            grad.copy_(all_reduce(grad, ctx.embd))


class _Partial(NamedTuple):
    """A gradient to sum over tp, in one of `slots`; the others are those of other ranks and have zeros here."""

    grad: Tensor
    slots: Tensor  # [number of slots, elements]
    slot: int


def _partial_over_tp(ddp: DataParallel, table: ParamTable, ctx: ParallelContext) -> Iterator[_Partial]:
    for name, grad in ddp.main_grads.items():
        meta = table[name]
        if meta.sequence_parallel:
            yield _Partial(grad, grad.reshape(1, -1), 0)
        start = ddp.owned[name].start
        for copied in meta.shard.copied(meta.shape, ctx.tp.rank, ctx.tp.size):
            # Of a range of the parameter, the intersection; it is equal on all ranks of tp.
            first, last = max(copied.start - start, 0), min(copied.end - start, grad.numel())
            if first < last:
                own = grad.view(-1)[first:last]
                slots = own.new_zeros(copied.num_slots, last - first)
                slots[copied.slot] = own
                yield _Partial(own, slots, copied.slot)
