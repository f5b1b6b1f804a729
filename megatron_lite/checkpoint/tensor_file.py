"""safetensors files: written at the speed of the disk with checksums, and read in slices that are checked.

The format is a length, a JSON header and the bytes. The writer keeps one tensor at a time in host memory and the disk
busy; the reader checks only the bytes that it reads.
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
    a time is in host memory, and the disk writes while the next one is copied.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None):
        self.path = path
        # Larger elements first keep every tensor aligned to its element size.
        ordered = sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize)
        self.keys = [key for key, _ in ordered]
        self._specs = specs
        self._header = _header(ordered, metadata or {})
        self._checksums: dict[str, tuple[str, ...]] = {}
        self._flushed: Future[None] = Future()
        self._flushed.set_result(None)
        self._unflushed_bytes = 0
        self._open = ExitStack()
        with self._open as stack:
            stack.enter_context(save_errors("writing", path))
            self._file = stack.enter_context(path.open("wb", buffering=1 << 20))
            self._flusher = stack.enter_context(ThreadPoolExecutor(1))
            self._file.write(self._header)
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
        data, checksums = _bytes_of(tensor), []
        with save_errors("writing", self.path):
            for start in range(0, len(data), CHUNK_BYTES):
                note_progress()
                chunk = data[start : start + CHUNK_BYTES]
                checksums.append(checksum(chunk))
                self._file.write(chunk)
                self._unflushed_bytes += len(chunk)
                if self._unflushed_bytes >= FLUSH_BYTES and self._flushed.done():
                    self._flushed.result()
                    self._flushed, self._unflushed_bytes = self._flusher.submit(os.fsync, self._file.fileno()), 0
        self._checksums[key] = tuple(checksums)

    def close(self) -> FileInfo:
        """Finish the file, and return when the disk has every byte."""
        assert len(self._checksums) == len(self.keys), f"{self.path}: {len(self._checksums)} of {len(self.keys)} added"
        with self._open, save_errors("writing", self.path):
            self._flushed.result()
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
        return FileInfo(bytes=size, header_crc32=checksum(self._header), crc32=self._checksums)


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
        self.path, self._info = path, info
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
            problem = f"{type(error).__name__}: {error}"
            raise DamagedCheckpoint(f"{path}: header and layout.json differ ({problem}). {USE_ANOTHER}") from None

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

    def read(self, key: str, numel: int, start: int, end: int, memory: Memory | None = None) -> Tensor:
        """Elements `start` to `end` of a flattened tensor of `numel` elements, in new memory or in `memory`."""
        entry, expected, where = self._entries[key], self._info.crc32[key], f"{self.path}: tensor {key}"
        if entry.numel != numel:
            raise DamagedCheckpoint(f"{where} has {entry.numel:,} elements, layout.json lists {numel:,}. {USE_ANOTHER}")
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
            if (found := checksum(data[place : min(place + CHUNK_BYTES, done)])) != expected[number]:
                problem = f"checksum {found} from byte {number * CHUNK_BYTES:,}, layout.json lists {expected[number]}"
                raise DamagedCheckpoint(f"{where} has {problem}. {USE_ANOTHER}")
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
        return {key: self.get(key) for key in self._info.crc32}

    def check(self) -> None:
        """Read and check the full file in small steps."""
        for key in self._info.crc32:
            numel = self._entries[key].numel
            for start in range(0, numel, CHUNK_BYTES):
                self.read(key, numel, start, min(start + CHUNK_BYTES, numel))


class _Entry(NamedTuple):
    """The place of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file

    @property
    def numel(self) -> int:
        return prod(self.shape)


def _entries(header: bytes, info: FileInfo) -> Iterator[tuple[str, _Entry]]:
    """The header's entries of the tensors in layout.json, each inside of the file and with a checksum per chunk."""
    described, end = json.loads(header[8:]), 0
    for first, last in sorted(described[key]["data_offsets"] for key in info.crc32):
        assert first == end <= last, "tensors overlap, or leave a gap"
        end = last
    assert len(header) + end == info.bytes, "tensors do not fill the file"
    for key, expected in info.crc32.items():
        start, end = (len(header) + offset for offset in described[key]["data_offsets"])
        entry = _Entry(SAFETENSORS_DTYPES[described[key]["dtype"]], tuple(described[key]["shape"]), start)
        assert all(type(n) is int and n >= 0 for n in (start, *entry.shape)), "not a size"
        assert entry.numel * entry.dtype.itemsize == end - start, "size and shape differ"
        assert len(expected) == -(-(end - start) // CHUNK_BYTES), "number of checksums"
        yield key, entry


def _header(ordered: list[tuple[str, Spec]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, spec in ordered:
        end = offset + prod(spec.shape) * spec.dtype.itemsize
        entries[key] = {
            "dtype": SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # data starts at a cache line
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes; no copy when it is contiguous and in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
