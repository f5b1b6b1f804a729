"""Whether a checkpoint is one of this model in this layout; if not, a message that names the tensors and the keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.layout import DTYPE_NAMES, WEIGHT, Layout
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import Held, ParamTable, Shard

SHOWN = 3  # tensors that a message lists
# Fields of the model section that may change while training goes on: they are no part of what the weights mean.
FREE = {"preset", "hidden_dropout", "mlp_dropout", "attention_dropout", "init_std", "attention", "fusion"}
GRID_KEYS = {"tp": "parallel.tensor", "pp": "parallel.pipeline", "cp": "parallel.context"}


def check_model(layout: Layout, folder: Path, *, table: ParamTable, config: Mapping[str, Any]) -> None:
    """Every parameter of this model is in the checkpoint, with this global shape and cut, and means the same there.

    Weights of the same shapes may belong to another number of heads, another activation or another norm.
    """
    missing = [name for name in table if name not in layout.tensors]
    differing = [
        f"{name} is {_describe(saved.shape, saved.shard)} there and {_describe(tuple(meta.shape), meta.shard)} here"
        for name, meta in table.items()
        if (saved := layout.tensors.get(name)) and (saved.shape, saved.shard) != (tuple(meta.shape), meta.shard)
    ]
    problems = []
    if differing:
        problems.append(_first(differing))
    if missing:
        problems.append("not there: " + _first(missing))
    if _changed_keys(layout, config) and not problems:
        problems.append("its tensors have the same shapes, but they mean something else")
    if problems:
        raise CheckpointError(_another_model(folder, problems, layout, config))


def check_grid(layout: Layout, folder: Path, *, ctx: ParallelContext) -> None:
    """The model is cut as it was; the data-parallel size may differ, because every replica is the same."""
    if changed := [key for axis, key in GRID_KEYS.items() if getattr(layout.grid, axis) != getattr(ctx.grid, axis)]:
        sizes = [", ".join(f"{axis}={getattr(grid, axis)}" for axis in GRID_KEYS) for grid in (layout.grid, ctx.grid)]
        raise CheckpointError(
            f"{folder}: was written at {sizes[0]}, this run asks for {sizes[1]}. Set {' and '.join(changed)} as it "
            "was; loading into another layout is not there yet"
        )


def check_tensors(
    layout: Layout,
    folder: Path,
    *,
    ctx: ParallelContext,
    replica: int,
    table: ParamTable,
    weights: Mapping[str, Held],
    optimizer_state: Mapping[str, Mapping[str, Held]],
    config: Mapping[str, Any],
) -> None:
    """What this rank wants is stored for its place: names, kinds, number formats, and no gap.

    For weights alone the number format is free.
    """
    tp, pp = ctx.tp.rank, ctx.pp.rank
    here = [name for name, tensor in layout.tensors.items() if tensor.values[WEIGHT].pieces_at(tp, pp, replica)]
    if (moved := _stage_keys(layout, config)) and set(here) != set(table):
        raise CheckpointError(
            f"{folder}: other layers were in pipeline stage {pp}. Set {' and '.join(moved)} as it was; loading into "
            "another layout is not there yet"
        )
    if extra := [name for name in here if name not in table]:
        raise CheckpointError(_another_model(folder, ["only there: " + _first(extra)], layout, config))
    for name, targets in by_kind(weights, optimizer_state).items():
        values = layout.tensors[name].values
        if name in optimizer_state and set(targets) != set(values):
            raise CheckpointError(
                f"{folder}: of {name} it holds {', '.join(sorted(values))}, this run needs "
                f"{', '.join(sorted(targets))}. {_set_back(layout, config)}"
            )
        for kind, held in targets.items():
            value = values[kind]
            if optimizer_state and value.dtype != DTYPE_NAMES[held.values.dtype]:
                raise CheckpointError(
                    f"{folder}: {kind} of {name} is {value.dtype}, this run needs {DTYPE_NAMES[held.values.dtype]}. "
                    f"{_set_back(layout, config)}"
                )
            if held.among_dp == "own" and layout.grid.dp != ctx.dp.size:
                raise CheckpointError(
                    f"{folder}: each of {layout.grid.dp} data-parallel ranks had {kind} of its own, and this run has "
                    f"{ctx.dp.size}. Start as many processes as then, or take the common weights alone with "
                    "checkpoint.load_weights"
                )
            pieces = value.pieces_at(tp, pp, replica)
            found = sum(max(0, min(piece.end, held.end) - max(piece.start, held.start)) for piece in pieces)
            if found != held.values.numel():
                raise CheckpointError(
                    f"{folder}: {kind} of {name} has {found:,} of the {held.values.numel():,} elements that "
                    f"tensor-parallel rank {tp} and pipeline stage {pp} need. Set the parallel section as it was"
                )


def by_kind(
    weights: Mapping[str, Held], optimizer_state: Mapping[str, Mapping[str, Held]]
) -> dict[str, dict[str, Held]]:
    """name -> kind -> what is held of it, the weight among the kinds."""
    return {
        name: {**({WEIGHT: weights[name]} if name in weights else {}), **optimizer_state.get(name, {})}
        for name in {**weights, **optimizer_state}
    }


def _another_model(folder: Path, problems: list[str], layout: Layout, config: Mapping[str, Any]) -> str:
    keys = _changed_keys(layout, config)
    remedy = f"Look at {', '.join(keys)}" if keys else "Look at the model section of the config"
    return f"{folder}: is of another model; {'; '.join(problems)}. {remedy}, or choose another run.dir"


def _changed_keys(layout: Layout, config: Mapping[str, Any]) -> list[str]:
    """Fields of the model section that differ and matter."""
    return _differing(layout, config, "model", [key for key in layout.config.get("model", {}) if key not in FREE])


def _stage_keys(layout: Layout, config: Mapping[str, Any]) -> list[str]:
    """Fields that say which layers a pipeline stage holds, where they differ."""
    return _differing(layout, config, "parallel", ["virtual_pipeline", "pipeline_layout"])


def _set_back(layout: Layout, config: Mapping[str, Any]) -> str:
    """What to do about a run that has other numbers for each parameter than there are."""
    keys = _differing(layout, config, "train", ["precision"])
    keys += _differing(layout, config, "sync", ["mode", "delay", "outer_momentum"])
    return f"Set {' and '.join(keys)} as it was, or take the weights alone with checkpoint.load_weights"


def _differing(layout: Layout, config: Mapping[str, Any], section: str, keys: list[str]) -> list[str]:
    saved, wanted = layout.config.get(section, {}), config.get(section, {})
    return [
        f"{section}.{key} ({saved[key]} there, {wanted[key]} here)"
        for key in keys
        if key in saved and key in wanted and str(saved[key]) != str(wanted[key])
    ]


def _describe(shape: tuple[int, ...], shard: Shard) -> str:
    return str(list(shape)) + (f" fused of {list(shard.parts)}" if shard.parts else "")


def _first(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
