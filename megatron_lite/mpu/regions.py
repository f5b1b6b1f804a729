"""Megatron's region functions over the registered tensor-parallel group, and collectives over any registered group.

A region function and its conjugate are each other's backward: copy (f of the paper) and reduce (g), scatter and gather.
Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.errors import MegatronLiteError
from megatron_lite.mpu.groups import context
from megatron_lite.parallel import collectives
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import communicating

GROUPS = ("tp", "cp", "dp", "dp_cp", "pp", "mp", "world")


def copy_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """f: identity; backward sums the gradient over tp."""
    return collectives.copy_to_tensor_model_parallel_region(input_, context().tp)


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """g: the sum over tp; backward is the identity."""
    return collectives.reduce_from_tensor_model_parallel_region(input_, context().tp)


def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """[..., h] to this rank's slice [..., h/tp]; backward gathers the gradient over tp."""
    return collectives.scatter_to_tensor_model_parallel_region(input_, context().tp)


def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """[..., h/tp] to [..., h], gathered over tp; backward takes this rank's slice of the gradient."""
    return collectives.gather_from_tensor_model_parallel_region(input_, context().tp)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """[s, b, h] to [s/tp, b, h], summed over tp; backward gathers the gradient."""
    return collectives.reduce_scatter_to_sequence_parallel_region(input_, context().tp)


def group_of(name: str) -> Group:
    """The registered group of this name. Raises MegatronLiteError for another name."""
    if name not in GROUPS:
        raise MegatronLiteError(f"mpu has no group {name!r}; use one of {', '.join(GROUPS)}")
    return getattr(context(), name)


def broadcast(tensor: Tensor, *, src: int, group: str) -> Tensor:
    """`tensor` of the rank `src` of the group, on all its ranks; written into `tensor`."""
    return collectives.broadcast(tensor, group_of(group), src)


def all_reduce(tensor: Tensor, *, group: str) -> Tensor:
    """The sum over the group, on all its ranks; written into `tensor`."""
    return collectives.all_reduce(tensor, group_of(group))


def all_gather(tensor: Tensor, *, group: str) -> Tensor:
    """The tensors [n, ...] of all ranks of the group, [size * n, ...], on all its ranks."""
    return collectives.all_gather(tensor, group_of(group), dim=0)


def reduce_scatter(tensor: Tensor, *, group: str) -> Tensor:
    """This rank's slice [n / size, ...] of the sum over the group of `tensor` [n, ...]."""
    summed, wait = collectives.reduce_scatter_async(tensor, group_of(group))
    wait()
    return summed


def all_to_all(tensor: Tensor, *, group: str) -> Tensor:
    """Slice r of `tensor` [size, ...] goes to rank r; the result has the slices that this rank got, by sender."""
    return collectives.all_to_all(tensor, group_of(group))


def barrier(*, group: str) -> None:
    """Return when all ranks of the group have called it."""
    collectives.barrier(group_of(group))


def reduce(tensor: Tensor, *, dst: int, group: str) -> Tensor:
    """The sum over the group, written into `tensor` on its rank `dst`; on the others `tensor` is unchanged."""
    own, to = tensor.clone(), group_of(group)
    if to.size > 1:
        with communicating("reduce", to):
            dist.reduce(own, to.ranks[dst], group=to.pg)
    return tensor.copy_(own) if to.rank == dst else tensor


def gather(tensor: Tensor, *, dst: int, group: str) -> list[Tensor]:
    """The tensors of all ranks of the group on its rank `dst`, and an empty list on the others."""
    to = group_of(group)
    if to.size == 1:
        return [tensor.clone()]
    gathered = [torch.empty_like(tensor) for _ in to.ranks] if to.rank == dst else []
    with communicating("gather", to):
        dist.gather(tensor.contiguous(), gathered or None, dst=to.ranks[dst], group=to.pg)
    return gathered


def scatter(tensors: Sequence[Tensor] | None, out: Tensor, *, src: int, group: str) -> Tensor:
    """Tensor r of the rank `src` of the group, on its rank r; written into `out`. Other ranks pass None."""
    to = group_of(group)
    if to.rank == src and (tensors is None or len(tensors) != to.size):
        raise MegatronLiteError(
            f"mpu.scatter: rank {src} of {group} gave {len(tensors or [])} tensors; it needs one for each of the "
            f"{to.size} ranks"
        )
    if to.size == 1:
        assert tensors is not None
        return out.copy_(tensors[0])
    given = [tensor.contiguous() for tensor in tensors] if tensors is not None and to.rank == src else None
    with communicating("scatter", to):
        dist.scatter(out, given, src=to.ranks[src], group=to.pg)
    return out


def send(tensor: Tensor, *, dst: int, group: str) -> None:
    """Send `tensor` to the rank `dst` of the group, which calls `recv`."""
    to = group_of(group)
    with communicating(f"send to rank {to.ranks[dst]}", to):
        dist.send(tensor.contiguous(), to.ranks[dst], group=to.pg)


def recv(tensor: Tensor, *, src: int, group: str) -> Tensor:
    """The tensor of the rank `src` of the group, of the same shape and dtype; written into `tensor`."""
    to = group_of(group)
    with communicating(f"receive from rank {to.ranks[src]}", to):
        dist.recv(tensor, to.ranks[src], group=to.pg)
    return tensor
