"""First values: from seed and name only, and normal."""

import pytest
import torch

from megatron_lite.model.init import BLOCK, fill
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamMeta, Shard

CUTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "fused rows": Shard(0, (400, 200, 200)),
    "whole": Shard(),
}


def drawn(shape, shard, tp, rank, *, seed=1, name="a.weight", std=0.02, dtype=torch.float32):
    meta = ParamMeta(shape=shape, shard=shard, init="normal", std=std)
    out = torch.full(shard.local_shape(shape, tp), torch.nan, dtype=dtype)
    fill(out, meta, seed=seed, name=name, tp=Group("tp", tuple(range(tp)), rank))
    return out


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tp", [2, 4])
def test_pieces_of_any_cut_join_to_the_whole(cut, tp):
    """Not a power of two wide and more than two blocks large, so that rows and runs cross block borders."""
    shape, shard = (800, 2724), CUTS[cut]
    assert shape[0] * shape[1] > 2 * BLOCK
    pieces = [drawn(shape, shard, tp, rank) for rank in range(tp)]
    assert torch.equal(shard.join(pieces), drawn(shape, Shard(), 1, 0))


def test_every_block_has_numbers_of_its_own():
    whole = drawn((2, BLOCK), Shard(), 1, 0)
    assert not torch.equal(whole[0], whole[1])


def test_values_follow_seed_and_name():
    one = drawn((8, 8), Shard(), 1, 0)
    assert torch.equal(one, drawn((8, 8), Shard(), 1, 0))
    assert not torch.equal(one, drawn((8, 8), Shard(), 1, 0, seed=2))
    assert not torch.equal(one, drawn((8, 8), Shard(), 1, 0, name="b.weight"))


def test_drawing_neither_reads_nor_moves_torchs_generator():
    """If it did, a model would start differently after other random numbers were used."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = drawn((8, 8), Shard(), 1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(one, drawn((8, 8), Shard(), 1, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_precision_starts_from_the_same_fp32_numbers(dtype):
    assert torch.equal(drawn((8, 9), Shard(), 1, 0, dtype=dtype), drawn((8, 9), Shard(), 1, 0).to(dtype))


def test_numbers_are_normal_with_the_asked_deviation():
    """Bounds are five standard errors for 4 million numbers: one wrong start in about two million."""
    x = drawn((4, BLOCK), Shard(), 1, 0, std=0.5).double() / 0.5
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
