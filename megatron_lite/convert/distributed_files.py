"""Folders of torch.distributed.checkpoint: parts of tensors read one at a time, and written tensor by tensor.

`.metadata` is a pickle with the shape of each tensor and the place of each of its chunks in the files `__*.distcp`. A
chunk is what torch.save writes. The pickle is not trusted: it is decoded as plain data, chunks must have each element
once, and each chunk has its own bytes in a file of the folder. torch's own writer writes.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

import io
import mmap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_lite.checkpoint.reshard import tile
from megatron_lite.checkpoint.tensor_file import Spec, regular_file
from megatron_lite.convert.safe_pickle import Dict, Record, StoredTensor, decode
from megatron_lite.convert.torch_errors import torch_errors
from megatron_lite.convert.torch_file import load_tensor
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.files import open_file, read_file
from megatron_lite.text import listed

METADATA = ".metadata"
MAX_DIMS = 8  # the check of chunks visits 2 ** dims corners of each
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Metadata(Record):
    """The description of a checkpoint."""


class _Tensor(Record):
    """The description of a tensor."""


class _Properties(Record):
    """The properties of a tensor; its state is a tuple that begins with the dtype."""


class _Chunk(Record):
    """The description of a chunk of a tensor."""


class _Index(Record):
    """The name of a tensor and the first element of a chunk."""


class _Storage(Record):
    """The place of a chunk."""


_RECORDS: dict[tuple[str, str], Any] = {
    **_DTYPES,
    **{
        ("torch.distributed.checkpoint.metadata", name): record
        for name, record in (
            ("Metadata", _Metadata),
            ("TensorStorageMetadata", _Tensor),
            ("TensorProperties", _Properties),
            ("ChunkStorageMetadata", _Chunk),
            ("MetadataIndex", _Index),
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Storage,
}


_Key = tuple[str, tuple[int, ...] | None]
"""The name of a tensor and the first element of a chunk of it, or the name of an object."""


class _Place(NamedTuple):
    """The bytes of a chunk."""

    file: str
    start: int
    size: int


class _StoredChunk(NamedTuple):
    """A part of a tensor, and its place."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: _Place


def _record(value: Any, kind: type[Record]) -> Record:
    if type(value) is not kind:
        raise TypeError(
            "it does not describe a checkpoint" if kind is _Metadata else f"a value is not a {kind.__name__[1:]}"
        )
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    natural = type(value) is tuple and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    if not natural or len(value) > MAX_DIMS:
        raise TypeError(f"a tensor or a chunk has no shape of at most {MAX_DIMS} natural numbers")
    return value


def _spec(stored: Record) -> Spec:
    """The dtype and shape of a tensor."""
    state, shape = (
        _record(stored.field("properties", _Properties), _Properties).state,
        _sizes(stored.field("size", tuple)),
    )
    if type(state) is not tuple or not state or not isinstance(state[0], torch.dtype):
        raise TypeError("a tensor has no dtype")
    return Spec(state[0], shape)


def _places(metadata: Record) -> dict[_Key, _Place]:
    """The place of each chunk and of each object."""
    found: dict[_Key, _Place] = {}
    for index, info in metadata.field("storage_data", Dict).items():
        offset = _record(index, _Index).field("offset", tuple, type(None))
        name = index.field("fqn", str)
        path, start, size = (
            _record(info, _Storage).field(field, kind)
            for field, kind in (("relative_path", str), ("offset", int), ("length", int))
        )
        if info.state.get("transform_descriptors"):
            raise TypeError(f"{name} is compressed; save it without extensions")
        if start < 0 or size < 0:
            raise TypeError(f"{name} has a negative place")
        key = name, None if offset is None else _sizes(offset)
        if key in found:
            raise TypeError(f"{name} has two places for one chunk")
        found[key] = _Place(path, start, size)
    return found


