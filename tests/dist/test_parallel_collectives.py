"""The conjugate pairs, forward and backward, with a different tensor on each rank.

The gradients come in transposed, so not contiguous: a backward that reduces a contiguous copy and returns its input
would reduce nothing. All numbers are small integers, so sums are exact in any order.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_lite.parallel import collectives
from megatron_lite.parallel.context import Group, solo
from tests.helpers.split_layers import world_group


def numbers(rank: int, *shape: int) -> torch.Tensor:
    """Integers that differ over ranks; not contiguous."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).view(shape[::-1]) + 1000 * rank).t()


def through(name, local_shape, grad_shape):
    """Forward and backward of the named pair; both the input and the incoming gradient are not contiguous.

    Once more with contiguous ones, which a collective could overwrite although another branch still needs them.
    """
    tp = world_group()
    pair = getattr(collectives, f"{name}_parallel_region")
    x, grad = numbers(tp.rank, *local_shape), numbers(10 + tp.rank, *grad_shape)
    assert not x.is_contiguous() and not grad.is_contiguous()
    results = [once(pair, x, grad, tp), once(pair, x.contiguous(), grad.contiguous(), tp)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return results[0]


def once(pair, x, grad, tp):
    x = x.detach().requires_grad_()
    before, grad_before = x.detach().clone(), grad.clone()
    y = pair(x, tp)
    y.backward(grad)
    assert torch.equal(x.detach(), before), "the input was overwritten"
    assert torch.equal(grad, grad_before), "the incoming gradient was overwritten"
    return y.detach(), x.grad


@pytest.mark.parametrize("size", [2, 4])
def test_copy_is_identity_forward_and_a_sum_backward(ranks, size):
    total = sum(numbers(10 + rank, 3, 8) for rank in range(size))
    for rank, (y, grad) in enumerate(ranks(size, through, "copy_to_tensor_model", (3, 8), (3, 8))):
        assert torch.equal(y, numbers(rank, 3, 8))
        assert torch.equal(grad, total)


@pytest.mark.parametrize("size", [2, 4])
def test_reduce_is_a_sum_forward_and_identity_backward(ranks, size):
    total = sum(numbers(rank, 3, 8) for rank in range(size))
    for rank, (y, grad) in enumerate(ranks(size, through, "reduce_from_tensor_model", (3, 8), (3, 8))):
        assert torch.equal(y, total)
        assert torch.equal(grad, numbers(10 + rank, 3, 8))


@pytest.mark.parametrize("size", [2, 4])
def test_scatter_is_a_split_forward_and_a_gather_backward(ranks, size):
    whole_grad = torch.cat([numbers(10 + rank, 3, 8 // size) for rank in range(size)], dim=-1)
    for rank, (y, grad) in enumerate(ranks(size, through, "scatter_to_tensor_model", (3, 8), (3, 8 // size))):
        assert torch.equal(y, numbers(rank, 3, 8).chunk(size, dim=-1)[rank])
        assert torch.equal(grad, whole_grad)


@pytest.mark.parametrize("size", [2, 4])
def test_gather_is_a_gather_forward_and_a_split_backward(ranks, size):
    whole = torch.cat([numbers(rank, 3, 8 // size) for rank in range(size)], dim=-1)
    for rank, (y, grad) in enumerate(ranks(size, through, "gather_from_tensor_model", (3, 8 // size), (3, 8))):
        assert torch.equal(y, whole)
        assert torch.equal(grad, numbers(10 + rank, 3, 8).chunk(size, dim=-1)[rank])


@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter_is_a_run_of_the_sum_forward_and_a_gather_backward(ranks, size):
    total = sum(numbers(rank, 8, 3) for rank in range(size))
    whole_grad = torch.cat([numbers(10 + rank, 8 // size, 3) for rank in range(size)])
    for rank, (y, grad) in enumerate(ranks(size, through, "reduce_scatter_to_sequence", (8, 3), (8 // size, 3))):
        assert torch.equal(y, total.chunk(size)[rank])
        assert torch.equal(grad, whole_grad)


def plain_functions():
    group = world_group()
    mine = numbers(group.rank, 3, 2)
    starts = (collectives.all_reduce_async, collectives.all_gather_async, collectives.reduce_scatter_async)
    pending, waits = zip(*(start(mine.clone(), group) for start in starts), strict=True)
    for wait in waits:
        wait()
    collectives.barrier(group)
    return {
        "sum": collectives.all_reduce(mine.clone(), group),
        "started": pending,
        "max": collectives.all_reduce(mine.clone(), group, "max"),
        "rows": collectives.all_gather(mine, group, dim=0),
        "columns": collectives.all_gather(mine, group, dim=1),
        "last": collectives.broadcast(mine.clone(), group, src=group.size - 1),
    }


def test_plain_functions_give_every_rank_the_same_right_result(ranks):
    parts = [numbers(rank, 3, 2) for rank in range(3)]
    for rank, got in enumerate(ranks(3, plain_functions)):
        assert torch.equal(got["sum"], sum(parts))
        summed, joined, share = got["started"]
        assert torch.equal(summed, sum(parts))
        assert torch.equal(joined, torch.cat(parts))
        assert torch.equal(share, sum(parts)[rank : rank + 1])
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


def test_the_source_of_a_broadcast_is_counted_inside_the_group(ranks):
    assert ranks(4, broadcast_in_upper_half) == [None, None, 3, 3]


def test_a_group_of_one_hands_back_the_tensor_itself():
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


def test_a_last_dimension_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"last dimension of \(2, 5\) does not divide over 2 ranks"):
        collectives.split_last_dim(torch.zeros(2, 5), Group("tp", (0, 1), 0))


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"\(5, 2\) does not divide over 2 ranks; .* parallel.sequence=false"):
        collectives.reduce_scatter_async(torch.zeros(5, 2), Group("tp", (0, 1), 0))
