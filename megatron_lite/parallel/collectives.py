"""Communication inside a group, and the conjugate pairs of tensor parallelism.

The plain functions do nothing in a group of one. The autograd functions are the conjugate pairs f and g of Megatron-LM,
and the same along the last dimension. Along the sequence there is only g-bar; its partner is fused into `linear.py`.
Sources: Shoeybi et al., arXiv 1909.08053, section 3, figure 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import communicating, finished

Collective = Callable[[Tensor, Group], Tensor]

OPS: dict[str, dist.ReduceOp.RedOpType] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renamed these functions and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """x reduced over the group, the same on every rank. Use the returned tensor; x may be overwritten."""
    if group.size == 1:
        return x
    x = x.contiguous()
    with communicating("all_reduce", group):
        dist.all_reduce(x, op=OPS[op], group=group.pg)
    return x


def all_reduce_async(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """Start to sum x; the returned tensor holds the sum after a call of the returned function."""
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
    """Start to join every rank's x along dim 0; the tensor holds the result after a call of the returned function."""
    if group.size == 1:
        return x, lambda: None
    joined = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    work = all_gather_single(joined, x.contiguous(), group=group.pg, async_op=True)
    return joined, partial(finished, work, "all_gather", group)


def reduce_scatter_async(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """Start to sum x; the tensor holds this rank's slice of dim 0 of the sum after a call of the returned function."""
    if group.size == 1:
        return x, lambda: None
    if x.shape[0] % group.size:
        raise ValueError(
            f"dim 0 of {tuple(x.shape)} does not divide over {group.size} ranks; pad it or set parallel.sequence=false"
        )
    share = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    work = reduce_scatter_single(share, x.contiguous(), group=group.pg, async_op=True)
    return share, partial(finished, work, "reduce_scatter", group)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Dim 0 of x, in equal blocks, one for each rank of the group; returns the blocks that all ranks have for this one,
    in group order."""
    if group.size == 1:
        return x
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    with communicating("all_to_all", group):
        dist.all_to_all_single(received, x.contiguous(), group=group.pg)
    return received


def shift_async(x: Tensor, group: Group, tag: int) -> tuple[Tensor, Callable[[], object]]:
    """Start to send x to the next rank of a ring; the tensor holds the previous rank's after a call of the returned
    function. Messages with another `tag` may be in flight."""
    received = torch.empty_like(x)
    peers = [group.ranks[(group.rank + step) % group.size] for step in (1, -1)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, peers[0], group=group.pg, tag=tag),
            dist.P2POp(dist.irecv, received, peers[1], group=group.pg, tag=tag),
        ]
    )
    return received, lambda: [finished(work, "shift", group) for work in works]


def broadcast(x: Tensor, group: Group, src: int) -> Tensor:
    """The x of member `src` of the group, on every rank. Use the returned tensor."""
    if group.size == 1:
        return x
    x = x.contiguous()
    with communicating("broadcast", group):
        dist.broadcast(x, src=group.ranks[src], group=group.pg)
    return x


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it."""
    if group.size > 1:
        with communicating("barrier", group):
            dist.barrier(group=group.pg)


def split_last_dim(x: Tensor, group: Group) -> Tensor:
    """This rank's slice of the last dimension."""
    if x.shape[-1] % group.size:
        raise ValueError(f"the last dimension of {tuple(x.shape)} does not divide over {group.size} ranks")
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()


class _Conjugate(torch.autograd.Function):
    """`forward_op(x, tp)` in forward and `backward_op(grad, tp)` in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Group, forward_op: Collective, backward_op: Collective) -> Tensor:
        ctx.tp, ctx.backward_op = tp, backward_op
        return forward_op(x, tp)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return ctx.backward_op(grad, ctx.tp), None, None, None


def _conjugate(x: Tensor, tp: Group, forward_op: Collective, backward_op: Collective) -> Tensor:
    return x if tp.size == 1 else _Conjugate.apply(x, tp, forward_op, backward_op)  # type: ignore[return-value]


def _sum(x: Tensor, tp: Group) -> Tensor:
    return all_reduce(x.clone(), tp)


def _reduce_scatter(x: Tensor, tp: Group) -> Tensor:
    share, wait = reduce_scatter_async(x, tp)
    wait()
    return share


def copy_to_tensor_model_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """f: identity forward, sum over tp backward. Communicates: backward, one all-reduce of x's size."""
    return _conjugate(x, tp, lambda x, _: x.view_as(x), _sum)


def reduce_from_tensor_model_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """g: sum over tp forward, identity backward. Communicates: forward, one all-reduce of x's size."""
    return _conjugate(x, tp, _sum, lambda grad, _: grad)


def scatter_to_tensor_model_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """This rank's `[..., h/tp]` of x `[..., h]`; gather backward. Communicates: backward, one all-gather."""
    return _conjugate(x, tp, split_last_dim, partial(all_gather, dim=-1))


def gather_from_tensor_model_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """The full `[..., h]` of x `[..., h/tp]`; split backward. Communicates: forward, one all-gather."""
    return _conjugate(x, tp, partial(all_gather, dim=-1), split_last_dim)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: Group) -> Tensor:
    """g-bar: this rank's `[s/tp, ...]` of the sum of x `[s, ...]` over tp forward, gather backward.

    Communicates: forward, one reduce-scatter of x's size; backward, one all-gather of it.
    """
    return _conjugate(x, tp, _reduce_scatter, partial(all_gather, dim=0))


def all_to_all_between_regions(x: Tensor, group: Group) -> Tensor:
    """`all_to_all` in forward and, on the gradient, in backward. Communicates: x's size, once in each direction."""
    return _conjugate(x, group, all_to_all, all_to_all)


def output_reduction(sequence_parallel: bool) -> Collective:
    """The function that ends a tensor-parallel region: it sums over tp, and each rank gets all or its s/tp."""
    return reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_tensor_model_parallel_region
