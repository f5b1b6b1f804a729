"""safetensors files, written at the speed of the disk with a checksum of every tensor, read through a memory map.

The format is a length, a JSON header and the bytes, so the writer is short, and being ours it computes checksums
while the disk is busy, keeps one tensor at a time in host memory and never copies one that is there already.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_lite.checkpoint.layout import DTYPE_NAMES, FileInfo, checksum, use_another
from megatron_lite.errors import CheckpointError

CHUNK_BYTES = 8 << 20
# Data is handed to the disk while later data is still being copied into the page cache, so that the two overlap.
FLUSH_BYTES = 64 << 20

ADVICE = {
    errno.ENOSPC: "Free some space, lower checkpoint.keep, or point run.dir to another disk",
    errno.EDQUOT: "Free some of your quota, lower checkpoint.keep, or point run.dir to another disk",
    errno.EACCES: "Give this user write permission there, or point run.dir elsewhere",
    errno.EPERM: "Give this user write permission there, or point run.dir elsewhere",
    errno.ENOENT: "Every rank must see the same run.dir; put it on a file system that all machines share",
    errno.EROFS: "The file system is read-only; point run.dir elsewhere",
}


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """An error of the operating system becomes one that says which path, why, and what to do."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "Check the disk, or point run.dir to another one")
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileInfo:
    """Writes a safetensors file and waits until the disk has it. Tensors on a GPU are copied one at a time."""
    # Larger numbers first keeps every tensor aligned to its own size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header = _header(ordered)
    checksums: dict[str, str] = {}
    with (
        explained("writing", path),
        path.open("wb", buffering=1 << 20) as file,
        ThreadPoolExecutor(1) as adder,
        ThreadPoolExecutor(1) as flusher,
    ):
        file.write(header)
        flushed, unflushed_bytes = Future(), 0
        flushed.set_result(None)
        for key, tensor in ordered:
            data = _bytes_of(tensor)
            added = adder.submit(checksum, data)
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                file.write(chunk)
                unflushed_bytes += len(chunk)
                if unflushed_bytes >= FLUSH_BYTES and flushed.done():
                    flushed.result()
                    flushed, unflushed_bytes = flusher.submit(os.fsync, file.fileno()), 0
            checksums[key] = added.result()
        flushed.result()
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return FileInfo(bytes=size, header_crc32=checksum(header), crc32=checksums)


class TensorFile:
    """A safetensors file that layout.json describes. Tensors come out as views of a memory map, checked as read."""

    def __init__(self, path: Path, info: FileInfo):
        self.path, self._info = path, info
        try:
            self._check_size_and_header()
            self._file: Any = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is listed in layout.json but missing. {use_another()}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}. {use_another()}") from error

    def _check_size_and_header(self) -> None:
        size = self.path.stat().st_size
        if size != self._info.bytes:
            raise CheckpointError(
                f"{self.path}: has {size:,} bytes, layout.json says {self._info.bytes:,}; the file was cut off or "
                f"changed. {use_another()}"
            )
        with self.path.open("rb") as file:
            length = file.read(8)
            header = length + file.read(min(struct.unpack("<Q", length)[0], size))
        if checksum(header) != self._info.header_crc32:
            raise CheckpointError(
                f"{self.path}: its header does not have the checksum that layout.json lists; the file is damaged. "
                f"{use_another()}"
            )

    def get(self, key: str) -> Tensor:
        """The tensor, in pages of the file: copy it, and never write to it."""
        tensor = self._file.get_tensor(key)
        found, listed = checksum(_bytes_of(tensor)), self._info.crc32[key]
        if found != listed:
            raise CheckpointError(
                f"{self.path}: tensor {key} has checksum {found}, layout.json lists {listed}; the file is damaged. "
                f"{use_another()}"
            )
        return tensor

    def get_all(self) -> dict[str, Tensor]:
        """Every tensor of the file."""
        return {key: self.get(key) for key in self._info.crc32}


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    entries, offset = {}, 0
    for key, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        entries[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
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
