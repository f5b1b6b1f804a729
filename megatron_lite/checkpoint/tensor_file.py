"""safetensors files, written at the speed of the disk with a checksum of every tensor, read through a memory map.

The format is a length, a JSON header and the bytes, so both are short; and being ours, the writer computes checksums
while the disk is busy and keeps one tensor at a time in host memory, and the reader checks just what it touches.
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
from mmap import ACCESS_COPY, MADV_DONTNEED, MADV_WILLNEED, PAGESIZE, mmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint.layout import CHUNK_BYTES, DTYPE_NAMES, DTYPES, FileInfo, checksum, use_another
from megatron_lite.errors import CheckpointError, DamagedCheckpoint

# Data is handed to the disk while later data is still being copied into the page cache, so that the two overlap.
FLUSH_BYTES = 32 << 20

ADVICE = {
    errno.ENOSPC: "Free some space, lower checkpoint.keep, or write to another disk (run.dir)",
    errno.EDQUOT: "Free some of your quota, lower checkpoint.keep, or write to another disk (run.dir)",
    errno.EACCES: "Give this user write permission there, or write elsewhere (run.dir)",
    errno.EPERM: "Give this user write permission there, or write elsewhere (run.dir)",
    errno.ENOENT: "Every rank must see the same run.dir; put it on a file system that all machines share",
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
    `keys`, each from whatever device, one at a time in host memory. Checksums are computed and data goes to the disk
    while the next is copied.
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
            self._adder = stack.enter_context(ThreadPoolExecutor(1))
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
        data = _bytes_of(tensor)
        added = self._adder.submit(_checksums, data)
        with explained("writing", self.path):
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                self._file.write(chunk)
                self._unflushed_bytes += len(chunk)
                if self._unflushed_bytes >= FLUSH_BYTES and self._flushed.done():
                    self._flushed.result()
                    self._flushed, self._unflushed_bytes = self._flusher.submit(os.fsync, self._file.fileno()), 0
        self._checksums[key] = added.result()

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


class TensorFile:
    """A safetensors file that layout.json describes, through a memory map. What is read is checked, once.

    A map's pages count as this process's memory although the system can take them back: `release` gives them back.
    """

    def __init__(self, path: Path, info: FileInfo):
        self.path, self._info = path, info
        self._checked: set[tuple[str, int]] = set()
        try:
            header = self._checked_header()
            with path.open("rb") as file:
                # A private map: torch wants memory that could be written to, and nothing could reach the file.
                self._map = mmap(file.fileno(), 0, access=ACCESS_COPY)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path}: is listed in layout.json but missing. {use_another()}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}. {use_another()}") from error
        try:
            self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
            self._tensors = dict(_views(self._memory, header))
            for key, listed in info.crc32.items():
                assert len(listed) == -(-self._tensors[key].nbytes // CHUNK_BYTES)
        except (ValueError, TypeError, LookupError, RuntimeError, AttributeError, AssertionError) as error:
            raise DamagedCheckpoint(
                f"{path}: its header is not one of a safetensors file with the tensors that layout.json lists "
                f"({type(error).__name__}: {error}). {use_another()}"
            ) from None

    def _checked_header(self) -> bytes:
        size = self.path.stat().st_size
        if size != self._info.bytes:
            raise DamagedCheckpoint(
                f"{self.path}: has {size:,} bytes, layout.json says {self._info.bytes:,}; the file was cut off or "
                f"changed. {use_another()}"
            )
        with self.path.open("rb") as file:
            length = file.read(8)
            header = length + file.read(min(struct.unpack("<Q", length)[0], size))
        if checksum(header) != self._info.header_crc32:
            raise DamagedCheckpoint(
                f"{self.path}: its header does not have the checksum that layout.json lists; the file is damaged. "
                f"{use_another()}"
            )
        return header

    def will_need(self, key: str, start: int, end: int) -> None:
        """Elements `start` to `end` will be read soon: the system may begin to fetch them."""
        tensor = self._tensors[key]
        size, first = tensor.element_size(), tensor.data_ptr() - self._memory.data_ptr()
        from_page = (first + start * size) // PAGESIZE * PAGESIZE
        if from_page < (until := min(first + end * size, len(self._map))):
            self._map.madvise(MADV_WILLNEED, from_page, until - from_page)

    def flat(self, key: str, numel: int, start: int, end: int) -> Tensor:
        """The whole tensor of `numel` elements, flattened, in pages of the file; elements `start` to `end` are checked,
        others must not be used. Copy it, and never write to it."""
        tensor = self._tensors[key].view(-1)
        if tensor.numel() != numel:
            raise DamagedCheckpoint(
                f"{self.path}: tensor {key} has {tensor.numel():,} elements, layout.json says {numel:,}; one of them "
                f"is damaged. {use_another()}"
            )
        data, listed = _bytes_of(tensor), self._info.crc32[key]
        size = tensor.element_size()
        for chunk in range(start * size // CHUNK_BYTES, -(-end * size // CHUNK_BYTES)):
            if (key, chunk) in self._checked:
                continue
            found = checksum(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
            if found != listed[chunk]:
                raise DamagedCheckpoint(
                    f"{self.path}: tensor {key} has checksum {found} from its byte {chunk * CHUNK_BYTES:,} on, "
                    f"layout.json lists {listed[chunk]}; the file is damaged. {use_another()}"
                )
            self._checked.add((key, chunk))
        return tensor

    def get(self, key: str) -> Tensor:
        """The tensor, in pages of the file: copy it, and never write to it."""
        tensor = self._tensors[key]
        self.flat(key, tensor.numel(), 0, tensor.numel())
        return tensor

    def get_all(self) -> dict[str, Tensor]:
        """Every tensor of the file."""
        return {key: self.get(key) for key in self._info.crc32}

    def release(self) -> None:
        """Gives the memory of what was read so far back to the system; what is read again comes from the file."""
        self._map.madvise(MADV_DONTNEED)


def _header(ordered: list[tuple[str, Spec]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, spec in ordered:
        end = offset + prod(spec.shape) * spec.dtype.itemsize
        entries[key] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # data starts at a cache line
    return struct.pack("<Q", len(text)) + text


def _views(memory: Tensor, header: bytes) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file in its bytes."""
    for key, entry in json.loads(header[8:]).items():
        if key != "__metadata__":
            start, end = (len(header) + offset for offset in entry["data_offsets"])
            yield key, memory[start:end].view(DTYPES[entry["dtype"]]).view(entry["shape"])


def _checksums(data: memoryview) -> tuple[str, ...]:
    return tuple(checksum(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's numbers as bytes; no copy when it is contiguous and in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
