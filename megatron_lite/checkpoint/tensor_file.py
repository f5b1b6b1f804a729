"""safetensors files, written at the speed of the disk with checksums, and read in slices that are checked.

The format is a length, a JSON header and the bytes, so both are short; and being ours, the writer keeps the disk busy
with one tensor at a time in host memory, and the reader checks just what it touches.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint.layout import CHUNK_BYTES, FileInfo, checksum, use_another
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.parallel.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from megatron_lite.parallel.waiting import note_progress

# Data is handed to the disk while later data is still being copied into the page cache, so that the two overlap.
FLUSH_BYTES = 32 << 20

ADVICE = {
    errno.ENOSPC: "Free some space, lower checkpoint.keep, or write to another disk (run.dir)",
    errno.EDQUOT: "Free some of your quota, lower checkpoint.keep, or write to another disk (run.dir)",
    errno.EACCES: "Give this user write permission there, or write elsewhere (run.dir)",
    errno.EPERM: "Give this user write permission there, or write elsewhere (run.dir)",
    errno.ENOENT: "Every rank must see the same run.dir; put it on a file system that all machines share",
    errno.EEXIST: "There is a file of that name; remove it, or write elsewhere (run.dir)",
    errno.EROFS: "The file system is read-only; write elsewhere (run.dir)",
}


class Spec(NamedTuple):
    """What a tensor will be, before it is there."""

    dtype: torch.dtype
    shape: Sequence[int]


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """An error of the operating system becomes one that says which path, why, and what to do."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "Check the disk, or write to another one (run.dir)")
        raise CheckpointError(
            f"{error.filename or path}: {what} failed: {error.strerror or error}. {advice}, and run again; "
            "checkpoints saved before are untouched"
        ) from error


def sync_folder(folder: Path) -> None:
    """Names created, renamed or removed in the folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)


class TensorWriter:
    """Writes a safetensors file tensor by tensor; `close` waits until the disk has it. A context manager.

    What will be in it is known from the start: `specs`, key -> dtype and shape. Tensors are added in the order of
    `keys`, each from whatever device, one at a time in host memory. Data goes to the disk while the next is copied.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None):
        self.path = path
        # Larger numbers first keeps every tensor aligned to its own size.
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
            stack.enter_context(explained("writing", path))
            self._file = stack.enter_context(path.open("wb", buffering=1 << 20))
            self._flusher = stack.enter_context(ThreadPoolExecutor(1))
            self._file.write(self._header)
            self._open = stack.pop_all()

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)

    def add(self, tensor: Tensor) -> None:
        """Appends the tensor of the next key."""
        key = self.keys[len(self._checksums)]
        spec = self._specs[key]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, tuple(spec.shape)), (key, tensor.shape, spec)
        data, checksums = _bytes_of(tensor), []
        with explained("writing", self.path):
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
        """Returns when the disk has every byte."""
        assert len(self._checksums) == len(self.keys), f"{self.path}: {len(self._checksums)} of {len(self.keys)} came"
        with self._open, explained("writing", self.path):
            self._flushed.result()
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
        return FileInfo(bytes=size, header_crc32=checksum(self._header), crc32=self._checksums)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileInfo:
    """Writes a safetensors file and waits until the disk has it. Tensors on a GPU are copied one at a time."""
    with TensorWriter(path, {key: Spec(tensor.dtype, tensor.shape) for key, tensor in tensors.items()}) as writer:
        for key in writer.keys:
            writer.add(tensors[key])
        return writer.close()


