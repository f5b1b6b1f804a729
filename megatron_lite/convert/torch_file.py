"""torch's .pt files without trust and without their size in memory, read and written tensor by tensor.

A file is a zip archive without compression, whose `data.pkl` describes the tensors and whose `data/0`, `data/1` ... are
their numbers; before torch 1.6 it was pickles followed by the numbers. Either way a tensor is a run of bytes at a known
place, and is read when it is asked for. For writing, torch lays out a file without the numbers, which then go to their
places. Source: torch/serialization.py; https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.tensor_file import explained, sync_folder
from megatron_lite.convert.safe_pickle import Storage, StoredTensor, Unpickler
from megatron_lite.errors import CheckpointError, DamagedCheckpoint

CHUNK_BYTES = 8 << 20  # read or written at a time
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


class TorchFile:
    """What torch.save wrote: `content` is what was saved, with a `StoredTensor` for each tensor."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self.content, self._starts = _read_content(file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # bytes that anyone may have made go wrong in any way
            raise DamagedCheckpoint(
                f"{path}: is damaged, or no file of torch.save ({type(error).__name__}: {error}). Get it once more "
                "from where it came from"
            ) from None

    def start_of(self, tensor: StoredTensor) -> int:
        """The byte at which its first number is."""
        return self._starts[tensor.storage.key] + tensor.offset * tensor.dtype.itemsize

    def fill(self, target: Tensor, tensor: StoredTensor) -> None:
        """Copies the tensor, in the target's number format, with a few MB of memory beside it."""
        if tensor.is_contiguous and target.is_contiguous() and target.dtype == tensor.dtype:
            self._read(target, tensor)
            return
        for first, rows in self._rows(tensor):
            target[first : first + len(rows)] = rows

    def equals(self, tensor: StoredTensor, whole: Tensor) -> bool:
        """It has these numbers."""
        return all(torch.equal(whole[first : first + len(rows)], rows) for first, rows in self._rows(tensor))

    def _rows(self, tensor: StoredTensor) -> Iterator[tuple[int, Tensor]]:
        """Runs of the tensor along its first dimension, each with its place."""
        row_bytes = prod(tensor.shape[1:]) * tensor.dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes)) if tensor.is_contiguous else max(1, tensor.shape[0])
        for first in range(0, tensor.shape[0], step):
            part = tensor.narrow(0, first, min(step, tensor.shape[0] - first))
            numbers = torch.empty(part.span, dtype=part.dtype)
            self._read(numbers, part)
            yield first, numbers.as_strided(part.shape, part.stride)

    def _read(self, numbers: Tensor, tensor: StoredTensor) -> None:
        """As many numbers as there is place for, from the tensor's first on."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start_of(tensor))
                _read_exactly(file, _bytes_of(numbers))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error


def _read_content(file: IO[bytes]) -> tuple[Any, dict[str, int]]:
    """What was saved, and the byte at which each storage starts."""
    is_zip = file.read(4) == b"PK\x03\x04"
    file.seek(0)
    content, starts = _read_zip(file) if is_zip else _read_legacy(file)
    return content, starts


def _read_zip(file: IO[bytes]) -> tuple[Any, dict[str, int]]:
    entries = {entry.filename: entry for entry in zipfile.ZipFile(file).infolist()}
    root = next(name for name in entries if name.endswith("/data.pkl")).removesuffix("data.pkl")

    def locate(name: str, size: int) -> int:
        entry = entries[root + name]
        file.seek(entry.header_offset)
        header = struct.unpack("<4s22xHH", file.read(30))
        start = entry.header_offset + 30 + header[1] + header[2]
        if header[0] != b"PK\x03\x04" or entry.compress_type != zipfile.ZIP_STORED or entry.file_size < size:
            raise ValueError(f"record {name} is not {size:,} plain bytes")
        if start + size > os.fstat(file.fileno()).st_size:
            raise ValueError(f"record {name} reaches past the end of the file")
        return start

    def read(name: str) -> bytes:
        size = entries[root + name].file_size
        file.seek(locate(name, size))
        return file.read(size)

    if root + "byteorder" in entries and read("byteorder") != b"little":
        raise ValueError("its numbers are big-endian")
    unpickler = Unpickler(BytesIO(read("data.pkl")))
    content = unpickler.load()
    return content, {key: locate(f"data/{key}", _size(storage)) for key, storage in unpickler.storages.items()}


def _read_legacy(file: IO[bytes]) -> tuple[Any, dict[str, int]]:
    """Pickles of a magic number, a version, facts about the machine, the content and the storages' keys; then for each
    storage its count of numbers and the numbers."""
    if (magic := Unpickler(file).load()) != LEGACY_MAGIC or Unpickler(file).load() != LEGACY_PROTOCOL:
        raise ValueError(f"it starts with {str(magic)[:20]}")
    if not Unpickler(file).load()["little_endian"]:
        raise ValueError("its numbers are big-endian")
    unpickler = Unpickler(file)
    content = unpickler.load()
    starts = {}
    for key in Unpickler(file).load():
        if type(key) is not str:
            raise ValueError("the key of a storage is not a string")
        size = _size(unpickler.storages[key])
        starts[key] = file.seek(8, os.SEEK_CUR)
        if file.seek(size, os.SEEK_CUR) > os.fstat(file.fileno()).st_size:
            raise ValueError(f"storage {key} reaches past the end of the file")
    if missing := unpickler.storages.keys() - starts:
        raise ValueError(f"storages {sorted(missing)} are not there")
    return content, starts


def _size(storage: Storage) -> int:
    return storage.numel * storage.dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _read_exactly(file: Any, data: memoryview) -> None:
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            raise OSError(0, f"it ends {len(data) - done:,} bytes early; it changed while it was read")
        done += count


def flatten(content: Any, where: Path) -> dict[str, StoredTensor]:
    """Tensors of nested dicts by their dotted names, in order; all else is left out."""
    found: dict[str, StoredTensor] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            if id(value) in seen:  # as in a file that is made to be endless
                raise DamagedCheckpoint(f"{where}: {name} is a dict that is elsewhere in it too")
            seen.add(id(value))
            waiting += [(f"{name}.{key}" if name else str(key), value[key]) for key in reversed(value)]
        elif isinstance(value, StoredTensor):
            if name in found:
                raise DamagedCheckpoint(f"{where}: has two tensors {name}")
            found[name] = value
    return found


class TorchWriter:
    """A file that torch.load reads, whose tensors come one at a time and in any order."""

    def __init__(self, path: Path, content: Mapping[str, Any]):
        """`content` is what is saved; of its tensors, made by torch.empty and not touched, only the shapes are used."""
        self.path = path
        with explained("writing", path):
            path.open("xb").close()
            try:
                with torch.serialization.skip_data():
                    torch.save(content, path)
                self._layout = TorchFile(path)
            except (RuntimeError, DamagedCheckpoint) as error:  # torch's code tells an error of the system so, or not
                raise CheckpointError(
                    f"{path}: writing failed: torch cannot lay out a file of this size ({str(error).splitlines()[0]}). "
                    "Check the disk, and run again"
                ) from error
            self._file = path.open("r+b", buffering=0)
        self._tensors = flatten(self._layout.content, path)

    def write(self, name: str, tensor: Tensor) -> None:
        """The tensor of this dotted name."""
        place = self._tensors.pop(name)
        assert (place.dtype, place.shape) == (tensor.dtype, tuple(tensor.shape)), (name, tensor.shape, place)
        data = _bytes_of(tensor)
        with explained("writing", self.path):
            self._file.seek(self._layout.start_of(place))
            done = 0
            while done < len(data):
                done += self._file.write(data[done : done + CHUNK_BYTES])

    def close(self) -> None:
        """Returns when the disk has every byte."""
        assert not self._tensors, f"{self.path}: {len(self._tensors)} tensors did not come"
        with explained("writing", self.path), self._file:
            os.fsync(self._file.fileno())
            sync_folder(self.path.parent)

    def __enter__(self) -> "TorchWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()
