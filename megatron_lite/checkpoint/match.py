"""Whether a checkpoint is one of this model in this layout; if not, a message that names the tensors and the keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint.layout import DTYPE_NAMES, WEIGHT, Layout
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable, Shard

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
    params: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Mapping[str, Tensor]],
    config: Mapping[str, Any],
) -> None:
    """This rank's tensors are the ones stored for its place: names, kinds, number formats, and no gap."""
    tp, pp = ctx.tp.rank, ctx.pp.rank
    here = [name for name, tensor in layout.tensors.items() if tensor.values[WEIGHT].pieces_at(tp, pp)]
    if (moved := _stage_keys(layout, config)) and set(here) != set(params):
        raise CheckpointError(
            f"{folder}: other layers were in pipeline stage {pp}. Set {' and '.join(moved)} as it was; loading into "
            "another layout is not there yet"
        )
    if extra := [name for name in here if name not in params]:
        raise CheckpointError(_another_model(folder, ["only there: " + _first(extra)], layout, config))
    for name, targets in by_kind(params, optimizer_state).items():
        values = layout.tensors[name].values
        if optimizer_state and set(targets) != set(values):
            raise CheckpointError(
                f"{folder}: of {name} it holds {', '.join(sorted(values))}, this run needs "
                f"{', '.join(sorted(targets))}. Set train.precision as it was{_was(layout, 'train', 'precision')}"
            )
        for kind, target in targets.items():
            value = values[kind]
            if value.dtype != DTYPE_NAMES[target.dtype]:
                raise CheckpointError(
                    f"{folder}: {kind} of {name} is {value.dtype}, this run needs {DTYPE_NAMES[target.dtype]}. "
                    f"Set train.precision as it was{_was(layout, 'train', 'precision')}"
                )
            found = sum(piece.end - piece.start for piece in value.pieces_at(tp, pp))
            if found != target.numel():
                raise CheckpointError(
                    f"{folder}: {kind} of {name} has {found:,} elements for tensor-parallel rank {tp} and pipeline "
                    f"stage {pp}, this run needs {target.numel():,}. Set the parallel section as it was"
                )


def by_kind(
    params: Mapping[str, Tensor], optimizer_state: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """name -> kind -> tensor, the weight among the kinds."""
    return {name: {WEIGHT: tensor, **optimizer_state.get(name, {})} for name, tensor in params.items()}


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


def _was(layout: Layout, section: str, key: str) -> str:
    value = layout.config.get(section, {}).get(key)
    return f" ({value})" if value is not None else ""
