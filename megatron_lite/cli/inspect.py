"""`megatron-lite inspect`: what is in a checkpoint, from its layout.json."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from megatron_lite.checkpoint.layout import Layout, TensorLayout


def inspect(
    directory: Annotated[Path, typer.Argument(help="A run's folder, its checkpoints/ folder, or one iter_... folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare their checksums.")] = False,
) -> None:
    """Print iteration, layout, sizes and tensors of a checkpoint: the newest, where there are several."""
    from megatron_lite.checkpoint.directory import resolve
    from megatron_lite.checkpoint.layout import read_layout
    from megatron_lite.checkpoint.store import verify as verify_files
    from megatron_lite.errors import CheckpointError

    folder = resolve(directory)
    layout = read_layout(folder)
    typer.echo("\n".join([str(folder), *summary(layout), "", *tensor_table(layout)]))
    if verify:
        if problems := verify_files(folder, layout):
            raise CheckpointError("\n".join(problems))
        typer.echo(f"\nverified: all {len(layout.files)} files have the checksums in layout.json")


def summary(layout: "Layout") -> list[str]:
    """Lines about the checkpoint as a whole."""
    from math import prod

    grid = layout.grid
    ranks = "1 rank" if grid.world_size == 1 else f"{grid.world_size} ranks"
    stored_bytes = sum(info.bytes for info in layout.files.values())
    parameters = sum(prod(tensor.shape) for tensor in layout.tensors.values())
    state = ", ".join(f"{key}={value}" for key, value in _flat(layout.state))
    return [
        f"  iteration   {layout.iteration}, saved {layout.saved_at}",
        f"  layout      tp={grid.tp} cp={grid.cp} dp={grid.dp} pp={grid.pp} ({ranks})",
        f"  parameters  {parameters:,} in {len(layout.tensors):,} tensors",
        f"  files       {len(layout.files):,}, together {stored_bytes / 1e6:,.1f} MB",
        f"  state       {state}",
    ]


def tensor_table(layout: "Layout") -> list[str]:
    """A header and a line for each tensor, in aligned columns."""
    rows = [("tensor", "shape", "dtype", "cut", "optimizer", "files")]
    rows += [_row(name, tensor) for name, tensor in layout.tensors.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _row(name: str, tensor: "TensorLayout") -> tuple[str, ...]:
    from megatron_lite.checkpoint.layout import WEIGHT

    shard = tensor.shard
    fused = f" in parts {list(shard.parts)}" if shard.parts else ""
    numbers = {kind: value for kind, value in tensor.values.items() if kind != WEIGHT}
    files = sorted({piece.file for value in tensor.values.values() for piece in value.pieces})
    return (
        name,
        str(list(tensor.shape)),
        tensor.values[WEIGHT].dtype,
        f"dim {shard.dim}{fused}" if shard.is_split else "whole",
        " ".join(f"{kind}:{value.dtype}" for kind, value in numbers.items()) or "none",
        _joined(file.removesuffix(".safetensors") for file in files),
    )


def _joined(files: Iterable[str]) -> str:
    """The names; those that differ in the data-parallel rank only as `model_dp_000..003`."""
    ranks: dict[str, list[str]] = {}
    for file in files:
        stem, dp, rank = file.rpartition("_dp_")
        ranks.setdefault(stem + dp if dp else file, []).append(rank if dp else "")
    ends = {stem: found[0] + (f"..{found[-1]}" if len(found) > 1 else "") for stem, found in ranks.items()}
    return " ".join(stem + end for stem, end in ends.items())
