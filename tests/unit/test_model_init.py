"""First values are normally distributed and depend on seed and name only."""

import pytest
import torch

from megatron_lite.model.init import TILE_COLUMNS as TILE
from megatron_lite.model.init import fill
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


def shard_is_fused(kind):
    return bool(SHARDS[kind].parts)


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize("tp", [2, 4])
def test_shards_of_any_kind_join_to_the_full_tensor(kind, tp):
    """The sizes are not powers of two, and rows, columns and shards cross borders of tiles."""
    shape, shard = (800, 2724) if shard_is_fused(kind) else (2600, 2724), SHARDS[kind]
    assert shape[1] > 2 * TILE
    shards = [first_values(shape, shard, tp, rank) for rank in range(tp)]
    assert torch.equal(shard.join(shards), first_values(shape, Shard(), 1, 0))


def test_tiles_have_different_values():
    full = first_values((2 * TILE, 2 * TILE), Shard(), 1, 0)
    tiles = [full[i : i + TILE, j : j + TILE] for i in (0, TILE) for j in (0, TILE)]
    assert all(not torch.equal(tiles[0], tile) for tile in tiles[1:])
    assert not torch.equal(tiles[1], tiles[2])


@pytest.mark.parametrize("kind", SHARDS)
def test_some_rows_of_a_shard_have_the_values_of_the_shard(kind):
    """FSDP ranks draw their rows only, into fp32 masters of rounded weights."""
    shape, shard = (800, 1500), SHARDS[kind]
    full = first_values(shape, shard, 2, 1, dtype=torch.bfloat16)
    meta = ParamMeta(shape=shape, shard=shard, init="normal", std=0.02)
    rows = torch.full((150, full.shape[1]), torch.nan)
    fill(rows, meta, seed=1, name="a.weight", tp=Group("tp", (0, 1), 1), first_row=170, dtype=torch.bfloat16)
    assert torch.equal(rows, full[170:320].float())


def test_a_rank_draws_only_the_tiles_of_its_shard(monkeypatch):
    """A rank of eight would otherwise draw all columns of row-parallel weights."""
    drawn = []
    monkeypatch.setattr(torch, "randn", lambda shape, **_: drawn.append(shape) or torch.zeros(shape))
    first_values((TILE, 8 * TILE), Shard(1), 8, 3)
    assert drawn == [(TILE, TILE)]


def test_values_follow_seed_and_name():
    one = first_values((8, 8), Shard(), 1, 0)
    assert torch.equal(one, first_values((8, 8), Shard(), 1, 0))
    assert not torch.equal(one, first_values((8, 8), Shard(), 1, 0, seed=2))
    assert not torch.equal(one, first_values((8, 8), Shard(), 1, 0, name="b.weight"))


def test_a_seed_has_the_values_of_earlier_versions():
    """Values depend on the size of a tile: with another one, large models would have other initial weights."""
    values = first_values((1030, 1500), Shard(), 1, 0, std=1.0)
    of_tiles = torch.stack([values[0, 0], values[1023, 1023], values[1024, 0], values[1029, 1499]])
    torch.testing.assert_close(of_tiles, torch.tensor([0.3241, -1.2697, -0.274, 1.35]), rtol=0, atol=1e-4)


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
    x = first_values((TILE, 4 * TILE), Shard(), 1, 0, std=0.5).double() / 0.5
    x = x.unflatten(1, (4, TILE)).movedim(1, 0).flatten(1)  # a row for each tile
    error = x.numel() ** -0.5
    assert abs(x.mean()) < 5 * error
    assert abs(x.var() - 1) < 5 * error * 2**0.5
    assert abs(x.pow(4).mean() - 3) < 5 * error * 96**0.5
    for first, second in ((0, 1), (1, 2), (2, 3)):  # blocks are independent
        assert abs((x[first] * x[second]).mean()) < 5 / TILE


def test_norms_and_biases_start_as_ones_and_zeros():
    for init, want in (("ones", 1.0), ("zeros", 0.0)):
        out = torch.full((5,), torch.nan)
        meta = ParamMeta(shape=(5,), shard=Shard(), init=init)
        fill(out, meta, seed=1, name="x", tp=Group("tp", (0,), 0))
        assert torch.equal(out, torch.full((5,), want))
