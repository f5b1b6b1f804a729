"""Files of torch.save, read without trust and without their size in memory, and written tensor by tensor.

Since torch 1.6 a file is a zip archive without compression: `data.pkl` describes the tensors, and `data/0`, `data/1`
... are their values, which torch maps into memory. Older files are pickles and then the values, and are read in full.
For writing, torch lays out a file without the values, which are then written in place.
Source: torch/serialization.py; https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

import io
import mmap
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.convert.safe_pickle import ALLOWED, SafePickle, StoredTensor
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.files import open_file, sync_folder

CHUNK_BYTES = 8 << 20  # written at a time


class Record(NamedTuple):
    """A record of a zip archive: the position of its first byte in the file, and its size in bytes."""

    start: int
    size: int


class TorchFile:
    """A file of torch.save; `content` is the saved object, with a `StoredTensor` for each tensor."""

    def __init__(self, path: Path):
        self.path = path
        self.records: Mapping[str, Record] = {}
        try:
            with open_file(path) as file:
                self._size = os.fstat(file.fileno()).st_size
                is_zip = file.read(4) == b"PK\x03\x04"
                if is_zip:
                    self.records = _records(file)
                self.content = self._load_zip() if is_zip else self._load_legacy(file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # any bytes can be in a file, and fail in any way
            reason = (str(error).splitlines() or [""])[0][:200]
            raise DamagedCheckpoint(
                f"{path}: is damaged, or not a file of torch.save ({type(error).__name__}: {reason}); fetch it again"
            ) from None

    def _load_zip(self) -> Any:
        safe = SafePickle(self._size, {name: record.size for name, record in self.records.items()})
        return torch.load(self.path, _keep, cast(Any, safe), mmap=True, weights_only=False)

    def _load_legacy(self, file: IO[bytes]) -> Any:
        # torch.load would extract a file that is a tar archive too. A map has no fileno, which it needs for that.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            safe = SafePickle(self._size, None)
            return torch.load(cast(Any, content), _keep, cast(Any, safe), mmap=False, weights_only=False)

    def check_size(self) -> None:
        """Raise CheckpointError if the file has changed its size: reading a map past the end kills the process."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        if size != self._size:
            raise CheckpointError(
                f"{self.path}: had {self._size:,} bytes and has {size:,} now; convert again when it no longer changes"
            )


class _Part(io.RawIOBase):
    """Some bytes of a mapped file, as a file."""

    def __init__(self, content: memoryview):
        super().__init__()
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        found = bytes(self._content[self._at : None if size < 0 else self._at + size])
        self._at += len(found)
        return found


# What torch.load has for the types of storages.
_STORAGES = {
    ("torch", f"{name}Storage"): torch.serialization.StorageType(f"{name}Storage")
    for name in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
}


def load_tensor(content: memoryview) -> Any:
    """The object that torch.save wrote into these bytes of a mapped file; its tensors are views of them.

    torch.load would copy all of them, where a reader needs a part.
    """
    records = _records(cast(Any, _Part(content)))
    values = {name: content[record.start : record.start + record.size] for name, record in records.items()}
    if bytes(values.get("byteorder", b"little")) != b"little":
        raise ValueError("it is of a computer with another order of bytes")

    def storage(pid: tuple) -> Any:
        _, kind, key, _, numel = pid[:5]
        size = numel * kind.dtype.itemsize
        found = torch.frombuffer(values[f"data/{key}"][:size] if size else bytearray(1), dtype=torch.uint8)
        return torch.storage.TypedStorage(wrap_storage=found.untyped_storage(), dtype=kind.dtype, _internal=True)

    sizes = {name: record.size for name, record in records.items()}
    unpickler = SafePickle(len(content), sizes, {**ALLOWED, **_STORAGES}).Unpickler(io.BytesIO(values["data.pkl"]))
    unpickler.persistent_load = storage
    return unpickler.load()


def _keep(storage: Any, location: str) -> Any:
    """Leave each storage on the CPU. torch.jit.load, to which torch.load passes programs, rejects functions."""
    return storage


