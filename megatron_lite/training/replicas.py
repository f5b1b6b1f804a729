"""Parameters that several ranks hold: they start equal, and equal gradients keep them so."""

from collections import Counter

import torch
from torch import nn

from megatron_lite.errors import TrainingError
from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.parallel.collectives import all_gather, all_reduce, broadcast
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.training.run import Run


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
def check_copies_equal(params: dict[str, nn.Parameter], table: ParamTable, ctx: ParallelContext) -> None:
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


@torch.no_grad()
def check_replicas_equal(run: Run) -> None:
    """Raises TrainingError on every rank where data-parallel replicas of a weight differ, in any bit.

    Communicates: a number for each parameter over dp, and one over the world.
    """
    run.ddp.wait_for_params()
    names = list(run.params)
    sums = torch.stack([bit_sum(run.params[name].detach()) for name in names])
    of_ranks = all_gather(sums[None], run.ctx.dp, dim=0)
    apart = (of_ranks != of_ranks[0]).any(dim=0)
    found = ""
    if apart.any():
        first = int(apart.nonzero()[0])
        found = differing_ranks(run, [int(value) for value in of_ranks[:, first]], names[first], int(apart.sum()))
    if all_reduce(torch.tensor([float(bool(found))], device=run.ctx.device), run.ctx.world, "max").item():
        reports = dict.fromkeys(filter(None, all_gather_objects(found, run.ctx.world)))
        raise TrainingError(
            f"{run.progress.where()}: data-parallel replicas are not equal any more: {'; '.join(reports)}. Nothing "
            "that came of it is saved; the newest checkpoint is from before. A rank whose memory fails does this, and "
            "so does code that changes weights on some ranks only"
        )


def bit_sum(parameter: torch.Tensor) -> torch.Tensor:
    """Sum of the bits of all numbers as integers, modulo 2**64: any one that changes, changes it. A scalar, int64."""
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return parameter.contiguous().view(as_integers).sum(dtype=torch.int64)


def differing_ranks(run: Run, sums: list[int], name: str, count: int) -> str:
    """Who differs from the others in a tensor, of all those in which replicas differ; of two, both."""
    (common, frequency), *_ = Counter(sums).most_common()
    ranks = run.ctx.dp.ranks
    odd = [rank for rank, value in zip(ranks, sums, strict=True) if value != common]
    more = f" and {count - 1} more" if count > 1 else ""
    if 2 * frequency > len(sums):
        return f"rank {', '.join(map(str, odd))} differs from the other replicas in {name}{more}"
    return f"ranks {', '.join(map(str, ranks))} differ in {name}{more}, and none has a majority"
