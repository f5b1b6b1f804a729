"""One process writes the checkpoint that the ranks of a layout would have written.

The files of a stage's tensor-parallel ranks are written side by side, so that each tensor is read once and at most one
tensor is in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lite.checkpoint import directory
from megatron_lite.checkpoint.contents import RankFiles, describe, join
from megatron_lite.checkpoint.layout import LAYOUT_FILE, FileInfo, Layout, TensorLayout, dump_layout
from megatron_lite.checkpoint.tensor_file import Spec, TensorWriter, save_errors
from megatron_lite.config.schema import Config
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.files import sync_folder
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamTable, Shard

Progress = Callable[[int], None]
"""A function that gets the number of bytes of each tensor that was written."""


class Values(Protocol):
    """The values that fill a checkpoint's files."""

    def kinds(self, name: str) -> Mapping[str, torch.dtype]:
        """Kind -> dtype of each value of a parameter, the weight first."""
        ...

    def shard_of(self, name: str, kind: str, shard: Shard, rank: int, size: int) -> Tensor:
        """The shard of one value that belongs to tensor-parallel rank `rank` of `size`."""
        ...


def write_grid(
    root: Path,
    iteration: int,
    values: Values,
    *,
    tables: Sequence[ParamTable],
    config: Config,
    state: dict[str, Any],
    origin: dict[str, Any],
    progress: Progress,
) -> None:
    """Write a checkpoint into `root`, a run's checkpoints/ folder, for the config's layout with one replica.

    `tables` has the parameters of each pipeline stage.
    """
    grid = Grid(tp=config.parallel.tensor, pp=config.parallel.pipeline)
    folder = directory.prepare(root, iteration)
    tensors: list[dict[str, TensorLayout]] = []
    files: dict[str, FileInfo] = {}
    for stage, table in enumerate(tables):
        shards = {name: _shapes(name, table, values, grid) for name in table}
        contexts = [ParallelContext.at(grid, grid.rank(tp=rank, pp=stage)) for rank in range(grid.tp)]
        ranks = [describe(ctx, table, shards) for ctx in contexts]
        tensors += [rank.tensors for rank in ranks]
        files |= _write_side_by_side(folder, ranks, table, shards, values, progress)
    layout = Layout(
        iteration=iteration,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        grid=grid,
        state=state,
        config=config.model_dump(mode="json"),
        origin=origin,
        tensors=join(tensors),
        files=files,
    )
    directory.write_durably(folder / LAYOUT_FILE, dump_layout(layout).encode())
    directory.publish(folder, root, iteration)


def _shapes(name: str, table: ParamTable, values: Values, grid: Grid) -> dict[str, LocalShard]:
    """The shards of a parameter on one rank, without memory."""
    meta = table[name]
    shape = meta.shard.local_shape(meta.shape, grid.tp)
    kinds = values.kinds(meta.tied_to or name)
    return {kind: LocalShard(torch.empty(shape, dtype=dtype, device="meta")) for kind, dtype in kinds.items()}


def _write_side_by_side(
    folder: Path,
    ranks: Sequence[RankFiles],
    table: ParamTable,
    shards: Mapping[str, Mapping[str, LocalShard]],
    values: Values,
    progress: Progress,
) -> dict[str, FileInfo]:
    """Write the files of a stage's tensor-parallel ranks; all ranks have the same keys."""
    infos: dict[str, FileInfo] = {}
    with save_errors("writing", folder):
        for rank in ranks:
            (folder / rank.folder).mkdir(exist_ok=True)
        for paths, entries in zip(
            zip(*(rank.files for rank in ranks), strict=True), ranks[0].files.values(), strict=True
        ):
            tensors = {key: shards[name][kind].values for key, (name, kind) in entries.items()}
            specs = {key: Spec(tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
            with ExitStack() as stack:
                writers = [stack.enter_context(TensorWriter(folder / path, specs)) for path in paths]
                for key in writers[0].keys:
                    name, kind = entries[key]
                    meta = table[name]
                    for rank, writer in enumerate(writers):
                        writer.add(values.shard_of(meta.tied_to or name, kind, meta.shard, rank, len(ranks)))
                    progress(prod(meta.shape) * specs[key].dtype.itemsize)
                infos |= {path: writer.close() for path, writer in zip(paths, writers, strict=True)}
        for rank in ranks:
            sync_folder(folder / rank.folder)
    return infos
