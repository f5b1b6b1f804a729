"""Checks that replicas of parameters are equal: equal initial values and equal gradients keep them equal."""

from collections import Counter

import torch

from megatron_lite.errors import TrainingError
from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.parallel.collectives import all_gather, all_reduce
from megatron_lite.parallel.shard import tied_names
from megatron_lite.training.run import Run
from megatron_lite.training.state import due


@torch.no_grad()
def check_copies_if_debug(run: Run) -> None:
    """Under `train.debug`, raise TrainingError on every rank where the copies of a tied embedding differ in any bit.

    Communicates: the copies over embd, and one value over the world.
    """
    if not run.config.train.debug:
        return
    run.ddp.wait_for_params()
    num_different = 0
    for name in tied_names(run.table):
        first, *others = all_gather(run.params[name].detach()[None], run.ctx.embd, dim=0)
        num_different += any(not torch.equal(first, other) for other in others)
    if all_reduce(torch.tensor(float(num_different), device=run.ctx.device), run.ctx.world, "max").item():
        raise TrainingError(
            "train.debug: the word embedding of the first pipeline stage and its copy on the last stage differ; a "
            "hook, a custom model or a broken device changed one. The newest checkpoint is from before this iteration"
        )


def check_replicas_if_due(run: Run) -> None:
    """Call `check_replicas_equal` every `faults.check_replicas` iterations, before the optimizer.

    The optimizer would overwrite a damaged low-precision weight with its fp32 master.
    """
    if due(run.state.iteration + 1, run.config.faults.check_replicas):
        with run.progress.during("check_replicas"):
            check_replicas_equal(run)


@torch.no_grad()
def check_replicas_equal(run: Run) -> None:
    """Raise TrainingError on every rank where replicas of a weight on ranks of dp and cp differ in any bit.

    Communicates: two values per parameter over dp_cp, and one over the world.
    """
    run.ddp.wait_for_params()
    names = list(run.params)
    sums = torch.stack([bit_sum(run.params[name].detach()) for name in names])
    largest, smallest = all_reduce(torch.stack((sums, ~sums)), run.ctx.dp_cp, "max")
    differs, found = largest != ~smallest, ""
    if differs.any():  # equal on all ranks of dp_cp
        first = int(differs.nonzero()[0])
        of_ranks = all_gather(sums[first : first + 1], run.ctx.dp_cp, dim=0).tolist()
        found = differing_ranks(run, of_ranks, names[first], int(differs.sum()))
    if all_reduce(torch.tensor([float(bool(found))], device=run.ctx.device), run.ctx.world, "max").item():
        reports = dict.fromkeys(filter(None, all_gather_objects(found, run.ctx.world)))
        raise TrainingError(
            f"{run.progress.where()}: data-parallel replicas differ: {'; '.join(reports)}. Failing memory, or code "
            "that changes weights on some ranks only, does this; the newest checkpoint is from before this iteration"
        )


def bit_sum(parameter: torch.Tensor) -> torch.Tensor:
    """The sum of all values' bits as integers, modulo 2**64, an int64 scalar. A change of one value changes it."""
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return parameter.contiguous().view(as_integers).sum(dtype=torch.int64)


def differing_ranks(run: Run, sums: list[int], name: str, count: int) -> str:
    """A message about the ranks that differ from the majority in `name`, the first of `count` parameters."""
    (common, frequency), *_ = Counter(sums).most_common()
    ranks = run.ctx.dp_cp.ranks
    odd = [rank for rank, value in zip(ranks, sums, strict=True) if value != common]
    more = f" and {count - 1} more" if count > 1 else ""
    if 2 * frequency > len(sums):
        return f"rank {', '.join(map(str, odd))} differs from the other replicas in {name}{more}"
    return f"ranks {', '.join(map(str, ranks))} differ in {name}{more}, and none has a majority"
