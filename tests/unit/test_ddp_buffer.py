"""ddp/buffer.py: the places of gradients in the buffer, and the buckets and shards that cover it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_lite.ddp.buffer import ALIGNMENT, GradBuffer

shapes = st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3), min_size=1, max_size=8)


def make(shapes: list[list[int]], bucket_numel: float, **options) -> tuple[dict[str, nn.Parameter], GradBuffer]:
    params = {f"p{number}": nn.Parameter(torch.zeros(shape)) for number, shape in enumerate(shapes)}
    return params, GradBuffer(params, bucket_bytes=4 * bucket_numel, dtype=torch.float32, **options)


@given(shapes, st.floats(0.1, 300.0))
def test_views_are_consecutive_in_reverse_order_of_registration(shapes, bucket_numel):
    """An overlap would mix two gradients. In another order, buckets would be reduced later than possible."""
    params, buffer = make(shapes, bucket_numel)
    buffer.flat.copy_(torch.arange(buffer.flat.numel()))
    end = 0
    for name in reversed(params):
        view = buffer.views[name].flatten()
        assert buffer.views[name].shape == params[name].shape
        assert torch.equal(view, torch.arange(view[0], view[0] + view.numel()))
        assert view[0] == -(-end // ALIGNMENT) * ALIGNMENT
        end = int(view[-1]) + 1
    assert buffer.flat.numel() - end < ALIGNMENT


@given(shapes, st.floats(0.1, 300.0))
def test_buckets_cover_the_buffer_and_only_a_bucket_of_one_parameter_exceeds_the_limit(shapes, bucket_numel):
    """A gradient outside every bucket would never be reduced."""
    params, buffer = make(shapes, bucket_numel)
    buffer.flat.copy_(torch.arange(buffer.flat.numel()))
    assert torch.equal(torch.cat([bucket.flat for bucket in buffer.buckets]), buffer.flat)
    assert [name for bucket in buffer.buckets for name in bucket.ranges] == list(reversed(params))
    for bucket in buffer.buckets:
        assert bucket.flat.numel() <= bucket_numel + ALIGNMENT or len(bucket.ranges) == 1


@given(shapes, st.floats(0.1, 300.0), st.integers(1, 5))
def test_shards_of_a_bucket_are_equal_and_aligned_and_contain_every_element_once(shapes, bucket_numel, size):
    """An element in no shard would never be trained; two ranks would train an element in two shards."""
    params, buffer = make(shapes, bucket_numel, num_shards=size, alone={"p1"})
    buffer.flat.copy_(torch.arange(buffer.flat.numel()))
    found: dict[str, list[float]] = {name: [] for name in params}
    for bucket in buffer.buckets:
        assert "p1" not in bucket.ranges or len(bucket.ranges) == 1
        for rank in range(size):
            part = bucket.shard(rank, size)
            assert (part.stop - part.start) % ALIGNMENT == 0 and (part.stop - part.start) * size == bucket.flat.numel()
            for name, place, first in bucket.slices(part):
                assert first == len(found[name]) and first % ALIGNMENT == 0
                assert part.start <= place.start < place.stop <= part.stop
                found[name] += bucket.flat[place].tolist()
    assert found == {name: buffer.views[name].flatten().tolist() for name in params}


def test_bucket_size_is_counted_in_bytes_of_the_gradient_dtype():
    """Counted in bf16, the dtype of the parameters, buckets would have twice the configured size."""
    params = {f"p{number}": nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for number in range(4)}
    assert len(GradBuffer(params, bucket_bytes=512, dtype=torch.float32).buckets) == 2
    assert len(GradBuffer(params, bucket_bytes=512, dtype=torch.float64).buckets) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_updates_aligned_shards_to_the_same_bits_as_the_full_tensor(dtype):
    """A kernel updates the last few elements of a shard one by one, and some of them round differently than in a vector
    instruction. With shards of any size, ZeRO-1 would train another model."""
    torch.manual_seed(0)
    start, grads = torch.randn(10_007, dtype=dtype), torch.randn(5, 10_007, dtype=dtype)

    def trained(size: int) -> torch.Tensor:
        shards = [shard.clone() for shard in start.split(size)]
        adam = torch.optim.AdamW(shards, lr=1e-2, weight_decay=0.1, fused=True)
        for grad in grads:
            for shard, shard_grad in zip(shards, grad.split(size), strict=True):
                shard.grad = shard_grad.clone()
            adam.step()
        return torch.cat(shards)

    assert torch.equal(trained(ALIGNMENT), trained(10_007))
    assert not torch.equal(trained(7), trained(10_007)), "the alignment is no longer needed"