class Memory:
    """Bytes to read into, again and again."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        """So many bytes, with whatever is in them."""
        if self._held.numel() < size:
            self._held = torch.empty(size, dtype=torch.uint8)
        return self._held[:size]


class TensorFile:
    """A safetensors file that layout.json describes. What is read is checked.

    Not through a memory map: there a disk that cannot read a block ends the process without a word.
    """

    def __init__(self, path: Path, info: FileInfo):
        self.path, self._info = path, info
        header = self._checked_header()
        try:
            self._entries = dict(_entries(header, info))
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"{path}: its header is not one of a safetensors file with the tensors that layout.json lists "
                f"({type(error).__name__}: {error}). {use_another()}"
            ) from None

    def _checked_header(self) -> bytes:
        with self._told() as file:
            size = os.fstat(file.fileno()).st_size
            length = file.read(8)
            header = length + file.read(min(struct.unpack("<Q", length)[0], size)) if len(length) == 8 else b""
        if size != self._info.bytes:
            raise DamagedCheckpoint(
                f"{self.path}: has {size:,} bytes, layout.json says {self._info.bytes:,}; the file was cut off or "
                f"changed. {use_another()}"
            )
        if checksum(header) != self._info.header_crc32:
            raise DamagedCheckpoint(
                f"{self.path}: its header does not have the checksum that layout.json lists; the file is damaged. "
                f"{use_another()}"
            )
        return header

    @contextmanager
    def _told(self) -> Iterator[Any]:
        """The opened file; errors of the system say which one it is."""
        try:
            with self.path.open("rb", buffering=0) as file:
                yield file
        except FileNotFoundError:
            folder = self.path.parents[1]
            if not folder.exists():
                raise CheckpointError(
                    f"{folder}: was there a moment ago and is gone, perhaps because a run that trains there saved a "
                    "newer checkpoint (checkpoint.keep); start again, from that one"
                ) from None
            raise DamagedCheckpoint(f"{self.path}: is listed in layout.json but missing. {use_another()}") from None
        except OSError as error:
            kind = DamagedCheckpoint if error.errno == errno.EIO else CheckpointError
            raise kind(f"{self.path}: cannot be read: {error.strerror or error}. {use_another()}") from error

    def read(self, key: str, numel: int, start: int, end: int, memory: Memory | None = None) -> Tensor:
        """Elements `start` to `end` of the flattened tensor, which has `numel`; in memory of their own, or in the one
        given, until that is used again."""
        entry, listed = self._entries[key], self._info.crc32[key]
        if entry.numel != numel:
            raise DamagedCheckpoint(
                f"{self.path}: tensor {key} has {entry.numel:,} elements, layout.json says {numel:,}; one of them "
                f"is damaged. {use_another()}"
            )
        size = entry.dtype.itemsize
        first_chunk = start * size // CHUNK_BYTES
        offset = first_chunk * CHUNK_BYTES
        stop = min(-(-end * size // CHUNK_BYTES) * CHUNK_BYTES, entry.numel * size)
        held = (memory or Memory()).of(max(0, stop - offset))
        data = held.numpy().data
        with self._told() as file:
            file.seek(entry.start + offset)
            done = 0
            while done < len(data) and (count := file.readinto(data[done:])):
                done += count
        for number, place in enumerate(range(0, len(data), CHUNK_BYTES), first_chunk):
            found = checksum(data[place : min(place + CHUNK_BYTES, done)])
            if found != listed[number]:
                raise DamagedCheckpoint(
                    f"{self.path}: tensor {key} has checksum {found} from its byte {number * CHUNK_BYTES:,} on, "
                    f"layout.json lists {listed[number]}; the file is damaged. {use_another()}"
                )
        return held[start * size - offset : end * size - offset].view(entry.dtype)

    def get(self, key: str) -> Tensor:
        """The whole tensor."""
        entry = self._entries[key]
        return self.read(key, entry.numel, 0, entry.numel).view(entry.shape)

    def get_all(self) -> dict[str, Tensor]:
        """Every tensor of the file."""
        return {key: self.get(key) for key in self._info.crc32}

    def check(self) -> None:
        """Reads everything, a little at a time."""
        for key in self._info.crc32:
            numel = self._entries[key].numel
            for start in range(0, numel, CHUNK_BYTES):
                self.read(key, numel, start, min(start + CHUNK_BYTES, numel))


class _Entry(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file

    @property
    def numel(self) -> int:
        return prod(self.shape)


def _entries(header: bytes, info: FileInfo) -> Iterator[tuple[str, _Entry]]:
    """The tensors of the header that layout.json lists, which lie in the file and have as many chunks."""
    described = json.loads(header[8:])
    for key, listed in info.crc32.items():
        start, end = (len(header) + offset for offset in described[key]["data_offsets"])
        entry = _Entry(SAFETENSORS_DTYPES[described[key]["dtype"]], tuple(described[key]["shape"]), start)
        assert (
            all(type(n) is int and n >= 0 for n in (start, *entry.shape)) and len(header) <= start <= end <= info.bytes
        ), "it reaches outside"
        assert entry.numel * entry.dtype.itemsize == end - start, "its size is not that of its shape"
        assert len(listed) == -(-(end - start) // CHUNK_BYTES), "other checksums"
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
    """The tensor's numbers as bytes; no copy when it is contiguous and in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
