"""What is left to add to the gradients once every micro-batch has run.

A word embedding that is also the head is in two places of a pipeline, and its gradient is the sum of what both
stages saw. Adding two numbers gives the same bits in either order, so both copies stay equal.

A parameter that each tensor-parallel rank holds whole gets the whole gradient on each of them, except under
sequence parallelism: there a norm sees only its rank's s/tp of the sequence, and the shares must be summed
(not averaged: the loss is a sum over tokens).
"""

import torch

from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable


def finalize_grads(ddp: DataParallel, table: ParamTable, ctx: ParallelContext) -> None:
    """Makes `ddp.main_grads` the gradients of the global batch.

    Where dp ranks share a parameter out, the ranks of tp and embd, which have one rank in dp, own the same run of it.

    Communicates: waits for the sums over dp; one all-reduce over tp of all sequence-parallel gradients together; one
    of the tied embedding's gradient, [v/tp, h], over embd.
    """
    ddp.finish_grad_sync()
    if not ddp.has_grads:
        return
    partial = [grad for name, grad in ddp.main_grads.items() if table[name].sequence_parallel]
    if partial and ctx.tp.size > 1:
        total = all_reduce(torch.cat([grad.flatten() for grad in partial]), ctx.tp)
        for grad, whole in zip(partial, total.split([grad.numel() for grad in partial]), strict=True):
            grad.copy_(whole.view_as(grad))
    for name, grad in ddp.main_grads.items():
        if table[name].tied:
            grad.copy_(all_reduce(grad, ctx.embd))
