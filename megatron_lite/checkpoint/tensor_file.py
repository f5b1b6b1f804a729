"""safetensors files: written at the speed of the disk with checksums, and read in slices that are checked.

The format is a length, a JSON header and the bytes. The writer keeps one tensor at a time in host memory and the disk
busy; the reader checks only the bytes that it reads. The header's `__metadata__` has the checksums of every tensor:
under "crc32.{key}" eight digits for each `CHUNK_BYTES`. They are written last, in the place that the header has for
them.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import errno
import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint.layout import CHUNK_BYTES, USE_ANOTHER, FileInfo, checksum
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.files import disk_errors, is_inside, open_file
from megatron_lite.parallel.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from megatron_lite.parallel.waiting import note_progress

# The disk starts on this many bytes while the page cache receives the next ones.
FLUSH_BYTES = 32 << 20
METADATA, CRC = "__metadata__", "crc32."  # of a header; prefix of a key's checksums in it


class Spec(NamedTuple):
    """The dtype and shape of a tensor to be written."""

    dtype: torch.dtype
    shape: Sequence[int]


def save_errors(action: str, path: Path) -> AbstractContextManager[None]:
    """`files.disk_errors` as CheckpointError, for saves."""
    return disk_errors(action, path, CheckpointError, "; checkpoints saved before are untouched")


def regular_file(folder: Path, name: str) -> Path:
    """The path of a file with tensors in a folder. CheckpointError unless it is a regular file that lies in it."""
    path = folder / name
    try:
        found = path.resolve()
        if not is_inside(path, folder):
            raise CheckpointError(f"{path}: is a link to a file outside of {folder}; copy the file itself")
        if found.exists() and not (found.is_file() or found.is_dir()):  # a pipe would be waited for
            raise CheckpointError(f"{path}: is neither a file nor a folder")
    except (ValueError, RuntimeError, OSError) as error:  # a null byte, a circle of links
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    return path


class TensorWriter:
    """A writer of one safetensors file, tensor by tensor. A context manager.

    `specs` describe all tensors, key -> dtype and shape. They are added in the order of `keys`, from any device; one at
    a time is in host memory, and the disk writes while the next one is copied. The header has checksums, unless
    `metadata` is given: that of a file for other programs.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None):
        self.path = path
        # Larger elements first keep every tensor aligned to its element size.
        self._specs = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
        self.keys = list(self._specs)
        self._metadata = metadata
        self._checksums: dict[str, str] = {}
        self._flushed: Future[None] = Future()
        self._flushed.set_result(None)
        self._unflushed_bytes = 0
        self._open = ExitStack()
        with self._open as stack:
            stack.enter_context(save_errors("writing", path))
            self._file = stack.enter_context(path.open("wb", buffering=1 << 20))
            self._flusher = stack.enter_context(ThreadPoolExecutor(1))
            self._file.write(self._header())
            self._open = stack.pop_all()

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)

    def add(self, tensor: Tensor) -> None:
        """Append the tensor of the next key."""
        key = self.keys[len(self._checksums)]
        spec = self._specs[key]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, tuple(spec.shape)), (key, tensor.shape, spec)
        data, checksums = _bytes_of(tensor), ""
        with save_errors("writing", self.path):
            for start in range(0, len(data), CHUNK_BYTES):
                note_progress()
                chunk = data[start : start + CHUNK_BYTES]
                checksums += checksum(chunk)
                self._file.write(chunk)
                self._unflushed_bytes += len(chunk)
                if self._unflushed_bytes >= FLUSH_BYTES and self._flushed.done():
                    self._flushed.result()
                    self._flushed, self._unflushed_bytes = self._flusher.submit(os.fsync, self._file.fileno()), 0
        self._checksums[key] = checksums

    def close(self) -> FileInfo:
        """Finish the file, and return when the disk has every byte."""
        assert len(self._checksums) == len(self.keys), f"{self.path}: {len(self._checksums)} of {len(self.keys)} added"
        with self._open, save_errors("writing", self.path):
            self._flushed.result()
            size, header = self._file.tell(), self._header()
            self._file.seek(0)
            self._file.write(header)
            self._file.flush()
            os.fsync(self._file.fileno())
        return FileInfo(bytes=size, header_crc32=checksum(header))

    def _header(self) -> bytes:
        """The file's start. Its length does not depend on the checksums, which are zeros until a tensor is added."""
        entries, offset = {}, 0
        metadata = {} if self._metadata is None else dict(self._metadata)
        for key, spec in self._specs.items():
            end = offset + prod(spec.shape) * spec.dtype.itemsize
            place = {"dtype": SAFETENSORS_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
            if self._metadata is None:
                metadata[CRC + key] = self._checksums.get(key, "0" * 8 * -(-(end - offset) // CHUNK_BYTES))
            entries[key], offset = place, end
        text = json.dumps(({METADATA: metadata} if metadata else {}) | entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 64)  # data starts at a cache line
        return struct.pack("<Q", len(text)) + text


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileInfo:
    """Write a safetensors file, and return when the disk has it. Tensors on a GPU are copied one at a time."""
    with TensorWriter(path, {key: Spec(tensor.dtype, tensor.shape) for key, tensor in tensors.items()}) as writer:
        for key in writer.keys:
            writer.add(tensors[key])
        return writer.close()


class Memory(threading.local):
    """Each thread's host memory for reads. It is used again, because new pages cost more than copying."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        """`size` bytes with undefined values."""
        if self._bytes.numel() < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size]


class TensorFile:
    """A safetensors file that layout.json describes. Every read is checked.

    A memory map would be shorter, but a disk error would then kill the process without a message.
    """

    def __init__(self, path: Path, info: FileInfo):
        self.path = path
        regular_file(path.parents[1], f"{path.parent.name}/{path.name}")
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            length = file.read(8)
            header = length + file.read(min(struct.unpack("<Q", length)[0], size)) if len(length) == 8 else b""
        if size != info.bytes:
            raise DamagedCheckpoint(f"{path}: has {size:,} bytes, layout.json lists {info.bytes:,}. {USE_ANOTHER}")
        if checksum(header) != info.header_crc32:
            raise DamagedCheckpoint(f"{path}: its header does not have the checksum in layout.json. {USE_ANOTHER}")
        try:
            self._entries = dict(_entries(header, info))
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError) as error:
            problem = f"header and layout.json differ ({type(error).__name__}: {error})"
            raise DamagedCheckpoint(f"{path}: {problem}. {USE_ANOTHER}") from None

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The opened file. A missing file or a bad block is damage; other errors of the system are not."""
        try:
            with open_file(self.path, buffering=0) as file:
                yield file
        except FileNotFoundError:
            folder = self.path.parents[1]
            if not folder.exists():
                raise CheckpointError(f"{folder}: deleted while it was read (checkpoint.keep); restart") from None
            raise DamagedCheckpoint(f"{self.path}: is listed in layout.json but missing. {USE_ANOTHER}") from None
        except OSError as error:
            kind = DamagedCheckpoint if error.errno == errno.EIO else CheckpointError
            raise kind(f"{self.path}: cannot be read: {error.strerror or error}. {USE_ANOTHER}") from error

    def entry(self, key: str, numel: int) -> "_Entry":
        """The place of a tensor. DamagedCheckpoint: it is missing, or has another number of elements."""
        found, where = self._entries.get(key), f"{self.path}: tensor {key}"
        if found is None:
            raise DamagedCheckpoint(f"{where} is in layout.json but missing. {USE_ANOTHER}")
        if found.numel != numel:
            raise DamagedCheckpoint(f"{where} has {found.numel:,} elements, layout.json lists {numel:,}. {USE_ANOTHER}")
        return found

    def checksums(self, key: str) -> tuple[str, ...]:
        """The checksums of a tensor's chunks; none of one that is missing."""
        return self._entries[key].checksums if key in self._entries else ()

    def read(self, key: str, numel: int, start: int, end: int, memory: Memory | None = None) -> Tensor:
        """Elements `start` to `end` of a flattened tensor of `numel` elements, in new memory or in `memory`."""
        entry = self.entry(key, numel)
        size = entry.dtype.itemsize
        first_chunk = start * size // CHUNK_BYTES
        offset = first_chunk * CHUNK_BYTES
        stop = min(-(-end * size // CHUNK_BYTES) * CHUNK_BYTES, entry.numel * size)
        num_bytes = max(0, stop - offset)
        buffer = memory.of(num_bytes) if memory else torch.empty(num_bytes, dtype=torch.uint8)
        data = buffer.numpy().data
        with self._open() as file:
            file.seek(entry.start + offset)
            done = 0
            while done < len(data) and (count := file.readinto(data[done:])):
                done += count
        for number, place in enumerate(range(0, len(data), CHUNK_BYTES), first_chunk):
            if (found := checksum(data[place : min(place + CHUNK_BYTES, done)])) != entry.checksums[number]:
                problem = f"has checksum {found} from byte {number * CHUNK_BYTES:,}, not {entry.checksums[number]}"
                raise DamagedCheckpoint(f"{self.path}: tensor {key} {problem}. {USE_ANOTHER}")
        return buffer[start * size - offset : end * size - offset].view(entry.dtype)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor, by key."""
        return {key: entry.dtype for key, entry in self._entries.items()}

    def get(self, key: str) -> Tensor:
        """The full tensor."""
        entry = self._entries[key]
        return self.read(key, entry.numel, 0, entry.numel).view(entry.shape)

    def get_all(self) -> dict[str, Tensor]:
        """Every tensor of the file."""
        return {key: self.get(key) for key in self._entries}

    def check(self) -> None:
        """Read and check the full file in small steps."""
        for key, entry in self._entries.items():
            for start in range(0, entry.numel, CHUNK_BYTES):
                self.read(key, entry.numel, start, min(start + CHUNK_BYTES, entry.numel))


class _Entry(NamedTuple):
    """The place of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file
    checksums: tuple[str, ...]  # of each chunk

    @property
    def numel(self) -> int:
        return prod(self.shape)


def _entries(header: bytes, info: FileInfo) -> Iterator[tuple[str, _Entry]]:
    """The header's entries, each inside of the file and with a checksum per chunk; those of version 2 are in `info`."""
    described, end = json.loads(header[8:]), 0
    metadata = described.get(METADATA, {})
    keys = [key for key in (described if info.crc32 is None else info.crc32) if key != METADATA]
    for first, last in sorted(described[key]["data_offsets"] for key in keys):
        assert first == end <= last, "tensors overlap, or leave a gap"
        end = last
    assert len(header) + end == info.bytes, "tensors do not fill the file"
    for key in keys:
        start, end = (len(header) + offset for offset in described[key]["data_offsets"])
        digits = metadata[CRC + key] if info.crc32 is None else "".join(info.crc32[key])
        assert len(digits) == 8 * -(-(end - start) // CHUNK_BYTES), "number of checksums"
        checksums = tuple(digits[at : at + 8] for at in range(0, len(digits), 8))
        entry = _Entry(SAFETENSORS_DTYPES[described[key]["dtype"]], tuple(described[key]["shape"]), start, checksums)
        assert all(type(n) is int and n >= 0 for n in (start, *entry.shape)), "not a size"
        assert entry.numel * entry.dtype.itemsize == end - start, "size and shape differ"
        yield key, entry


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes; no copy when it is contiguous and in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
