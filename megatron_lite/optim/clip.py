"""The L2 norm of the full model's gradient, the same value for every layout.

Each parameter counts once: shards are summed over tensor-parallel ranks; a parameter that is replicated over tp counts
on the first rank, and so does a copied range of a shard; copies of a tied tensor do not count.
Source: Pascanu et al., arXiv 1211.5063; Megatron-LM's clip_grads.py.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamMeta, ParamTable

# Squares are summed in fp64, so that the layout changes only bits that the rounding of the clip coefficient drops. (In
# fp32 the CPU kernel lost 6e-4 of the norm over the 19 million elements of GPT-2's embedding.) Slices of this many
# elements stay in the CPU's cache during the conversion to fp64.
SLICE_NUMEL = 2**16


def counts_here(meta: ParamMeta, ctx: ParallelContext) -> bool:
    """Whether this rank's shard or copy of the parameter counts."""
    return not meta.tied_to and (meta.shard.is_split or ctx.tp.is_first)


def norm_of(sums: Sequence[float]) -> float:
    """The norm from the values of `grad_sums`; not finite if any rank has inf or nan."""
    total, broken = sums
    return math.nan if broken and math.isfinite(total) else math.sqrt(total)


def grad_sums(
    grads: dict[str, Tensor],
    table: ParamTable,
    ctx: ParallelContext,
    *,
    starts: Mapping[str, int] | None = None,
    num_copies: int = 0,
) -> Tensor:
    """[2] in fp64 on the device: the squared norm of the gradient of the full model, and 1 if any rank has inf or nan,
    equal on every rank of the world, so that all take the same decision.

    `grads` are summed over dp_cp. Each rank has all of them, or those with ranges that begin at `starts` in the
    flattened shards (0 where absent), which `num_copies` ranks of it have.
    Communicates: two values over mp, or the world with `num_copies`, and one over the world.
    """
    parts = [
        part for name, grad in grads.items() for part in _parts(grad, (starts or {}).get(name, 0), table[name], ctx)
    ]
    counted, others = (_slices(part for part, counts in parts if counts is kind) for kind in (True, False))
    sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    if counted or others:
        norms = torch._foreach_norm(counted + others, 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
        squares = torch.stack(norms).square()
        sums = torch.stack([squares[: len(counted)].sum(), squares.sum()])
    sums = all_reduce(sums, ctx.world if num_copies else ctx.mp)
    # The only inf can be in a copy that does not count. Ranks of dp_cp have equal sums, except after a hardware fault.
    broken = all_reduce((~sums.isfinite().all()).double(), ctx.world, "max")
    return torch.stack([sums[0] / max(1, num_copies), broken])


def clip_coefficient(grad_norm: float, clip_grad: float) -> float:
    """The factor that reduces the norm of gradients to at most `clip_grad`; 0 turns clipping off."""
    return min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad else 1.0


def _parts(grad: Tensor, start: int, meta: ParamMeta, ctx: ParallelContext) -> Iterator[tuple[Tensor, bool]]:
    """The gradient from element `start` of the flattened shard on, in parts that count here or do not."""
    counts, position = counts_here(meta, ctx), 0
    for copied in meta.shard.copied(meta.shape, ctx.tp.rank, ctx.tp.size):
        first, last = (min(max(at - start, 0), grad.numel()) for at in (copied.start, copied.end))
        if not copied.is_first and first < last:
            flat = grad.reshape(-1)
            yield flat[position:first], counts
            yield flat[first:last], False
            position = last
    yield grad if position == 0 else grad.reshape(-1)[position:], counts


def _slices(grads: Iterable[Tensor]) -> list[Tensor]:
    """Small flat views of gradients on the CPU; other gradients unchanged, because a GPU's kernel sums in blocks."""
    return [
        part
        for grad in grads
        for part in (grad.reshape(-1).split(SLICE_NUMEL) if grad.device.type == "cpu" else [grad])
    ]
