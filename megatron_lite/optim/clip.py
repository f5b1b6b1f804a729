"""The L2 norm of the whole model's gradient, the same number for every layout.

Each parameter counts once: pieces are summed over tensor-parallel ranks; what every rank of tp (or cp) holds
whole counts on the first of them; further copies of a tied tensor do not count.
Source: Pascanu et al., arXiv 1211.5063; Megatron-LM's clip_grads.py.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamMeta, ParamTable

# Squares are summed in fp64: then the norm depends neither on how the layout cuts tensors nor on which rank of dp has
# which run of them, but for bits that vanish when the clip coefficient is rounded to a gradient's precision. (In fp32
# the CPU kernel lost 6e-4 of the norm over the 19 million elements of GPT-2's embedding.) Pieces of this size stay in
# the cache while they are widened.
PIECE = 2**16


def counts_here(meta: ParamMeta, ctx: ParallelContext) -> bool:
    """Whether this rank is the one that counts what it holds of the parameter."""
    return not meta.tied_to and ctx.cp.is_first and (meta.shard.is_split or ctx.tp.is_first)


def global_grad_norm(
    grads: dict[str, Tensor], table: ParamTable, ctx: ParallelContext, *, shared_out: bool = False
) -> float:
    """Norm of the gradient of the whole model; not finite if any rank has inf or nan.

    `grads` are summed over dp, and with `shared_out` each rank of dp has other runs of them.
    Every rank of the world gets a finite number, or none does, so that all take the same decision.
    Communicates: two numbers over mp, or the world with `shared_out`, and one over the world.
    """
    counted = _pieces([grad for name, grad in grads.items() if counts_here(table[name], ctx)])
    others = _pieces([grad for name, grad in grads.items() if not counts_here(table[name], ctx)])
    sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    if counted or others:
        norms = torch._foreach_norm(counted + others, 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
        squares = torch.stack(norms).square()
        sums = torch.stack([squares[: len(counted)].sum(), squares.sum()])
    sums = all_reduce(sums, ctx.world if shared_out else ctx.mp)
    # A copy that is not counted may hold the only inf. dp ranks hold the same sums, unless one of them is broken.
    broken = all_reduce((~sums.isfinite().all()).double(), ctx.world, "max")
    total, broken = torch.stack([sums[0], broken]).tolist()
    return math.nan if broken and math.isfinite(total) else math.sqrt(total)


def clip_coefficient(grad_norm: float, clip_grad: float) -> float:
    """What to multiply gradients with so that their norm is at most `clip_grad`; 0 turns clipping off."""
    return min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad else 1.0


def _pieces(grads: Sequence[Tensor]) -> list[Tensor]:
    """Small flat views of the gradients; on a GPU, whose kernel sums in blocks by itself, the gradients."""
    if grads and grads[0].device.type != "cpu":
        return list(grads)
    return [piece for grad in grads for piece in grad.reshape(-1).split(PIECE)]
