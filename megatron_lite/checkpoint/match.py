"""Checks that a checkpoint belongs to this model, and a plan of which stored slices fill a rank's local shards."""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron_lite.checkpoint.compatible import STATE, Fields, changed_model, differing
from megatron_lite.checkpoint.contents import Contents
from megatron_lite.checkpoint.layout import USE_ANOTHER, WEIGHT, Layout
from megatron_lite.checkpoint.reshard import Move, find_moves, rectangles, tile
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import SAFETENSORS_NAMES
from megatron_lite.parallel.shard import ParamTable, Shard
from megatron_lite.text import listed

MODEL_TYPE = "model_type"  # key in a checkpoint's origin: the model_type that its config.json had
TOKEN_IDS = "token_ids"  # key in a checkpoint's origin: the fields *_token_id that its config.json had
STARTS_TEXTS = "starts_texts"  # key in a checkpoint's origin of a model whose documents start with the tokenizer's BOS
MODEL_PROVIDER = "model_provider"  # key in a checkpoint's origin; absent for the built-in model
BUILT_IN = "megatron_lite.model.build:get_model"  # name of the built-in provider


# Tensors that a checkpoint may lack where only weights are loaded: they start from their initial values, as with
# Megatron-LM's `add_tokentype_embeddings` before fine-tuning.
ADDED_AT_FINE_TUNING = {"embedding.tokentype_embeddings.weight": "model.num_tokentypes (checkpoint: 0, "}


def check_provider(layout: Layout, folder: Path, provider: str) -> None:
    """Raise CheckpointError if the built-in model, whose `provider` is empty, would load a custom model's checkpoint.

    Equal names and shapes do not suffice: a custom model may compute something else with these tensors.
    """
    built_by = layout.origin.get(MODEL_PROVIDER, BUILT_IN)
    if built_by != BUILT_IN and not provider:
        script = shlex.quote(built_by)
        raise CheckpointError(f"{folder}: a custom model, {script}, wrote it; load it with --model {script}")


def check_model(
    layout: Layout, folder: Path, *, table: ParamTable, names: Collection[str], config: Fields, only_weights: bool
) -> None:
    """Raise CheckpointError if the checkpoint belongs to another model.

        table    this rank's parameters; the checkpoint must have each, with the same global shape and shard
        names    every parameter of the model; except for tied copies, the checkpoint must have no others
        only_weights   those of ADDED_AT_FINE_TUNING may be missing

    Models with another number of heads, activation or norm can have equal shapes, so the configs are compared too.
    """
    missing, differing_shapes, untied, is_custom = [], [], [], MODEL_PROVIDER in layout.origin
    for name, meta in table.items():
        saved = layout.tensors.get(stored_name(name, table, layout))
        if saved is None:
            missing.append(name)
        elif (saved.shape, saved.shard) != (tuple(meta.shape), meta.shard):
            here, there = _described(meta.shape, meta.shard), _described(saved.shape, saved.shard)
            differing_shapes.append(f"{name} is {there} in the checkpoint and {here} in this model")
        elif is_custom and meta.tied_to not in ("", name, saved.copy_of) and name in layout.tensors:
            untied.append(f"{name}, in this model a copy of {meta.tied_to}, was trained apart from it")
    extra = [name for name, saved in layout.tensors.items() if name not in names and not saved.copy_of]
    changed = changed_model(layout.config, config)
    for name, change in ADDED_AT_FINE_TUNING.items() if only_weights else ():
        missing = [other for other in missing if other != name]
        changed = [message for message in changed if not message.startswith(change)]
    found = {"": differing_shapes + untied, "missing in the checkpoint: ": missing, "only in the checkpoint: ": extra}
    problems = [label + listed(wrong) for label, wrong in found.items() if wrong]
    if missing and any(name.endswith(f".{missing[0]}") for name in extra):
        problems.append("its names have a prefix, as those of a custom model may; load it with --model FILE.py:NAME")
    if changed and not problems:
        problems.append("names and shapes agree, but settings of the model differ")
    if problems:
        keys = ", ".join(changed) or "the model section of the config"
        problem = f"{folder}: belongs to another model; {'; '.join(problems)}"
        raise CheckpointError(f"{problem}. Look at {keys}, or choose another run.dir")


def stored_name(name: str, table: ParamTable, layout: Layout) -> str:
    """The name of a parameter in the checkpoint. A tied copy that the checkpoint lacks is read from its original."""
    return name if name in layout.tensors else table[name].tied_to or name


def plan(
    layout: Layout, folder: Path, *, ctx: ParallelContext, table: ParamTable, contents: Contents, config: Fields
) -> list[tuple[LocalShard, list[Move]]]:
    """For each local shard of this rank, the moves out of stored slices that fill it completely.

    Raise CheckpointError if the optimizer state has other kinds or dtypes or another data-parallel size, or elements
    are missing. Without optimizer state, weights may have another dtype.
    """
    keys = " and ".join(differing(layout.config, config, STATE)) or "the settings of the optimizer state"
    remedy = f"Restore {keys}, or load the weights alone with checkpoint.load_weights"
    found = []
    for name, targets in contents.by_kind().items():
        if name in ADDED_AT_FINE_TUNING and name not in layout.tensors:
            continue
        stored = stored_name(name, table, layout)
        tensor = layout.tensors[stored]
        if name in contents.optimizer_state and set(targets) != set(tensor.values):
            if set(tensor.values) == {WEIGHT}:
                raise CheckpointError(
                    f"{folder}: has weights alone; start from them with checkpoint.load_weights, in another run.dir"
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
                    f"use {layout.grid.dp}, or load the weights alone with checkpoint.load_weights"
                )
            wanted = rectangles(tensor.shape, table[name].shard, ctx.tp.rank, ctx.tp.size, shard.start, shard.end)
            place = {"tp": ctx.tp.rank, "pp": ctx.pp.rank, "dp": ctx.dp_cp.rank}
            planned = find_moves(layout, stored, kind, wanted, **place)
            if (count := sum(move.target.numel for move in planned)) != shard.values.numel():
                raise CheckpointError(
                    f"{folder}: {kind} of {name} has {count:,} of the {shard.values.numel():,} elements of this rank"
                )
            if not tile((move.target.box for move in planned), (rectangle.box for rectangle in wanted)):
                raise CheckpointError(f"{folder}: slices of {kind} of {name} overlap; {USE_ANOTHER}")
            found.append((shard, planned))
    return found


def readers(shards: Sequence[LocalShard], ctx: ParallelContext) -> list[int | None]:
    """The rank of dp_cp that reads each value for all of them; None where every rank reads its own.

    Replicated values are read by one rank each, and every rank reads about as many bytes.
    """
    group, found, before = ctx.dp_cp, [], 0
    is_replicated = [shard.across_dp == "replicated" and group.pg is not None for shard in shards]
    total = sum(shard.values.nbytes for shard, is_one in zip(shards, is_replicated, strict=True) if is_one)
    for shard, is_one in zip(shards, is_replicated, strict=True):
        found.append(min(before * group.size // max(1, total), group.size - 1) if is_one else None)
        before += shard.values.nbytes * is_one
    return found


def _described(shape: Sequence[int], shard: Shard) -> str:
    return str(list(shape)) + (f" fused of {list(shard.parts)}" if shard.parts else "")
