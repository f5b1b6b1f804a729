"""A few small tensors, sharded in every way, whose values identify the save that they are from."""

import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.contents import Contents
from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import (
    LAYOUT_FILE,
    FileInfo,
    Layout,
    checksum,
    dump_layout,
    mp_rank_folder,
    read_layout,
)
from megatron_lite.checkpoint.tensor_file import TensorFile, write_tensors
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard

TABLE: ParamTable = {
    "embedding.word_embeddings.weight": ParamMeta((8, 4), Shard(0), "normal"),
    "decoder.layers.0.self_attention.linear_qkv.weight": ParamMeta((16, 4), Shard(0, (8, 4, 4)), "normal"),
    "decoder.layers.0.mlp.linear_fc2.weight": ParamMeta((4, 12), Shard(1), "normal"),
    "decoder.final_layernorm.weight": ParamMeta((4,), Shard(), "ones"),
}
CONFIG = {"model": {"hidden_size": 4, "num_layers": 1}, "train": {"precision": "bf16"}}
MASTER_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def one_process() -> ParallelContext:
    return ParallelContext.create(Grid(), torch.device("cpu"), 10)


def full_tensor(name: str, kind: str, version: int, dtype: torch.dtype, table: ParamTable = TABLE) -> Tensor:
    """The unsharded tensor, different for every name, kind and version."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind} {version}".encode()))
    return torch.randn(table[name].shape, generator=generator, dtype=torch.float64).to(dtype)


def contents(ctx: ParallelContext, version: int, dtype: torch.dtype = torch.bfloat16, table: ParamTable = TABLE):
    """This rank's shards of weights and optimizer state; version -1 is all zeros, a target for `load`."""

    def shard(name: str, kind: str, dtype: torch.dtype) -> Tensor:
        full = (
            full_tensor(name, kind, version, dtype, table)
            if version >= 0
            else torch.zeros(table[name].shape, dtype=dtype)
        )
        return table[name].shard.split(full, ctx.tp.rank, ctx.tp.size).contiguous()

    masters = MASTER_DTYPES.get(dtype)
    kinds = ("master", "exp_avg", "exp_avg_sq") if masters else ("exp_avg", "exp_avg_sq")
    return {
        "weights": {name: shard(name, "weight", dtype) for name in table},
        "optimizer_state": {name: {kind: shard(name, kind, masters or dtype) for kind in kinds} for name in table},
    }


def save(
    root: Path, iteration: int, ctx: ParallelContext, *, version: int | None = None, keep: int = 2, **changes: Any
):
    """Saves `contents(ctx, version)`, by default version `iteration`."""
    version = iteration if version is None else version
    given = {
        "ctx": ctx,
        "table": TABLE,
        **contents(ctx, version),
        "rng": {f"{ctx.rank}/cpu": torch.full((5,), 10 * version + ctx.rank, dtype=torch.uint8)},
        "state": {"iteration": iteration, "version": version, "loss_scale": 0.1},
        "config": CONFIG,
        "origin": {},
        "keep": keep,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return store.save(root, iteration, **join_contents({**given, **changes}))


def load(root: Path, iteration: int, ctx: ParallelContext, **changes: Any) -> tuple[store.Loaded, dict[str, Any]]:
    """The result of `store.load`, and the tensors that it filled."""
    into = contents(ctx, -1)
    given = {"ctx": ctx, "table": TABLE, **into, "config": CONFIG}
    return store.load(root, iteration, **join_contents({**given, **changes})), into


def total_bytes(values: Any) -> int:
    """Total bytes of all tensors in nested dicts."""
    return values.nbytes if isinstance(values, Tensor) else sum(map(total_bytes, values.values()))


def join_contents(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with plain tensors of weights, optimizer_state and rng joined in one `contents`."""
    rest = dict(given)
    weights, state, rng = (rest.pop(key, {}) for key in ("weights", "optimizer_state", "rng"))
    rest["contents"] = Contents(
        {name: LocalShard(weight.detach()) for name, weight in weights.items()},
        {name: {kind: LocalShard(value) for kind, value in kinds.items()} for name, kinds in state.items()},
        rng,
    )
    return rest


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Names, dtypes and bits are equal."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, dict):
            assert_same(got[name], value)
        else:
            assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def assert_complete(root: Path, ctx: ParallelContext, iteration: int) -> int:
    """Load this iteration's checkpoint, check that all its tensors are of one version, and return that version."""
    loaded, tensors = load(root, iteration, ctx)
    version = loaded.layout.state["version"]
    assert_same(tensors, contents(ctx, version))
    assert loaded.rng is not None and loaded.rng["cpu"].tolist() == [10 * version + ctx.rank] * 5
    return version


def newest_tensor_files(folder: Path) -> dict[str, bytes]:
    """The tensor files of a run's newest checkpoint by name, without those of the random streams."""
    newest = resolve(folder)
    return {str(path.relative_to(newest)): path.read_bytes() for path in newest.glob("*/[mo]*.safetensors")}


def listed(layout: Layout) -> Layout:
    """The layout with a list of the slices in place of their rules, for tests that change one of them."""
    tensors = {
        name: tensor.model_copy(
            update={
                "values": {
                    kind: value.model_copy(update={"rules": (), "slices": tuple(layout.slices(name, kind))})
                    for kind, value in tensor.values.items()
                }
            }
        )
        for name, tensor in layout.tensors.items()
    }
    return layout.model_copy(update={"tensors": tensors})


def as_version_2(folder: Path) -> None:
    """Rewrite the checkpoint in `folder` in the form of version 2: layout.json lists all slices and checksums, and each
    rank has a file of its random generators."""
    layout = listed(read_layout(folder))
    files = dict(layout.files)
    for name in [name for name in files if "/rng_host_" in name]:
        by_rank: dict[int, dict[str, Tensor]] = {}
        for key, state in load_file(folder / name).items():
            rank, _, stream = key.partition("/")
            by_rank.setdefault(int(rank), {})[stream] = state
        (folder / name).unlink()
        del files[name]
        for rank, states in by_rank.items():
            ctx = ParallelContext.at(layout.grid, rank)
            own = f"{mp_rank_folder(ctx.tp.rank, ctx.pp.rank, layout.grid)}/rng_dp_{ctx.dp_cp.rank:03d}.safetensors"
            files[own] = write_tensors(folder / own, states)
    for name, info in files.items():
        opened = TensorFile(folder / name, info)
        checksums = {key: opened.checksums(key) for key in opened.dtypes}
        tensors = {key: opened.get(key) for key in opened.dtypes}
        save_file(tensors, folder / name)  # without checksums, in the order of the safetensors library
        header = (folder / name).read_bytes()[: (folder / name).stat().st_size - total_bytes(tensors)]
        size = (folder / name).stat().st_size
        files[name] = FileInfo(bytes=size, header_crc32=checksum(header), crc32=checksums)
    layout = layout.model_copy(update={"version": 2, "files": files})
    (folder / LAYOUT_FILE).write_text(dump_layout(layout))


def flip_a_bit(folder: Path) -> None:
    """Flip one bit of an optimizer file of the checkpoint in `folder`."""
    path = folder / "mp_rank_00" / "optimizer_dp_000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)
