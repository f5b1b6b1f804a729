"""First values are normally distributed and depend on seed and name only."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from megatron_lite.model.init import INIT_VERSION, _state_of, fill
from megatron_lite.model.init import TILE_COLUMNS as TILE
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
    """Values depend on the size of a tile: with another one, large models would have other initial weights. Who changes
    them raises the version."""
    values = first_values((1030, 1500), Shard(), 1, 0, std=1.0)
    of_tiles = torch.stack([values[0, 0], values[1023, 1023], values[1024, 0], values[1029, 1499]])
    assert INIT_VERSION == 2
    torch.testing.assert_close(of_tiles, torch.tensor([-1.0403, 0.9095, 0.3939, -0.0247]), rtol=0, atol=1e-4)


def test_the_words_of_a_state_are_those_of_a_seed():
    """The places of the words in torch's state are not documented. At others the hash would set only some of them."""
    words = np.empty(624, np.uint32)
    words[0] = 1234
    for i in range(1, 624):  # mt19937's own initialization, which `manual_seed` does
        words[i] = 1812433253 * (int(words[i - 1]) ^ int(words[i - 1]) >> 30) + i & 0xFFFFFFFF
    state = _state_of(1, "a.weight", 0)
    state.numpy().view(np.uint64)[3:627] = words
    generator = torch.Generator("cpu")
    generator.set_state(state)
    expected = torch.randn(1000, generator=torch.Generator("cpu").manual_seed(1234))
    assert torch.equal(torch.randn(1000, generator=generator), expected)


def test_no_two_tiles_of_a_large_model_start_equal():
    """With 32 bits, as of a seed, 150,000 tiles have about three equal pairs. A model of 405B has 387,000 tiles."""
    states = {_state_of(1234, f"layers.{i % 100}.weight", i // 100).numpy()[24:56].tobytes() for i in range(150_000)}
    assert len(states) == 150_000


def test_tiles_with_one_32_bit_hash_differ():
    """These two tiles of a model of 405B parameters started equal in version 1."""
    places = [
        ("decoder.layers.3.mlp.linear_fc1.weight", 75, 3, 16),
        ("decoder.layers.8.mlp.linear_fc2.weight", 2, 20, 52),
    ]
    seeds, tiles = set(), []
    for name, i, j, columns in places:
        text = f"1234/{name}/{i * columns + j}"
        seeds.add(hashlib.blake2b(text.encode(), digest_size=4).digest())
        tile, tp = torch.empty(TILE, TILE), Group("tp", tuple(range(columns)), j)
        meta = ParamMeta(shape=(80 * TILE, columns * TILE), shard=Shard(1), init="normal", std=1.0)
        fill(tile, meta, seed=1234, name=name, tp=tp, first_row=i * TILE)
        tiles.append(tile)
    assert len(seeds) == 1
    assert abs((tiles[0] * tiles[1]).mean()) < 5 / TILE


def test_a_function_draws_from_a_state_of_its_own():
    """A custom model has functions; two of its weights must not start equal, and torch's generator must not advance."""
    metas = {name: ParamMeta(shape=(64, 64), shard=Shard(), init=nn.init.normal_) for name in ("a", "b")}
    torch.manual_seed(0)
    before, found = torch.get_rng_state(), {}
    for name, meta in metas.items():
        fill(found.setdefault(name, torch.empty(64, 64)), meta, seed=1, name=name, tp=Group("tp", (0,), 0))
        generator = torch.Generator("cpu")
        generator.set_state(_state_of(1, name, 0))
        assert torch.equal(found[name], torch.empty(64, 64).normal_(generator=generator))
    assert not torch.equal(found["a"], found["b"])
    assert torch.equal(torch.get_rng_state(), before)


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