def _records(file: IO[bytes]) -> dict[str, Record]:
    """The records of an archive by name; raises ValueError unless all are uncompressed bytes of the file."""
    records = {}
    archive = zipfile.ZipFile(file)
    _check_directory(file, archive.start_dir)
    names = [name.lower().partition("/") for name in archive.namelist()]  # torch.load ignores the case
    if len({folder for folder, *_ in names}) != 1 or len({name for *_, name in names}) != len(names):
        raise ValueError("it has a record twice, or outside of its folder")
    for entry in archive.infolist():
        archive.open(entry).close()  # compares the record's header with the directory
        file.seek(entry.header_offset + 26)
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        if entry.compress_type != zipfile.ZIP_STORED or start + entry.file_size > archive.start_dir:
            raise ValueError(f"record {entry.filename} is not {entry.file_size:,} uncompressed bytes of the file")
        records[entry.filename.partition("/")[2]] = Record(start, entry.file_size)
    if "constants.pkl" in records:
        raise ValueError("it is an archive of TorchScript")
    return records


def _check_directory(file: IO[bytes], start: int) -> None:
    """Raise ValueError unless every reader finds the directory of an archive at `start`.

    zipfile and torch search for it in different ways, and a crafted file could show each of them another one.
    """
    end = file.seek(-98, os.SEEK_END)
    # The zip64 end record of 56 bytes, its locator of 20 bytes and the end record of 22 bytes.
    start64, locator, end64, end_record, start32 = struct.unpack("<48xQ 4s4xQ4x 4s12xI2x", file.read(98))
    is_zip64 = locator == b"PK\x06\x07"
    if end_record != b"PK\x05\x06" or start != (start64 if is_zip64 else start32) or (is_zip64 and end64 != end):
        raise ValueError("its directory is not at the end")


def flatten(content: Any, where: Path) -> dict[str, StoredTensor]:
    """The tensors of nested dicts by their dotted names, in order; all else is left out."""
    found: dict[str, StoredTensor] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            if id(value) in seen:
                raise DamagedCheckpoint(f"{where}: the dict {name} is in the file more than once; fetch it again")
            seen.add(id(value))
            waiting += [(f"{name}.{key}" if name else str(key), value[key]) for key in reversed(value)]
        elif isinstance(value, StoredTensor):
            if name in found:
                raise DamagedCheckpoint(f"{where}: has two tensors {name}; fetch it again")
            found[name] = value
    return found


class TorchWriter:
    """A file that torch.load reads, whose tensors are written one at a time and in any order."""

    def __init__(self, path: Path, content: Mapping[str, Any]):
        """`content` is saved; of its tensors, made by torch.empty and not touched, only shapes and dtypes are used."""
        self.path = path
        with save_errors("writing", path):
            path.open("xb").close()
            try:
                with torch.serialization.skip_data():
                    torch.save(content, path)
                layout = TorchFile(path)
            except (RuntimeError, DamagedCheckpoint) as error:  # torch reports a full disk so, or not at all
                raise CheckpointError(
                    f"{path}: writing failed: torch cannot lay out a file of this size ({str(error).splitlines()[0]}). "
                    "Check the disk, and run again"
                ) from error
            self._file = path.open("r+b", buffering=0)
        self._records = layout.records
        self._tensors = flatten(layout.content, path)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the values of the tensor with this dotted name."""
        place = self._tensors.pop(name)
        assert (place.tensor.dtype, place.tensor.shape) == (tensor.dtype, tensor.shape), (name, tensor.shape)
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        with save_errors("writing", self.path):
            self._file.seek(self._records[f"data/{place.key}"].start)
            done = 0
            while done < len(data):
                done += self._file.write(data[done : done + CHUNK_BYTES])

    def close(self) -> None:
        """Return when the disk has every byte."""
        assert not self._tensors, f"{self.path}: {len(self._tensors)} tensors did not come"
        with save_errors("writing", self.path), self._file:
            os.fsync(self._file.fileno())
            sync_folder(self.path.parent)

    def __enter__(self) -> "TorchWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()
