"""The conjugate collective pairs, forward and backward, with a different tensor on each rank.

Incoming gradients are transposed, so not contiguous: a backward that reduces a contiguous copy but returns its input
would reduce nothing. All values are small integers, so sums are exact in any order.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_lite.parallel import collectives
from megatron_lite.parallel.context import Group, solo
from tests.helpers.split_layers import world_group


def integers(rank: int, *shape: int) -> torch.Tensor:
    """A tensor of integers that differ over ranks; not contiguous."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).view(shape[::-1]) + 1000 * rank).t()


def forward_and_backward(name, local_shape, grad_shape):
    """Output and input gradient of the named pair, for a non-contiguous input and incoming gradient.

    A second call has contiguous tensors, which a collective could overwrite although another branch still needs them.
    """
    tp = world_group()
    pair = getattr(collectives, f"{name}_parallel_region")
    x, grad = integers(tp.rank, *local_shape), integers(10 + tp.rank, *grad_shape)
    assert not x.is_contiguous() and not grad.is_contiguous()
    results = [apply_pair(pair, x, grad, tp), apply_pair(pair, x.contiguous(), grad.contiguous(), tp)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return results[0]


def apply_pair(pair, x, grad, tp):
    x = x.detach().requires_grad_()
    before, grad_before = x.detach().clone(), grad.clone()
    y = pair(x, tp)
    y.backward(grad)
    assert torch.equal(x.detach(), before), "the input was overwritten"
    assert torch.equal(grad, grad_before), "the incoming gradient was overwritten"
    return y.detach(), x.grad


@pytest.mark.parametrize("size", [2, 4])
def test_copy_is_identity_forward_and_a_sum_backward(ranks, size):
    """f of the paper: without the sum, the input gradient of a column-parallel layer is one rank's part."""
    total = sum(integers(10 + rank, 3, 8) for rank in range(size))
    for rank, (y, grad) in enumerate(ranks(size, forward_and_backward, "copy_to_tensor_model", (3, 8), (3, 8))):
        assert torch.equal(y, integers(rank, 3, 8))
        assert torch.equal(grad, total)


@pytest.mark.parametrize("size", [2, 4])
def test_reduce_is_a_sum_forward_and_identity_backward(ranks, size):
    """g of the paper: a second sum in backward would multiply gradients by tp."""
    total = sum(integers(rank, 3, 8) for rank in range(size))
    for rank, (y, grad) in enumerate(ranks(size, forward_and_backward, "reduce_from_tensor_model", (3, 8), (3, 8))):
        assert torch.equal(y, total)
        assert torch.equal(grad, integers(10 + rank, 3, 8))


@pytest.mark.parametrize("size", [2, 4])
def test_scatter_is_a_split_forward_and_a_gather_backward(ranks, size):
    """Without the gather, each rank would return only the gradient of its slice."""
    full_grad = torch.cat([integers(10 + rank, 3, 8 // size) for rank in range(size)], dim=-1)
    for rank, (y, grad) in enumerate(
        ranks(size, forward_and_backward, "scatter_to_tensor_model", (3, 8), (3, 8 // size))
    ):
        assert torch.equal(y, integers(rank, 3, 8).chunk(size, dim=-1)[rank])
        assert torch.equal(grad, full_grad)


@pytest.mark.parametrize("size", [2, 4])
def test_gather_is_a_gather_forward_and_a_split_backward(ranks, size):
    """A gradient of another rank's slice, or one summed over ranks, would be wrong."""
    full = torch.cat([integers(rank, 3, 8 // size) for rank in range(size)], dim=-1)
    for rank, (y, grad) in enumerate(
        ranks(size, forward_and_backward, "gather_from_tensor_model", (3, 8 // size), (3, 8))
    ):
        assert torch.equal(y, full)
        assert torch.equal(grad, integers(10 + rank, 3, 8).chunk(size, dim=-1)[rank])


@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter_is_a_slice_of_the_sum_forward_and_a_gather_backward(ranks, size):
    """Sequence parallelism's form of g: a rank that got another rank's slice would mix up tokens."""
    total = sum(integers(rank, 8, 3) for rank in range(size))
    full_grad = torch.cat([integers(10 + rank, 8 // size, 3) for rank in range(size)])
    for rank, (y, grad) in enumerate(
        ranks(size, forward_and_backward, "reduce_scatter_to_sequence", (8, 3), (8 // size, 3))
    ):
        assert torch.equal(y, total.chunk(size)[rank])
        assert torch.equal(grad, full_grad)


def collectives_without_autograd():
    group = world_group()
    local = integers(group.rank, 3, 2)
    starts = (collectives.all_reduce_async, collectives.all_gather_async, collectives.reduce_scatter_async)
    pending, waits = zip(*(start(local.clone(), group) for start in starts), strict=True)
    for wait in waits:
        wait()
    collectives.barrier(group)
    return {
        "sum": collectives.all_reduce(local.clone(), group),
        "async": pending,
        "max": collectives.all_reduce(local.clone(), group, "max"),
        "rows": collectives.all_gather(local, group, dim=0),
        "columns": collectives.all_gather(local, group, dim=1),
        "last": collectives.broadcast(local.clone(), group, src=group.size - 1),
    }


def test_collectives_without_autograd_return_the_right_result(ranks):
    """Gradient sums, norms and loss scales rely on them, synchronous and asynchronous."""
    parts = [integers(rank, 3, 2) for rank in range(3)]
    for rank, got in enumerate(ranks(3, collectives_without_autograd)):
        assert torch.equal(got["sum"], sum(parts))
        summed, joined, local_slice = got["async"]
        assert torch.equal(summed, sum(parts))
        assert torch.equal(joined, torch.cat(parts))
        assert torch.equal(local_slice, sum(parts)[rank : rank + 1])
        assert torch.equal(got["max"], parts[2])
        assert torch.equal(got["rows"], torch.cat(parts))
        assert torch.equal(got["columns"], torch.cat(parts, dim=1))
        assert torch.equal(got["last"], parts[2])


def broadcast_in_upper_half():
    """Ranks 2 and 3 form the group; its member 1 is global rank 3."""
    pg = dist.new_group([2, 3])
    rank = dist.get_rank()
    if rank < 2:
        return None
    return collectives.broadcast(torch.tensor([rank]), Group("dp", (2, 3), rank - 2, pg), src=1).item()


def test_the_source_of_a_broadcast_is_a_rank_within_the_group(ranks):
    """torch counts global ranks: without the conversion, src=1 would be a rank outside of the group."""
    assert ranks(4, broadcast_in_upper_half) == [None, None, 3, 3]


def test_collectives_over_a_group_of_one_return_the_same_tensor():
    """A copy would cost memory and time in every layer of a model without tensor parallelism."""
    x = torch.randn(2, 2, requires_grad=True)
    for name in ("copy_to_tensor_model", "reduce_from_tensor_model", "scatter_to_tensor_model"):
        assert getattr(collectives, f"{name}_parallel_region")(x, solo()) is x
    assert collectives.gather_from_tensor_model_parallel_region(x, solo()) is x
    assert collectives.reduce_scatter_to_sequence_parallel_region(x, solo()) is x
    for start in (collectives.all_reduce_async, collectives.all_gather_async, collectives.reduce_scatter_async):
        same, wait = start(x, solo())
        assert same is x and wait() is None
    assert collectives.all_reduce(x, solo()) is x
    assert collectives.all_gather(x, solo(), dim=0) is x
    assert collectives.broadcast(x, solo(), src=0) is x
    collectives.barrier(solo())


def test_splitting_an_indivisible_last_dimension_raises_an_error():
    """torch.chunk would silently give ranks slices of different sizes."""
    with pytest.raises(ValueError, match=r"last dimension of \(2, 5\) does not divide over 2 ranks"):
        collectives.split_last_dim(torch.zeros(2, 5), Group("tp", (0, 1), 0))


def test_reduce_scattering_an_indivisible_sequence_raises_an_error():
    """Without the message, torch's error would not name parallel.sequence as the remedy."""
    with pytest.raises(ValueError, match=r"\(5, 2\) does not divide over 2 ranks; .* parallel.sequence=false"):
        collectives.reduce_scatter_async(torch.zeros(5, 2), Group("tp", (0, 1), 0))
