"""One process writes the checkpoint that the ranks of a layout would have written.

The files of all tensor-parallel ranks of a stage are written side by side, so that each tensor is read once and no more
than one is in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_lite.checkpoint import directory
from megatron_lite.checkpoint.layout import (
    LAYOUT_FILE,
    WEIGHT,
    FileInfo,
    Layout,
    Piece,
    TensorLayout,
    Value,
    dump_layout,
    mp_rank_folder,
)
from megatron_lite.checkpoint.tensor_file import Spec, TensorWriter, explained, sync_folder
from megatron_lite.config.schema import Config
from megatron_lite.parallel.dtypes import SAFETENSORS_NAMES
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard

Progress = Callable[[int], None]
"""Is told the bytes of each tensor that was written."""


class Numbers(Protocol):
    """What the files of a checkpoint are filled with."""

    def kinds(self, name: str) -> Mapping[str, torch.dtype]:
        """The kinds of numbers of a parameter, the weight first."""
        ...

    def cut(self, name: str, kind: str, shard: Shard, rank: int, size: int) -> Tensor:
        """What one of `size` tensor-parallel ranks holds of them."""
        ...


class _Entry(NamedTuple):
    """One kind of numbers of a parameter, in a file."""

    key: str
    meta: ParamMeta
    kind: str
    dtype: torch.dtype

    @property
    def source(self) -> str:
        """The name under which the numbers are found: a tied copy is not there."""
        return self.meta.tied_to or self.meta.name


def write_grid(
    root: Path,
    iteration: int,
    numbers: Numbers,
    *,
    tables: Sequence[ParamTable],
    config: Config,
    state: dict[str, Any],
    origin: dict[str, Any],
    progress: Progress,
) -> None:
    """Writes a checkpoint into `root`, a run's checkpoints/ folder, for the config's layout with one replica of it.

    `tables` has the parameters of each pipeline stage.
    """
    grid = Grid(tp=config.parallel.tensor, pp=config.parallel.pipeline)
    folder = directory.prepare(root, iteration)
    tensors: dict[str, TensorLayout] = {}
    files: dict[str, FileInfo] = {}
    for stage, table in enumerate(tables):
        contents = _contents(table, numbers)
        for stem, entries in contents.items():
            files |= _write_side_by_side(folder, stem, entries, grid, stage, numbers, progress)
        for name, meta in table.items():
            values = {
                entry.kind: _value(entry, stem, grid, stage)
                for stem, entries in contents.items()
                for entry in entries
                if entry.meta is meta
            }
            tensors[name] = TensorLayout(shape=meta.shape, shard=meta.shard, values=values, copy_of=meta.tied_to)
    layout = Layout(
        iteration=iteration,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        grid=grid,
        state=state,
        config=config.model_dump(mode="json"),
        origin=origin,
        tensors=tensors,
        files=files,
    )
    directory.write_durably(folder / LAYOUT_FILE, dump_layout(layout).encode())
    directory.publish(folder, root, iteration)


def _contents(table: ParamTable, numbers: Numbers) -> dict[str, list[_Entry]]:
    """What is in each file of a rank, by the file's stem."""
    contents: dict[str, list[_Entry]] = {}
    for name, meta in table.items():
        source = _Entry(name, meta, WEIGHT, torch.float32).source
        for kind, dtype in numbers.kinds(source).items():
            stem, key = ("model", name) if kind == WEIGHT else ("optimizer_dp_000", f"{kind}/{name}")
            contents.setdefault(stem, []).append(_Entry(key, meta, kind, dtype))
    return contents


def _write_side_by_side(
    folder: Path, stem: str, entries: list[_Entry], grid: Grid, stage: int, numbers: Numbers, progress: Progress
) -> dict[str, FileInfo]:
    """One file for each tensor-parallel rank of a stage."""
    by_key = {entry.key: entry for entry in entries}
    specs = {entry.key: Spec(entry.dtype, entry.meta.shard.local_shape(entry.meta.shape, grid.tp)) for entry in entries}
    places = [folder / mp_rank_folder(rank, stage, grid) for rank in range(grid.tp)]
    with ExitStack() as stack, explained("writing", folder):
        for place in places:
            place.mkdir(exist_ok=True)
        writers = [stack.enter_context(TensorWriter(place / f"{stem}.safetensors", specs)) for place in places]
        for key in writers[0].keys:
            entry = by_key[key]
            for rank, writer in enumerate(writers):
                writer.add(numbers.cut(entry.source, entry.kind, entry.meta.shard, rank, grid.tp))
            progress(prod(entry.meta.shape) * entry.dtype.itemsize)
        infos = {str(writer.path.relative_to(folder)): writer.close() for writer in writers}
        for place in places:
            sync_folder(place)
    return infos


def _value(entry: _Entry, stem: str, grid: Grid, stage: int) -> Value:
    """Where an entry's numbers are: whole cuts, one for each tensor-parallel rank."""
    numel = prod(entry.meta.shard.local_shape(entry.meta.shape, grid.tp))
    return Value(
        dtype=SAFETENSORS_NAMES[entry.dtype],
        pieces=tuple(
            Piece(
                file=f"{mp_rank_folder(rank, stage, grid)}/{stem}.safetensors",
                key=entry.key,
                tp=rank,
                pp=stage,
                start=0,
                end=numel,
            )
            for rank in range(grid.tp)
        ),
    )