class DistributedFiles:
    """The tensors of a folder; `specs` has the dtype and shape of each by its name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.specs: dict[str, Spec] = {}
        self._chunks: dict[str, list[_StoredChunk]] = {}
        self._seen: set[int] = set()  # lists of chunks
        self._maps: dict[str, mmap.mmap] = {}
        try:
            metadata = _record(decode(read_file(regular_file(folder, METADATA)), _RECORDS), _Metadata)
            places = _places(metadata)
            self._check_files(sorted({place.file for place in places.values()}))
            for name, stored in metadata.field("state_dict_metadata", Dict).items():
                if type(stored) is _Tensor:
                    self._add(name, stored, places)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{folder / METADATA}: cannot be read: {error.strerror or error}") from None
        except Exception as error:  # any bytes can be in a file, and fail in any way
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise DamagedCheckpoint(f"{folder / METADATA}: is damaged ({reason}); fetch it again") from None
        self._check_places([chunk.place for chunks in self._chunks.values() for chunk in chunks])

    def _check_files(self, names: Sequence[str]) -> None:
        """Raise an error unless all files are in this folder."""
        if outside := [name for name in names if Path(name).name != name or "\0" in name]:
            raise CheckpointError(f"{self.folder / METADATA}: names {outside[0]!r}, which is not a file of this folder")
        if missing := [name for name in names if not regular_file(self.folder, name).is_file()]:
            raise DamagedCheckpoint(f"{self.folder}: lacks {listed(missing)}, which {METADATA} names; fetch it again")

    def _check_places(self, places: list[_Place]) -> None:
        """Raise DamagedCheckpoint unless each chunk has bytes of its own, so that tensors are not larger than files."""
        sizes = {file: (self.folder / file).stat().st_size for file in {place.file for place in places}}
        last = _Place("", 0, 0)
        for place in sorted(places):
            if place.start + place.size > sizes[place.file]:
                raise DamagedCheckpoint(f"{self.folder / place.file}: ends before a chunk that {METADATA} places in it")
            if place.file == last.file and place.start < last.start + last.size:
                raise DamagedCheckpoint(f"{self.folder / METADATA}: has two chunks in the same bytes; fetch it again")
            last = place

    def _add(self, name: Any, stored: Record, places: Mapping[_Key, _Place]) -> None:
        if type(name) is not str:
            raise TypeError("a tensor has no name")
        spec, chunks, listed_chunks = _spec(stored), [], stored.field("chunks", list)
        if id(listed_chunks) in self._seen:  # a short pickle can give one list to many tensors
            raise TypeError(f"{name} shares its list of chunks")
        self._seen.add(id(listed_chunks))
        for chunk in listed_chunks:
            start, shape = (_sizes(_record(chunk, _Chunk).field(field, tuple)) for field in ("offsets", "sizes"))
            if not len(start) == len(shape) == len(spec.shape):
                raise TypeError("a chunk has not the dimensions of its tensor")
            if prod(shape) * spec.dtype.itemsize > places[name, start].size:
                raise TypeError(f"a chunk of {name} is larger than its bytes")
            if prod(shape):
                chunks.append(_StoredChunk(start, shape, places[name, start]))
        boxes = ([(a, a + n) for a, n in zip(chunk.start, chunk.shape, strict=True)] for chunk in chunks)
        if not tile(boxes, [[(0, n) for n in spec.shape]] if prod(spec.shape) else []):
            has = f"{sum(prod(chunk.shape) for chunk in chunks):,} values in chunks for {prod(spec.shape):,}"
            raise DamagedCheckpoint(f"{self.folder}: {name} has {has}, which overlap or leave a gap; fetch it again")
        self.specs[name], self._chunks[name] = spec, chunks

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A part of a tensor from `start` on, read from the chunks that overlap it."""
        wanted = [(a, a + n) for a, n in zip(start, shape, strict=True)]
        shared = []
        for chunk in self._chunks[name]:
            ends = zip(wanted, chunk.start, chunk.shape, strict=True)
            box = [(max(a, at), min(b, at + n)) for (a, b), at, n in ends]
            if all(a < b for a, b in box):
                shared.append((chunk, box))
        if not tile((box for _, box in shared), [wanted] if prod(shape) else []):
            found = sum(prod(b - a for a, b in box) for _, box in shared)
            raise DamagedCheckpoint(f"{self.folder}: has {found:,} of the {prod(shape):,} values of a part of {name}")
        part = torch.empty(shape, dtype=self.specs[name].dtype)
        for chunk, box in shared:
            source, target = self._load(name, chunk), part
            for dim, (a, b) in enumerate(box):
                source = source.narrow(dim, a - chunk.start[dim], b - a)
                target = target.narrow(dim, a - start[dim], b - a)
            target.copy_(source)
        return part

    def _load(self, name: str, chunk: _StoredChunk) -> Tensor:
        """The values of a chunk."""
        file, start, size = chunk.place
        path, dtype = self.folder / file, self.specs[name].dtype
        try:
            if file not in self._maps:
                with open_file(regular_file(self.folder, file)) as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            if path.stat().st_size != len(self._maps[file]):  # reading a map past the end kills the process
                raise ValueError(f"{path.name} has changed its size")
            content = load_tensor(memoryview(self._maps[file])[start : start + size])
            tensor = content.tensor if isinstance(content, StoredTensor) else torch.empty(0)
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, chunk.shape):
                raise TypeError(f"it is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(chunk.shape)}")
        except Exception as error:
            raise DamagedCheckpoint(
                f"{self.folder}: {name} cannot be read ({type(error).__name__}: {str(error)[:200]}); fetch it again"
            ) from None
        return tensor


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
