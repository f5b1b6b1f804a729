"""Communication inside a group, and the conjugate pairs of tensor parallelism.

The plain functions do nothing in a group of one. The autograd pairs are the f and g of Megatron-LM (Shoeybi et al.,
arXiv 1909.08053, section 3, figure 3) and their kin along the last dimension and along the sequence: what one does in
forward, its partner does in backward. Along the sequence there is one of the pair (Korthikanti et al., arXiv
2205.05198, section 4.2.2); its partner is fused with the product that it feeds, in `linear.py`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import communicating, finished

OPS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
}
# torch 2.13 gave them these names, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """x reduced over the group, the same on every rank. Use what is returned: x itself may be overwritten."""
    if group.size == 1:
        return x
    x = x.contiguous()
    with communicating("all_reduce", group):
        dist.all_reduce(x, op=OPS[op], group=group.pg)
    return x


def all_reduce_async(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """Starts to sum x; the tensor holds the result once the returned function was called."""
    if group.size == 1:
        return x, lambda: None
    x = x.contiguous()
    work = dist.all_reduce(x, group=group.pg, async_op=True)
    return x, partial(finished, work, "all_reduce", group)


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Every rank's x, joined along dim in group order."""
    if group.size == 1:
        return x
    joined, wait = all_gather_async(x, group)
    wait()
    return joined if dim == 0 else torch.cat(joined.chunk(group.size), dim=dim)


def all_gather_async(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """Starts joining every rank's x along dim 0; the tensor holds the result once the returned function was called."""
    if group.size == 1:
        return x, lambda: None
    joined = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    work = all_gather_single(joined, x.contiguous(), group=group.pg, async_op=True)
    return joined, partial(finished, work, "all_gather", group)


def reduce_scatter_async(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """Starts summing x; the tensor holds this rank's run of dim 0 of the sum once the returned function was called."""
    if group.size == 1:
        return x, lambda: None
    if x.shape[0] % group.size:
        raise ValueError(
            f"the first dimension of {tuple(x.shape)} does not divide over {group.size} ranks; under sequence "
            "parallelism it is the sequence, so use a length that does, or no sequence parallelism"
        )
    share = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    work = reduce_scatter_single(share, x.contiguous(), group=group.pg, async_op=True)
    return share, partial(finished, work, "reduce_scatter", group)


def broadcast(x: Tensor, group: Group, src: int) -> Tensor:
    """The x of the group's member number `src`, on every rank. Use what is returned."""
    if group.size == 1:
        return x
    x = x.contiguous()
    with communicating("broadcast", group):
        dist.broadcast(x, src=group.ranks[src], group=group.pg)
    return x


def barrier(group: Group) -> None:
    """Returns once every rank of the group has called it."""
    if group.size > 1:
        with communicating("barrier", group):
            dist.barrier(group=group.pg)


def split_last_dim(x: Tensor, group: Group) -> Tensor:
    """This rank's run of the last dimension."""
    size = x.shape[-1]
    if size % group.size:
        raise ValueError(f"the last dimension of {tuple(x.shape)} does not divide over {group.size} ranks")
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()


class _CopyToRegion(torch.autograd.Function):
    """f in the paper: identity forward, sum of gradients over tp backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.clone(), ctx.tp), None


class _ReduceFromRegion(torch.autograd.Function):
    """g in the paper: sum over tp forward, identity backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Group) -> Tensor:
        return all_reduce(x.clone(), tp)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _ScatterToRegion(torch.autograd.Function):
    """This rank's run of the last dimension forward, gather backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return split_last_dim(x, tp)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_gather(grad, ctx.tp, dim=-1), None


class _GatherFromRegion(torch.autograd.Function):
    """Gather along the last dimension forward, this rank's run of the gradient backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp, dim=-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return split_last_dim(grad, ctx.tp), None


class _ReduceScatterToSequence(torch.autograd.Function):
    """g-bar in the paper on sequence parallelism: this rank's run of the sum forward, gather backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        share, wait = reduce_scatter_async(x, tp)
        wait()
        return share

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_gather(grad, ctx.tp, dim=0), None


def copy_to_tensor_model_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """x as it is; backward sums its gradient over tp. Communicates: backward, one all-reduce of x's size."""
    return x if tp.size == 1 else _CopyToRegion.apply(x, tp)  # type: ignore[return-value]


def reduce_from_tensor_model_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """Sum of x over tp; backward hands the gradient on. Communicates: forward, one all-reduce of x's size."""
    return x if tp.size == 1 else _ReduceFromRegion.apply(x, tp)  # type: ignore[return-value]


def scatter_to_tensor_model_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """`[..., h]` to this rank's `[..., h/tp]`. Communicates: backward, one all-gather."""
    return x if tp.size == 1 else _ScatterToRegion.apply(x, tp)  # type: ignore[return-value]


def gather_from_tensor_model_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """`[..., h/tp]` to `[..., h]`, the same on every rank. Communicates: forward, one all-gather."""
    return x if tp.size == 1 else _GatherFromRegion.apply(x, tp)  # type: ignore[return-value]


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """`[s, ...]`, a part of a sum, to this rank's `[s/tp, ...]` of the whole sum.

    Communicates: forward, one reduce-scatter of x's size; backward, one all-gather of it.
    """
    return x if tp.size == 1 else _ReduceScatterToSequence.apply(x, tp)  # type: ignore[return-value]


def sum_of_parts(sequence_parallel: bool) -> Callable[[Tensor, Group], Tensor]:
    """What ends a tensor-parallel region: the sum of `[s, ...]` over tp, of which each rank gets all or its s/tp."""
    return reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_tensor_model_parallel_region
