"""ddp/buffer.py: every gradient has its own place, in the order in which gradients arrive."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_lite.ddp.buffer import GradBuffer

shapes = st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3), min_size=1, max_size=8)


def make(shapes: list[list[int]], bucket_numel: float) -> tuple[dict[str, nn.Parameter], GradBuffer]:
    params = {f"p{number}": nn.Parameter(torch.zeros(shape)) for number, shape in enumerate(shapes)}
    return params, GradBuffer(params, bucket_bytes=4 * bucket_numel, dtype=torch.float32)


@given(shapes, st.floats(0.1, 300.0))
def test_views_lie_one_after_another_in_reverse_order_of_registration(shapes, bucket_numel):
    """A gap would send garbage, an overlap would mix two gradients, another order would reduce later than possible."""
    params, buffer = make(shapes, bucket_numel)
    buffer.flat.copy_(torch.arange(buffer.flat.numel()))
    for name, parameter in params.items():
        assert buffer.views[name].shape == parameter.shape
    joined = torch.cat([buffer.views[name].flatten() for name in reversed(params)])
    assert torch.equal(joined, torch.arange(buffer.flat.numel()).float())


@given(shapes, st.floats(0.1, 300.0))
def test_buckets_cover_the_buffer_and_only_a_single_parameter_exceeds_the_limit(shapes, bucket_numel):
    """A gradient outside every bucket would never be reduced."""
    params, buffer = make(shapes, bucket_numel)
    buffer.flat.copy_(torch.arange(buffer.flat.numel()))
    assert torch.equal(torch.cat([bucket.flat for bucket in buffer.buckets]), buffer.flat)
    assert [name for bucket in buffer.buckets for name in bucket.names] == list(reversed(params))
    for bucket in buffer.buckets:
        assert bucket.flat.numel() == sum(params[name].numel() for name in bucket.names)
        assert bucket.flat.numel() <= bucket_numel or len(bucket.names) == 1


def test_bucket_size_is_counted_in_bytes_of_the_gradient_dtype():
    params = {f"p{number}": nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)) for number in range(4)}
    assert len(GradBuffer(params, bucket_bytes=64, dtype=torch.float32).buckets) == 2
    assert len(GradBuffer(params, bucket_bytes=64, dtype=torch.float64).buckets) == 4
