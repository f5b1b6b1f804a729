"""Checks that a checkpoint belongs to this model, and a plan of which stored slices fill a rank's local shards."""

from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_lite.checkpoint.compatible import STATE, Fields, changed_model, differing
from megatron_lite.checkpoint.contents import Contents, replica_of
from megatron_lite.checkpoint.layout import WEIGHT, Layout
from megatron_lite.checkpoint.reshard import Move, moves, rectangles
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import SAFETENSORS_NAMES
from megatron_lite.parallel.shard import ParamTable, Shard
from megatron_lite.text import listed

# The key in a checkpoint's origin that names its model provider, and the name of get_model, which needs none.
MODEL_PROVIDER, BUILT_IN = "model_provider", "megatron_lite.model.build:get_model"


def check_provider(layout: Layout, folder: Path, provider: str) -> None:
    """Raise CheckpointError where the built-in model (an empty `provider`) would load a custom model's checkpoint.

    Tensors of the same names and shapes may be used in another way.
    """
    built_by = layout.origin.get(MODEL_PROVIDER, BUILT_IN)
    if built_by != BUILT_IN and not provider:
        raise CheckpointError(f"{folder}: a custom model built it, {built_by}; load it with --model {built_by}")


def check_model(layout: Layout, folder: Path, *, table: ParamTable, names: Collection[str], config: Fields) -> None:
    """Raise CheckpointError where the checkpoint is not one of this model.

        table    this rank's parameters; global shapes and shards must be equal in the checkpoint
        names    every parameter of the model; the checkpoint must have no other

    Tensors of equal shapes may belong to another number of heads, activation or norm, so the configs are compared too.
    """
    missing, differing_shapes = [], []
    for name, meta in table.items():
        saved = layout.tensors.get(stored_name(name, table, layout))
        if saved is None:
            missing.append(name)
        elif (saved.shape, saved.shard) != (tuple(meta.shape), meta.shard):
            here, there = _described(meta.shape, meta.shard), _described(saved.shape, saved.shard)
            differing_shapes.append(f"{name} is {there} in the checkpoint and {here} in this model")
    extra = [name for name, saved in layout.tensors.items() if name not in names and not saved.copy_of]
    changed = changed_model(layout.config, config)
    found = {"": differing_shapes, "missing in the checkpoint: ": missing, "only in the checkpoint: ": extra}
    problems = [label + listed(names) for label, names in found.items() if names]
    if missing and any(name.endswith(f".{missing[0]}") for name in extra):
        problems.append("its names have a prefix; load the model of a custom provider with --model FILE.py:NAME")
    if changed and not problems:
        problems.append("its tensors have the same shapes, but another meaning")
    if problems:
        keys = ", ".join(changed) or "the model section of the config"
        problem = f"{folder}: belongs to another model; {'; '.join(problems)}"
        raise CheckpointError(f"{problem}. Look at {keys}, or choose another run.dir")


def stored_name(name: str, table: ParamTable, layout: Layout) -> str:
    """The name in the checkpoint: the original's for a tied copy that the saving layout did not have."""
    return name if name in layout.tensors else table[name].tied_to or name


def plan(
    layout: Layout, folder: Path, *, ctx: ParallelContext, table: ParamTable, contents: Contents, config: Fields
) -> list[tuple[LocalShard, list[Move]]]:
    """The moves that fill each local shard of this rank completely.

    Raise CheckpointError where the optimizer state has other kinds or dtypes. Weights alone are converted.
    """
    keys = " and ".join(differing(layout.config, config, STATE)) or "the optimizer's settings"
    remedy = f"Restore {keys}, or load the weights alone with checkpoint.load_weights"
    found = []
    for name, targets in contents.by_kind().items():
        tensor = layout.tensors[stored_name(name, table, layout)]
        if name in contents.optimizer_state and set(targets) != set(tensor.values):
            if set(tensor.values) == {WEIGHT}:
                raise CheckpointError(
                    f"{folder}: has weights alone; start from it with checkpoint.load_weights and another run.dir"
                )
            saved, needed = (", ".join(sorted(kinds)) for kinds in (tensor.values, targets))
            raise CheckpointError(f"{folder}: {name} has {saved}, this run needs {needed}. {remedy}")
        for kind, shard in targets.items():
            value, dtype = tensor.values[kind], SAFETENSORS_NAMES[shard.values.dtype]
            if contents.optimizer_state and value.dtype != dtype:
                raise CheckpointError(f"{folder}: {kind} of {name} is {value.dtype}, this run needs {dtype}. {remedy}")
            if shard.across_dp == "local" and layout.grid.dp != ctx.dp.size:
                raise CheckpointError(
                    f"{folder}: {kind} differs on {layout.grid.dp} data-parallel ranks, this run has {ctx.dp.size}; "
                    f"start {layout.grid.dp}, or load the weights alone with checkpoint.load_weights"
                )
            slices = value.slices_for(tensor.shard, ctx.tp.rank, ctx.pp.rank, replica_of(ctx), layout.grid.tp)
            wanted = rectangles(tensor.shape, tensor.shard, ctx.tp.rank, ctx.tp.size, shard.start, shard.end)
            planned = moves(tensor, slices, layout.grid.tp, wanted)
            if (count := sum(move.target.numel for move in planned)) != shard.values.numel():
                raise CheckpointError(
                    f"{folder}: {kind} of {name} has {count:,} of the {shard.values.numel():,} elements of this rank"
                )
            found.append((shard, planned))
    return found


def _described(shape: Sequence[int], shard: Shard) -> str:
    return str(list(shape)) + (f" fused of {list(shard.parts)}" if shard.parts else "")
