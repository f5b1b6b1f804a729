"""A model cut over tensor-parallel ranks with a torch file for each: whole tensors out of the cuts, and back."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.safe_pickle import StoredTensor
from megatron_lite.convert.torch_file import TorchFile, TorchWriter, flatten
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.shard import Shard
from megatron_lite.text import listed

Progress = Callable[[int], None]


class ShardedTensor:
    """One tensor in the files of all tensor-parallel ranks: a piece of it in each, or a copy."""

    def __init__(self, name: str, files: Sequence[TorchFile], pieces: Sequence[StoredTensor]):
        self.name, self.files, self.pieces = name, files, pieces

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    def shape(self, shard: Shard) -> tuple[int, ...]:
        """Of the whole tensor, if it is cut so."""
        shape = self.pieces[0].shape
        if not shape:
            raise CheckpointError(f"{self.files[0].path}: {self.name} is a single number, which no parameter is")
        for file, piece in zip(self.files, self.pieces, strict=True):
            if (piece.shape, piece.dtype) != (shape, self.dtype):
                raise CheckpointError(
                    f"{file.path}: {self.name} is {piece.dtype} {list(piece.shape)}, but {self.dtype} {list(shape)} in "
                    f"{self.files[0].path}; the files are not of one checkpoint"
                )
        return tuple(n * (len(self.pieces) if dim == shard.dim else 1) for dim, n in enumerate(shape))

    def join(self, shard: Shard, rows: int | None = None) -> Tensor:
        """The whole tensor; with `rows` that many, of which those that it lacks are zero."""
        shape = self.shape(shard)
        if rows is None:
            whole = torch.empty(shape, dtype=self.dtype)
        else:
            whole = torch.zeros((rows, *shape[1:]), dtype=self.dtype)
        if shard.dim is None:
            self._fill_from_copies(whole)
            return whole
        for rank, (file, piece) in enumerate(zip(self.files, self.pieces, strict=True)):
            done = 0
            for start, end in shard.ranges(shape[shard.dim], rank, len(self.pieces)):
                if (length := min(end, whole.shape[shard.dim]) - start) > 0:
                    file.fill(whole.narrow(shard.dim, start, length), piece.narrow(shard.dim, done, length))
                done += end - start
        return whole

    def _fill_from_copies(self, whole: Tensor) -> None:
        self.files[0].fill(whole, self.pieces[0])
        for file, piece in zip(self.files, self.pieces, strict=True):
            if not file.equals(piece, whole):
                raise CheckpointError(
                    f"{file.path}: {self.name} must be the same on all tensor-parallel ranks, but differs from "
                    f"{self.files[0].path}; the files are not of one checkpoint, or its ranks have drifted apart"
                )


def sharded_tensors(files: Sequence[TorchFile], contents: Sequence[Any]) -> dict[str, ShardedTensor]:
    """Every tensor of one part of each rank's file, by its dotted name there."""
    ranks = [flatten(content, file.path) for file, content in zip(files, contents, strict=True)]
    for file, tensors in zip(files, ranks, strict=True):
        if differing := sorted(tensors.keys() ^ ranks[0].keys()):
            raise CheckpointError(
                f"{file.path}: has other tensors than {files[0].path}: {listed(differing)}; the files are not of one "
                "checkpoint"
            )
    return {name: ShardedTensor(name, files, [tensors[name] for tensors in ranks]) for name in ranks[0]}


def model_of(where: Path, fields: Mapping[str, Any]) -> ModelConfig:
    """The model section that a foreign checkpoint amounts to."""
    try:
        return ModelConfig.model_validate(fields, strict=False)
    except ValidationError as error:
        problems = [f"model.{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
        raise CheckpointError(f"{where}: describes no model of ours; {listed(problems)}") from None


def write_shards(
    writers: Sequence[TorchWriter],
    name: str,
    whole: Tensor,
    shard: Shard,
    *,
    progress: Progress,
    rows: int | None = None,
) -> None:
    """Each tensor-parallel rank's piece goes into its file; with `rows`, of the tensor with zeros to that many."""
    for rank, writer in enumerate(writers):
        writer.write(name, _piece(whole, shard, rank, len(writers), rows))
        shape = whole.shape if rows is None else (rows, *whole.shape[1:])
        progress(prod(shard.local_shape(shape, len(writers))) * whole.dtype.itemsize)


def _piece(whole: Tensor, shard: Shard, rank: int, size: int, rows: int | None) -> Tensor:
    if rows is None:
        return shard.split(whole, rank, size)
    piece = whole[rank * rows // size : (rank + 1) * rows // size]
    lacking = rows // size - len(piece)
    return F.pad(piece, (0, 0, 0, lacking)) if lacking else piece
