"""Folders of torch.distributed.checkpoint: parts of tensors read one at a time, and written tensor by tensor.

`.metadata` is a pickle with the shape of each tensor and the place of each of its chunks in the files `__*.distcp`.
torch's own reader and writer do the rest, in this process and without a process group. The pickle is not trusted: only
torch's classes for it are created.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

import importlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_lite.checkpoint.tensor_file import Spec
from megatron_lite.convert.safe_pickle import Inert
from megatron_lite.convert.torch_errors import torch_errors
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.text import listed

METADATA = ".metadata"
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# The module of the pickle -> its names that are created; every other one is `Inert`.
_ALLOWED = {
    "collections": {"OrderedDict"},
    "torch": {"Size", "strided", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = name in _ALLOWED.get(module, ())
        return getattr(importlib.import_module(module), name) if allowed else Inert


def _spec(stored: TensorStorageMetadata) -> Spec:
    """The dtype and shape of a tensor, whose chunks have as many dimensions."""
    dtype, shape = stored.properties.dtype, tuple(stored.size)
    if not isinstance(dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
        raise TypeError("a tensor has no dtype, or no shape")
    if any(not len(chunk.offsets) == len(chunk.sizes) == len(shape) for chunk in stored.chunks):
        raise ValueError("a chunk has not the dimensions of its tensor")
    return Spec(dtype, shape)


class DistributedFiles:
    """The tensors of a folder; `specs` has the dtype and shape of each by its name."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            with (folder / METADATA).open("rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise TypeError("it does not describe a checkpoint")
            stored = metadata.state_dict_metadata.items()
            self._stored = {str(name): item for name, item in stored if isinstance(item, TensorStorageMetadata)}
            self.specs = {name: _spec(item) for name, item in self._stored.items()}
            self._files = {str(info.relative_path) for info in (metadata.storage_data or {}).values()}
        except OSError as error:
            raise CheckpointError(f"{folder / METADATA}: cannot be read: {error.strerror or error}") from None
        except Exception as error:  # any bytes can be in a file, and fail in any way
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise DamagedCheckpoint(f"{folder / METADATA}: is damaged ({reason}); fetch it again") from None
        self._check_files()
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def _check_files(self) -> None:
        """Raise DamagedCheckpoint unless all files are in this folder."""
        names = sorted(self._files)
        if outside := [name for name in names if Path(name).name != name or "\0" in name]:
            raise CheckpointError(f"{self.folder / METADATA}: names {outside[0]!r}, which is not a file of this folder")
        if missing := [name for name in names if not (self.folder / name).is_file()]:
            raise DamagedCheckpoint(f"{self.folder}: lacks {listed(missing)}, which {METADATA} names; fetch it again")

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A part of a tensor from `start` on, read from the chunks that overlap it."""
        part = torch.empty(shape, dtype=self.specs[name].dtype)
        items, found = [], 0
        for number, chunk in enumerate(self._stored[name].chunks):
            first = [max(a, b) for a, b in zip(start, chunk.offsets, strict=True)]
            ends = ((a + n, b + m) for a, n, b, m in zip(start, shape, chunk.offsets, chunk.sizes, strict=True))
            sizes = [min(end) - begin for begin, end in zip(first, ends, strict=True)]
            if any(size <= 0 for size in sizes):
                continue
            index = MetadataIndex(name, chunk.offsets, number)
            into = torch.Size(a - b for a, b in zip(first, start, strict=True))
            of_chunk = torch.Size(a - b for a, b in zip(first, chunk.offsets, strict=True))
            items.append(ReadItem(LoadItemType.TENSOR, index, into, index, of_chunk, torch.Size(sizes)))
            found += prod(sizes)
        if found != part.numel():
            raise DamagedCheckpoint(f"{self.folder}: has {found:,} of the {part.numel():,} values of a part of {name}")
        try:
            self._reader.read_data(LoadPlan(items), _Into(part)).wait()
        except Exception as error:
            raise DamagedCheckpoint(
                f"{self.folder}: {name} cannot be read ({type(error).__name__}: {str(error)[:200]}); fetch it again"
            ) from None
        return part


class _Into(DefaultLoadPlanner):
    """Where torch's reader puts what it reads: all items are of one tensor."""

    def __init__(self, part: Tensor):
        super().__init__()
        self._part = part

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory of an item."""
        part = self._part
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The tensor is the memory of `resolve_tensor` itself."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor `name` of the shape `full`, from `start` on; `read` returns it."""

    name: str
    full: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def write_chunks(folder: Path, chunks: Iterable[Chunk], empty: Iterable[str] = ()) -> None:
    """Write a folder with these chunks of tensors; one of them is in memory at a time. `empty` are the names of objects
    that are None."""
    planner = _Planner({MetadataIndex(chunk.name, torch.Size(chunk.start)): chunk for chunk in chunks}, list(empty))
    with torch_errors(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)


class _Planner(DefaultSavePlanner):
    """A plan for torch's writer, which asks for one chunk after the other."""

    def __init__(self, chunks: Mapping[MetadataIndex, Chunk], empty: Sequence[str]):
        super().__init__(flatten_state_dict=False)
        self._chunks, self._empty = chunks, empty

    def create_local_plan(self) -> SavePlan:
        """All chunks and objects."""
        items = [
            WriteItem(
                MetadataIndex(chunk.name, torch.Size(chunk.start)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.shape)),
                    TensorProperties(chunk.dtype),
                    torch.Size(chunk.full),
                ),
            )
            for chunk in self._chunks.values()
        ]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._empty]
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of a chunk, or an object."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self._chunks[write_item.index].read()
        content = io.BytesIO()
        torch.save([None], content)  # a list of the objects of a name
        return content
