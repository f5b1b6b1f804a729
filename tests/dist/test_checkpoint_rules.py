"""Values that several ranks share by a rule, in lists or in copies: saved once, and read back by the ranks that saved
them and by others, also from a checkpoint in the form of version 2."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.contents import Contents, rng_of_host
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.stored_data import differing_copies
from tests.helpers.checkpoints import CONFIG, TABLE, as_version_2, contents

STYLES = ("FSDP", "two copies", "ZeRO-1", "local SGD", "without a rule")
SAVE = {"table": TABLE, "state": {}, "config": CONFIG, "origin": {}, "keep": 1}


def sharded(full: Tensor, number: int, chunk: int, shift: int, copy: int = 0) -> LocalShard | None:
    """Range `number` of a shard by a rule; None where the rank has no element."""
    start, end = (max(0, min(full.numel(), at * chunk - shift)) for at in (number, number + 1))
    rule = {"chunk": chunk, "shift": shift, "copy": copy}
    return LocalShard(full.flatten()[start:end].clone(), start, "sharded", **rule) if start < end else None


def shared(ctx: ParallelContext, version: int, style: str) -> Contents:
    """This rank's part of the weights and the optimizer state."""
    full, rank, size = contents(ctx, version), ctx.dp_cp.rank, ctx.dp_cp.size
    weights, state = {}, {}
    for at, (name, weight) in enumerate(full["weights"].items()):

        def part(values: Tensor, shift: int = 7 * at) -> LocalShard | None:
            if style == "ZeRO-1":
                return sharded(values, rank, 30, shift)
            if style == "local SGD":
                return LocalShard(values + (rank if version >= 0 else 0), across_dp="local")
            if style == "without a rule":
                first, last = [(0, 3), (3, values.numel())][rank] if rank < 2 else (0, 0)
                return LocalShard(values.flatten()[first:last].clone(), first, "sharded") if first < last else None
            sharers = size // 2 if style == "two copies" else size
            return sharded(values, rank % sharers, -(-values.numel() // sharers), 0, rank // sharers)

        kinds = {kind: part(values) for kind, values in full["optimizer_state"][name].items()}
        weights[name] = LocalShard(weight) if style in ("ZeRO-1", "local SGD") else part(weight)
        state[name] = {kind: shard for kind, shard in kinds.items() if shard}
    return Contents(
        {name: shard for name, shard in weights.items() if shard}, {name: each for name, each in state.items() if each}
    )


def save_and_load(root: Path, tp: int, dp: int, version: int) -> None:
    ctx = ParallelContext.create(Grid(tp=tp, dp=dp), torch.device("cpu"), 60, ranks_per_host=2)
    rng = {"a": torch.full((3,), ctx.rank, dtype=torch.uint8), "b": torch.full((2,), 9, dtype=torch.uint8)}
    for style in STYLES:
        saved = replace(shared(ctx, 1, style), rng=rng_of_host(rng, ctx))
        folder = store.save(root / style, 1, ctx=ctx, contents=saved, **SAVE)
        if version == 2:
            on_first(lambda folder=folder: as_version_2(folder), ctx.world)
        into = shared(ctx, -1, style)
        loaded = store.load(root / style, 1, ctx=ctx, table=TABLE, contents=into, config=CONFIG)
        for name, kinds in saved.by_kind().items():
            for kind, shard in kinds.items():
                assert torch.equal(into.by_kind()[name][kind].values, shard.values), (style, name, kind)
        assert loaded.layout.version == version and loaded.rng is not None and loaded.rng.keys() == rng.keys()
        assert all(torch.equal(loaded.rng[name], state) for name, state in rng.items())


@pytest.mark.parametrize(("tp", "dp", "version"), [(2, 2, 3), (1, 4, 3), (1, 4, 2)])
def test_shared_values_are_saved_once_and_loaded_by_every_rank(ranks, tmp_path, tp, dp, version):
    """A rank that took the range or the values of another one would train on without a sign."""
    ranks(tp * dp, save_and_load, tmp_path, tp, dp, version)
    for style in STYLES:
        folder = tmp_path / style / "iter_0000001"
        layout = read_layout(folder)
        assert store.verify(folder, layout) == [] and differing_copies(folder, layout) == ""
        stored = Path(folder).rglob("*.safetensors")
        assert {str(path.relative_to(folder)) for path in stored} == layout.files.keys()
        by_rule = all(value.rules for tensor in layout.tensors.values() for value in tensor.values.values())
        assert by_rule == (version == 3 and style != "without a rule")
        numbers = {int(name[-15:-12]) for name in layout.files if "/optimizer_dp_" in name}
        assert len(numbers) == {"two copies": dp // 2, "without a rule": 2}.get(
            style, min(dp, 3 if style == "ZeRO-1" else dp)
        )
        hosts = [name for name in layout.files if "/rng_host_" in name]
        assert len(hosts) == (tp * dp // 2 if version == 3 else 0)
