"""Parameters that several ranks hold: they start equal, and equal gradients keep them so."""

import torch
from torch import nn

from megatron_lite.errors import TrainingError
from megatron_lite.parallel.collectives import all_gather, all_reduce, broadcast
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable


@torch.no_grad()
def start_alike(params: dict[str, nn.Parameter], table: ParamTable, ctx: ParallelContext) -> None:
    """Gives all replicas of a parameter the values of the first: a model of one's own may have drawn them from the
    rank's random stream, and replicas that start apart never meet, since only gradients are summed.

    Communicates: each parameter over dp, over tp where every rank holds it whole, and a tied embedding over embd.
    """
    for name, parameter in params.items():
        if not table[name].shard.is_split:
            parameter.copy_(broadcast(parameter.clone(), ctx.tp, src=0))
        parameter.copy_(broadcast(parameter.clone(), ctx.dp, src=0))
        if table[name].tied:
            parameter.copy_(broadcast(parameter.clone(), ctx.embd, src=0))


@torch.no_grad()
def refuse_copies_apart(params: dict[str, nn.Parameter], table: ParamTable, ctx: ParallelContext) -> None:
    """Raises TrainingError on every rank when the two copies of a tied embedding differ, in any bit, on any of them.

    Communicates: the copies over embd, and a number over the world. For `train.debug`: it costs a second copy.
    """
    apart = 0
    for name, parameter in params.items():
        if table[name].tied:
            first, last = all_gather(parameter.detach()[None], ctx.embd, dim=0)
            apart += not torch.equal(first, last)
    if all_reduce(torch.tensor(float(apart), device=ctx.device), ctx.world, "max").item():
        raise TrainingError(
            "train.debug: the word embedding of the first pipeline stage and its copy, the head of the last stage, are "
            "not equal any more, so the stages train two models. Whatever changes one of them (a hook, a model of your "
            "own, a broken device) has to change both; the newest checkpoint is from before this iteration"
        )
