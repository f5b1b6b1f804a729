"""The sums of gradients over tp and embd, after every micro-batch has run.

A word embedding that is also the head is on two pipeline stages, and its gradient is the sum of both stages' gradients.
The sum of two values has the same bits in either order, so both copies stay equal.

A parameter that is replicated over tp gets its full gradient on each rank, except under sequence parallelism: there a
norm has only its rank's s/tp of the sequence, and its gradients must be summed (not averaged: the loss is a sum over
tokens).
"""

import torch

from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable


def finalize_grads(ddp: DataParallel, table: ParamTable, ctx: ParallelContext) -> None:
    """Complete `ddp.main_grads`: the gradients of the global batch.

    The ranks of tp and embd have one rank in dp, so they own the same range of a sharded parameter.

    Communicates: waits for the sums over dp; one all-reduce over tp of all sequence-parallel gradients together; one
    of the tied embedding's gradient, [v/tp, h], over embd.
    """
    ddp.finish_grad_sync()
    if not ddp.has_grads:
        return
    partial = [grad for name, grad in ddp.main_grads.items() if table[name].sequence_parallel]
    if partial and ctx.tp.size > 1:
        total = all_reduce(torch.cat([grad.flatten() for grad in partial]), ctx.tp)
        for grad, summed in zip(partial, total.split([grad.numel() for grad in partial]), strict=True):
            grad.copy_(summed.view_as(grad))
    for name, grad in ddp.main_grads.items():
        if table[name].tied:
            grad.copy_(all_reduce(grad, ctx.embd))
