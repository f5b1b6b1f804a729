"""A model in a torch file for each tensor-parallel rank: full tensors from their shards, and back."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.recipe import Progress
from megatron_lite.convert.torch_file import TorchFile, TorchWriter, flatten
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.dtypes import PRECISION_NAMES
from megatron_lite.parallel.shard import Shard
from megatron_lite.text import listed


class Shaped(Protocol):
    """A tensor in the files of tensor-parallel ranks, or for so many."""

    @property
    def shards(self) -> Sequence[Any]:
        """One for each rank."""
        ...

    def shape(self, shard: Shard) -> tuple[int, ...]:
        """The shape of the full tensor if `shard` describes its shards."""
        ...


class ShardedTensor:
    """One tensor in the files of all tensor-parallel ranks: a shard of it in each, or a copy."""

    def __init__(self, name: str, files: Sequence[TorchFile], shards: Sequence[Tensor]):
        self.name, self.files, self.shards = name, files, shards

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every shard. CheckpointError: it is not one of weights."""
        found = self.shards[0].dtype
        if found not in PRECISION_NAMES:
            raise CheckpointError(f"{self.files[0].path}: {self.name} is {found}; save its weights as float32")
        return found

    def shape(self, shard: Shard) -> tuple[int, ...]:
        """The shape of the full tensor if `shard` describes its shards."""
        shape = self.shards[0].shape
        if not shape:
            raise CheckpointError(f"{self.files[0].path}: {self.name} is a single value, which no parameter is")
        for file, local in zip(self.files, self.shards, strict=True):
            if (local.shape, local.dtype) != (shape, self.dtype):
                raise CheckpointError(
                    f"{file.path}: {self.name} is {local.dtype} {list(local.shape)}, but {self.dtype} {list(shape)} in "
                    f"{self.files[0].path}; the files are not of one checkpoint"
                )
        return tuple(n * (len(self.shards) if dim == shard.dim else 1) for dim, n in enumerate(shape))

    def join(self, shard: Shard, rows: int | None = None) -> Tensor:
        """The full tensor; with `rows`, its first rows, with rows of zeros if it has fewer."""
        shape = self.shape(shard)
        for file, local in zip(self.files, self.shards, strict=True):
            file.check_size()
            if shard.dim is None and not torch.equal(local, self.shards[0]):
                raise CheckpointError(
                    f"{file.path}: {self.name} must be the same on all tensor-parallel ranks, but differs from "
                    f"{self.files[0].path}; the files are not of one checkpoint, or its ranks have diverged"
                )
        if rows is None:
            return shard.join(self.shards).contiguous()
        padding = torch.zeros((max(0, rows - shape[0]), *shape[1:]), dtype=self.dtype)
        return torch.cat([*self.shards, padding])[:rows]


def sharded_tensors(files: Sequence[TorchFile], contents: Sequence[Any]) -> dict[str, ShardedTensor]:
    """Every tensor of one part of each rank's file, by its dotted name there."""
    ranks = [flatten(content, file.path) for file, content in zip(files, contents, strict=True)]
    for file, tensors in zip(files, ranks, strict=True):
        if differing := sorted(tensors.keys() ^ ranks[0].keys()):
            raise CheckpointError(
                f"{file.path}: has other tensors than {files[0].path}: {listed(differing)}; the files are not of one "
                "checkpoint"
            )
    return {name: ShardedTensor(name, files, [tensors[name].tensor for tensors in ranks]) for name in ranks[0]}


def check_one_save(files: Sequence[TorchFile], facts_of: Callable[[TorchFile], Mapping[str, Any]]) -> None:
    """Raise CheckpointError unless all files have the same facts about the save that wrote them."""
    first = facts_of(files[0])
    for file in files[1:]:
        facts = facts_of(file)
        for name in {**first, **facts}:
            if facts.get(name) != first.get(name):
                raise CheckpointError(
                    f"{file.path}: has {name} {str(facts.get(name))[:80]}, but {files[0].path} has "
                    f"{str(first.get(name))[:80]}; the files are not of one checkpoint, copy all of them again"
                )


def model_of(where: Path, fields: Mapping[str, Any]) -> ModelConfig:
    """The model section with these fields; `where` is for the CheckpointError if they are invalid."""
    try:
        return ModelConfig.model_validate(fields, strict=False)
    except ValidationError as error:
        problems = [f"model.{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
        raise CheckpointError(
            f"{where}: does not describe a model that megatron_lite has; {listed(problems)}"
        ) from None


def write_shards(
    writers: Sequence[TorchWriter],
    name: str,
    full: Tensor,
    shard: Shard,
    *,
    progress: Progress,
    rows: int | None = None,
) -> None:
    """Write each tensor-parallel rank's shard into its file; with `rows`, shards of a table with that many rows.

    Rows beyond those of `full` are zeros.
    """
    size = len(writers)
    for rank, writer in enumerate(writers):
        if rows is None:
            local = shard.split(full, rank, size)
        else:
            local = full[rank * rows // size : (rank + 1) * rows // size]
            if missing := rows // size - len(local):  # no copy of a full table
                local = F.pad(local, (0, 0, 0, missing))
        writer.write(name, local)
        progress(local.numel() * local.dtype.itemsize)
