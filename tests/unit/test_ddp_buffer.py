"""ddp/buffer.py: every gradient has its own place, in the order in which gradients arrive."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_lite.ddp.buffer import ALIGNMENT, GradBuffer

shapes = st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3), min_size=1, max_size=8)


def make(shapes: list[list[int]], bucket_numel: float, **cuts) -> tuple[dict[str, nn.Parameter], GradBuffer]:
    params = {f"p{number}": nn.Parameter(torch.zeros(shape)) for number, shape in enumerate(shapes)}
    return params, GradBuffer(params, bucket_bytes=4 * bucket_numel, dtype=torch.float32, **cuts)


@given(shapes, st.floats(0.1, 300.0))
def test_views_lie_one_after_another_in_reverse_order_of_registration(shapes, bucket_numel):
    """An overlap would mix two gradients, another order would reduce later than possible."""
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
def test_buckets_cover_the_buffer_and_only_a_single_parameter_exceeds_the_limit(shapes, bucket_numel):
    """A gradient outside every bucket would never be reduced."""
    params, buffer = make(shapes, bucket_numel)
    buffer.flat.copy_(torch.arange(buffer.flat.numel()))
    assert torch.equal(torch.cat([bucket.flat for bucket in buffer.buckets]), buffer.flat)
    assert [name for bucket in buffer.buckets for name in bucket.ranges] == list(reversed(params))
    for bucket in buffer.buckets:
        assert bucket.flat.numel() <= bucket_numel + ALIGNMENT or len(bucket.ranges) == 1


@given(shapes, st.floats(0.1, 300.0), st.integers(1, 5))
def test_shares_of_a_bucket_are_equal_aligned_and_together_hold_every_element_once(shapes, bucket_numel, size):
    """An element in no share would never be trained, one in two by two ranks."""
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
    params = {f"p{number}": nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for number in range(4)}
    assert len(GradBuffer(params, bucket_bytes=512, dtype=torch.float32).buckets) == 2
    assert len(GradBuffer(params, bucket_bytes=512, dtype=torch.float64).buckets) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_updates_shares_cut_at_the_alignment_to_the_same_bits_as_the_whole(dtype):
    """Cut anywhere, an element that a vector instruction updated in the whole tensor is one of the last few of a share,
    which are updated one by one, and a few of thousands round otherwise: ZeRO-1 would train another model."""
    torch.manual_seed(0)
    start, grads = torch.randn(10_007, dtype=dtype), torch.randn(5, 10_007, dtype=dtype)

    def trained(size: int) -> torch.Tensor:
        pieces = [piece.clone() for piece in start.split(size)]
        adam = torch.optim.AdamW(pieces, lr=1e-2, weight_decay=0.1, fused=True)
        for grad in grads:
            for piece, of_piece in zip(pieces, grad.split(size), strict=True):
                piece.grad = of_piece.clone()
            adam.step()
        return torch.cat(pieces)

    assert torch.equal(trained(ALIGNMENT), trained(10_007))
    assert not torch.equal(trained(7), trained(10_007))  # or the alignment is not needed any more
