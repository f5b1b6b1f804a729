"""First values are normally distributed and depend on seed and name only."""

import pytest
import torch

from megatron_lite.model.init import BLOCK, fill
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamMeta, Shard

SHARDS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "fused rows": Shard(0, (400, 200, 200)),
    "full": Shard(),
}


def first_values(shape, shard, tp, rank, *, seed=1, name="a.weight", std=0.02, dtype=torch.float32):
    meta = ParamMeta(shape=shape, shard=shard, init="normal", std=std)
    out = torch.full(shard.local_shape(shape, tp), torch.nan, dtype=dtype)
    fill(out, meta, seed=seed, name=name, tp=Group("tp", tuple(range(tp)), rank))
    return out


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize("tp", [2, 4])
def test_shards_of_any_kind_join_to_the_full_tensor(kind, tp):
    """The width is not a power of two and the size is more than two blocks, so rows and shards cross block borders."""
    shape, shard = (800, 2724), SHARDS[kind]
    assert shape[0] * shape[1] > 2 * BLOCK
    shards = [first_values(shape, shard, tp, rank) for rank in range(tp)]
    assert torch.equal(shard.join(shards), first_values(shape, Shard(), 1, 0))


def test_blocks_have_different_values():
    full = first_values((2, BLOCK), Shard(), 1, 0)
    assert not torch.equal(full[0], full[1])


def test_values_follow_seed_and_name():
    one = first_values((8, 8), Shard(), 1, 0)
    assert torch.equal(one, first_values((8, 8), Shard(), 1, 0))
    assert not torch.equal(one, first_values((8, 8), Shard(), 1, 0, seed=2))
    assert not torch.equal(one, first_values((8, 8), Shard(), 1, 0, name="b.weight"))


def test_first_values_neither_read_nor_advance_torchs_generator():
    """Otherwise first values would depend on earlier random numbers."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = first_values((8, 8), Shard(), 1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(one, first_values((8, 8), Shard(), 1, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_starts_from_the_same_fp32_values(dtype):
    assert torch.equal(first_values((8, 9), Shard(), 1, 0, dtype=dtype), first_values((8, 9), Shard(), 1, 0).to(dtype))


def test_values_are_normal_with_the_given_deviation():
    """Bounds are five standard errors of 4 million values: one false failure in about two million."""
    x = first_values((4, BLOCK), Shard(), 1, 0, std=0.5).double() / 0.5
    error = x.numel() ** -0.5
    assert abs(x.mean()) < 5 * error
    assert abs(x.var() - 1) < 5 * error * 2**0.5
    assert abs(x.pow(4).mean() - 3) < 5 * error * 96**0.5
    for first, second in ((0, 1), (1, 2), (2, 3)):  # blocks are independent
        assert abs((x[first] * x[second]).mean()) < 5 * BLOCK**-0.5


def test_norms_and_biases_start_as_ones_and_zeros():
    for init, want in (("ones", 1.0), ("zeros", 0.0)):
        out = torch.full((5,), torch.nan)
        meta = ParamMeta(shape=(5,), shard=Shard(), init=init)
        fill(out, meta, seed=1, name="x", tp=Group("tp", (0,), 0))
        assert torch.equal(out, torch.full((5,), want))
