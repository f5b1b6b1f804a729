"""Small files of torch.save, handwritten pickles of storages and tensors, and damaged copies of files."""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.convert.torch_file import TorchFile, flatten
from megatron_lite.errors import CheckpointError
from tests.helpers.models_in_memory import assert_identical

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
FORMATS = {"zip": True, "legacy": False}


def save_file(path: Path, content: Any, form: str = "zip") -> Path:
    """Save `content` with torch.save in one of FORMATS; return `path`."""
    torch.save(content, path, _use_new_zipfile_serialization=FORMATS[form])
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file by its dotted name."""
    return {name: stored.tensor for name, stored in flatten(TorchFile(path).content, path).items()}


def storage_of(numel: int, kind: str = "FloatStorage", view: str = "", key: str = "0") -> bytes:
    """The pickle of a storage's persistent id: protocol 0 plus one binary opcode."""
    return f"(S'storage'\nctorch\n{kind}\nS'{key}'\nS'cpu'\nI{numel}\n{view}tQ".encode()


def tensor_of(storage: bytes, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """The pickle of a tensor in this storage."""

    def tuple_of(sizes: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(f"I{size}\n".encode() for size in sizes) + b"t"

    data = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + f"I{offset}\n".encode()
    return data + tuple_of(shape) + tuple_of(stride) + b"I00\nNtR"


def read_damaged_copies(folder: Path, seeds: range) -> int:
    """Read a truncated or changed copy of a small file for each seed; return how many were read without an error.

    Reading a changed zip archive gives its tensors or an error, unless the change is in the values, which have no
    checksum, or in the header of their record. Legacy files have no checksums: reading gives any object or an error.
    """
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.ones(5, dtype=torch.bfloat16)}}
    content = {**tensors, "args": argparse.Namespace(x=1), "steps": [1, 2], "name": "run"}
    want = {"a": tensors["a"], "b.c": tensors["b"]["c"]}
    path = folder / "damaged.pt"
    read = 0
    for form in FORMATS:
        intact = save_file(folder / f"{form}.pt", content, form).read_bytes()
        records = TorchFile(folder / f"{form}.pt").records
        unchecked = [range(record.start - 80, record.start + record.size) for record in records.values()]
        for seed in seeds:
            draw = random.Random(seed)
            damaged = bytearray(intact)
            flips = [draw.randrange(len(intact)) for _ in range(draw.randrange(4))]
            for place in flips:
                damaged[place] ^= 1 << draw.randrange(8)
            if not flips or draw.random() < 0.2:
                damaged = damaged[: draw.randrange(len(intact))]
            path.write_bytes(damaged)
            try:
                got = tensors_of(path)
            except CheckpointError as error:
                assert str(error).startswith(f"{path}: ") and len(str(error)) < 1000
                continue
            read += 1
            if form == "zip" and not any(place in values for place in flips for values in unchecked):
                assert_identical(got, want)
            for tensor in got.values():
                tensor.clone()
    return read


def peak_of(line: str) -> int:
    """A peak of this process's memory in bytes: the value of `line` in /proc/self/status."""
    return int(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0]) << 10
