"""Whether a checkpoint is one of this model, and where in it a rank finds what it holds; if not, a message that names
the tensors and the keys."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.layout import WEIGHT, Layout
from megatron_lite.checkpoint.reshard import Move, moves, rectangles
from megatron_lite.config.schema import ModelConfig
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import SAFETENSORS_NAMES
from megatron_lite.parallel.shard import ParamTable, Shard
from megatron_lite.text import listed

DERIVED = {  # fields whose 0 stands for a property of ModelConfig
    "num_query_groups": "query_groups",
    "head_dim": "head_size",
    "ffn_hidden_size": "ffn_size",
    "padded_vocab_size": "padded_vocab",
}
# The key in a checkpoint's origin that names what built its model, and the name of get_model, which needs none.
MODEL_PROVIDER, BUILT_IN = "model_provider", "megatron_lite.model.build:get_model"
# Fields of the model section that may change while training goes on: they are no part of what the weights mean.
FREE = {"preset", "hidden_dropout", "mlp_dropout", "attention_dropout", "init_std", "attention", "fusion"}


def check_provider(layout: Layout, folder: Path, provider: str) -> None:
    """Raises CheckpointError where a custom model built the checkpoint and the built-in one (an empty `provider`) would
    load it: tensors of the same names and shapes may be computed with in another way."""
    built_by = layout.origin.get(MODEL_PROVIDER, BUILT_IN)
    if built_by != BUILT_IN and not provider:
        raise CheckpointError(
            f"{folder}: a custom model built it, {built_by}; load it with --model {built_by}, or from a script with "
            "that model_provider"
        )


def check_model(
    layout: Layout, folder: Path, *, table: ParamTable, names: Collection[str], config: Mapping[str, Any]
) -> None:
    """The checkpoint has the parameters of this model, `names`, and no others; those of this rank's `table` have the
    same global shape and cut there, and mean the same.

    Weights of the same shapes may belong to another number of heads, another activation or another norm.
    """
    missing = [name for name in table if stored_name(name, table, layout) not in layout.tensors]
    differing = [
        f"{name} is {_describe(saved.shape, saved.shard)} in the checkpoint and "
        f"{_describe(tuple(meta.shape), meta.shard)} in this model"
        for name, meta in table.items()
        if (saved := layout.tensors.get(stored_name(name, table, layout)))
        and (saved.shape, saved.shard) != (tuple(meta.shape), meta.shard)
    ]
    extra = [name for name, saved in layout.tensors.items() if name not in names and not saved.copy_of]
    problems = []
    if differing:
        problems.append(listed(differing))
    if missing:
        problems.append("missing in the checkpoint: " + listed(missing))
    if extra:
        problems.append("only in the checkpoint: " + listed(extra))
    if missing and any(name.endswith(f".{missing[0]}") for name in extra):
        problems.append(
            "its names have a prefix, so a custom model may have built it: load it with --model FILE.py:NAME"
        )
    if _changed_keys(layout, config) and not problems:
        problems.append("its tensors have the same shapes, but another meaning")
    if problems:
        raise CheckpointError(_another_model(folder, problems, layout, config))


def stored_name(name: str, table: ParamTable, layout: Layout) -> str:
    """The name in the checkpoint: a tied copy that was not there, on a stage of its own, is the original."""
    return name if name in layout.tensors else table[name].tied_to or name


def plan(
    layout: Layout,
    folder: Path,
    *,
    ctx: ParallelContext,
    replica: int,
    table: ParamTable,
    weights: Mapping[str, LocalShard],
    optimizer_state: Mapping[str, Mapping[str, LocalShard]],
    config: Mapping[str, Any],
) -> list[tuple[LocalShard, list[Move]]]:
    """How everything that this rank wants is filled; kinds and number formats are those stored, and there is no gap.

    For weights alone the number format is free.
    """
    found = []
    for name, targets in by_kind(weights, optimizer_state).items():
        tensor = layout.tensors[stored_name(name, table, layout)]
        if name in optimizer_state and set(tensor.values) == {WEIGHT}:
            raise CheckpointError(
                f"{folder}: holds weights alone, so training cannot go on from it; take it as a start, with "
                "checkpoint.load_weights and another run.dir"
            )
        if name in optimizer_state and set(targets) != set(tensor.values):
            raise CheckpointError(
                f"{folder}: of {name} it holds {', '.join(sorted(tensor.values))}, this run needs "
                f"{', '.join(sorted(targets))}. {_set_back(layout, config)}"
            )
        for kind, held in targets.items():
            value = tensor.values[kind]
            if optimizer_state and value.dtype != SAFETENSORS_NAMES[held.values.dtype]:
                raise CheckpointError(
                    f"{folder}: {kind} of {name} is {value.dtype}, this run needs "
                    f"{SAFETENSORS_NAMES[held.values.dtype]}. {_set_back(layout, config)}"
                )
            if held.across_dp == "local" and layout.grid.dp != ctx.dp.size:
                raise CheckpointError(
                    f"{folder}: each of {layout.grid.dp} data-parallel ranks had {kind} of its own, and this run has "
                    f"{ctx.dp.size}. Start as many data-parallel ranks as then, or take the common weights alone with "
                    "checkpoint.load_weights"
                )
            pieces = value.pieces_for(tensor.shard, ctx.tp.rank, ctx.pp.rank, replica, layout.grid.tp)
            wanted = rectangles(tensor.shape, tensor.shard, ctx.tp.rank, ctx.tp.size, held.start, held.end)
            moved = moves(tensor, pieces, layout.grid.tp, wanted)
            if (count := sum(move.target.numel for move in moved)) != held.values.numel():
                raise CheckpointError(
                    f"{folder}: {kind} of {name} has {count:,} of the {held.values.numel():,} elements that "
                    f"tensor-parallel rank {ctx.tp.rank} of {ctx.tp.size} needs"
                )
            found.append((held, moved))
    return found


def by_kind(
    weights: Mapping[str, LocalShard], optimizer_state: Mapping[str, Mapping[str, LocalShard]]
) -> dict[str, dict[str, LocalShard]]:
    """name -> kind -> what is held of it, the weight among the kinds."""
    return {
        name: {**({WEIGHT: weights[name]} if name in weights else {}), **optimizer_state.get(name, {})}
        for name in {**weights, **optimizer_state}
    }


def _another_model(folder: Path, problems: list[str], layout: Layout, config: Mapping[str, Any]) -> str:
    keys = _changed_keys(layout, config)
    remedy = f"Look at {', '.join(keys)}" if keys else "Look at the model section of the config"
    return f"{folder}: belongs to another model; {'; '.join(problems)}. {remedy}, or choose another run.dir"


def _changed_keys(layout: Layout, config: Mapping[str, Any]) -> list[str]:
    """Fields of the model section that differ and matter."""
    saved, wanted = (_settled(section.get("model", {})) for section in (layout.config, config))
    keys = [key for key in saved if key not in free_fields(saved)]
    return _differing({"model": saved}, {"model": wanted}, "model", keys)


def free_fields(model: Mapping[str, Any]) -> set[str]:
    """Fields of this model section that may change: rotary positions have no weights, and no end."""
    return FREE | ({"max_position_embeddings"} if model.get("position") == "rotary" else set())


def _settled(model: Mapping[str, Any]) -> dict[str, Any]:
    """Its fields, with the value where one follows from the others: a converted model states it, a config seldom."""
    try:
        known = ModelConfig.model_validate(model)
    except ValueError:  # of a version with other fields
        return dict(model)
    return {**model, **{field: getattr(known, derived) for field, derived in DERIVED.items() if field in model}}


def _set_back(layout: Layout, config: Mapping[str, Any]) -> str:
    """What to do about a run that has other numbers for each parameter than there are."""
    keys = _differing(layout.config, config, "train", ["precision"])
    keys += _differing(layout.config, config, "sync", ["mode", "delay", "outer_momentum"])
    return f"Set {' and '.join(keys)} as it was, or take the weights alone with checkpoint.load_weights"


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], section: str, keys: list[str]) -> list[str]:
    saved, wanted = before.get(section, {}), now.get(section, {})
    return [
        f"{section}.{key} (checkpoint: {saved[key]}, config: {wanted[key]})"
        for key in keys
        if key in saved and key in wanted and str(saved[key]) != str(wanted[key])
    ]


def _describe(shape: tuple[int, ...], shard: Shard) -> str:
    return str(list(shape)) + (f" fused of {list(shard.parts)}" if shard.parts else "")
