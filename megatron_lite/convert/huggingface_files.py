"""The tensor files of a Hugging Face model: one or several, of safetensors or of torch, read in blocks.

The files are not trusted: no code in them runs, an index cannot name a file outside of its folder, and damage is an
error that names the file.
Source: https://huggingface.co/docs/transformers/big_models, "Sharded checkpoints".
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_lite.checkpoint.tensor_file import Spec, regular_file
from megatron_lite.convert.distributed_files import METADATA, DistributedFiles
from megatron_lite.convert.safe_pickle import StoredTensor
from megatron_lite.convert.torch_file import TorchFile
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.files import open_file, read_file
from megatron_lite.parallel.dtypes import SAFETENSORS_DTYPES
from megatron_lite.text import listed, parse_strictly

BLOCK_BYTES = 32 << 20  # of a mapped file that are in memory at a time
INDEX = ".index.json"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"

# Keys under which training programs save the tensors, beside what is not of the model.
_INNER = {"state_dict", "model", "module", "model_state_dict"}

Reader = Callable[[slice], Tensor]
"""A function that returns some rows of a tensor."""


class HuggingFaceFiles:
    """All tensors of a model's folder."""

    def __init__(self, folder: Path):
        self.specs: dict[str, Spec] = {}
        self._readers: dict[str, Reader] = {}
        if not _has_weights(folder) and (folder / METADATA).is_file():
            stored = DistributedFiles(folder)
            self.specs = dict(stored.specs)
            self._readers = {name: partial(_part, stored, name) for name in stored.specs}
            return
        files = _files(folder)
        indexed = {name for names in files.values() for name in names or ()}
        for file, names in files.items():
            path = regular_file(folder, file)
            if not path.is_file():
                raise DamagedCheckpoint(f"{path}: is missing, but the index lists tensors in it; fetch it again")
            found = _safetensors_file(path) if file.endswith(".safetensors") else _torch_file(path)
            if missing := [name for name in names or [] if name not in found]:
                raise DamagedCheckpoint(
                    f"{path}: has no {listed(missing)}, which the index lists in it; fetch it again"
                )
            if others := sorted((found.keys() & indexed).difference(names or ())):
                raise DamagedCheckpoint(
                    f"{path}: has {listed(others)}, which the index lists in another file; fetch it again"
                )
            for name in names or found:
                self.specs[name], self._readers[name] = found[name]

    def fill(self, target: Tensor, name: str, order: Tensor | None = None) -> None:
        """Copy a tensor into memory of its shape and any strides, or its row i into row `order[i]`; -1 is left out."""
        for rows, values in self._blocks(name):
            if order is None:
                target[rows] = values
            else:
                kept = order[rows] >= 0
                target[order[rows][kept]] = values if kept.all() else values[kept]

    def equals(self, full: Tensor, name: str) -> bool:
        """Whether a tensor has these values."""
        return all(torch.equal(full[rows], values) for rows, values in self._blocks(name))

    def _blocks(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows of a tensor, each with its position."""
        dtype, shape = self.specs[name]
        step = max(1, BLOCK_BYTES // max(1, prod(shape[1:]) * dtype.itemsize))
        for first in range(0, shape[0], step):
            rows = slice(first, first + step)
            yield rows, self._readers[name](rows)


def _has_weights(folder: Path) -> bool:
    return any((folder / (name + end)).exists() for name in (SAFETENSORS, TORCH) for end in ("", INDEX))


def _part(stored: DistributedFiles, name: str, rows: slice) -> Tensor:
    """Some rows of a tensor in files of torch.distributed.checkpoint."""
    dtype, shape = stored.specs[name]
    _dtype(stored.folder / METADATA, name, dtype, str(dtype))  # only what is read: beside weights are counters
    start, end, _ = rows.indices(shape[0])
    return stored.read(name, (start, *(0 for _ in shape[1:])), (end - start, *shape[1:]))


def _safetensors_file(path: Path) -> dict[str, tuple[Spec, Reader]]:
    """The tensors of a safetensors file by name. Its map is closed after every block, which frees the memory."""

    def read(name: str, rows: slice) -> Tensor:
        with _opened(path) as file:
            return file.get_slice(name)[rows]

    found: dict[str, tuple[Spec, Reader]] = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (it is not a mapping)
            described = file.get_slice(name)
            dtype, shape = described.get_dtype(), described.get_shape()
            found[name] = Spec(_dtype(path, name, SAFETENSORS_DTYPES.get(dtype), dtype), shape), partial(read, name)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        open_file(path).close()  # the library reports no other error than a missing file, and waits for a pipe
        with safe_open(path, framework="pt") as file:
            yield file
    except PermissionError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; let this user read it") from None
    except (SafetensorError, OSError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DamagedCheckpoint(f"{path}: is damaged, or not a safetensors file ({error}); fetch it again") from None


def _torch_file(path: Path) -> dict[str, tuple[Spec, Reader]]:
    """The tensors of a file of torch.save by name."""
    file = TorchFile(path)
    content = file.content
    for _ in range(3):  # a crafted dict can hold itself
        inner = sorted(_INNER & content.keys()) if isinstance(content, Mapping) else []
        if len(inner) > 1:
            raise CheckpointError(f"{path}: has {listed(inner)}, expected one of them; save the tensors alone")
        if inner and (beside := [str(name) for name, value in content.items() if _is_weight(value)]):
            raise CheckpointError(f"{path}: has {listed(beside)} beside {inner[0]}; save one of the models alone")
        content = content[inner[0]] if inner else content
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds {type(content).__name__}, expected tensors by name")

    def read(tensor: Tensor, rows: slice) -> Tensor:
        file.check_size()
        return tensor[rows]

    tensors = {str(name): value.tensor for name, value in content.items() if isinstance(value, StoredTensor)}
    if not tensors and content:
        raise CheckpointError(
            f"{path}: has no tensors, but {listed([str(name) for name in content])}; save the tensors"
        )
    return {
        name: (Spec(_dtype(path, name, tensor.dtype, str(tensor.dtype)), tensor.shape), partial(read, tensor))
        for name, tensor in tensors.items()
    }


def _is_weight(value: Any) -> bool:
    """True for a tensor of a model; a loss has no dimension, a state of random numbers is of integers."""
    return isinstance(value, StoredTensor) and value.tensor.is_floating_point() and value.tensor.dim() > 0


class Shards(NamedTuple):
    """A plan of files with tensors."""

    files: dict[str, list[str]]  # file -> names of tensors
    total_bytes: int


def plan_shards(groups: list[dict[str, Spec]], max_bytes: int) -> Shards:
    """Files of at most `max_bytes` for tensors in order, if no group is larger; a group is in one file."""
    sizes = [sum(spec.dtype.itemsize * prod(spec.shape) for spec in group.values()) for group in groups]
    shards: list[list[str]] = []
    room = 0
    for group, size in zip(groups, sizes, strict=True):
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1] += group
        room -= size
    if len(shards) == 1:
        return Shards({SAFETENSORS: shards[0]}, sum(sizes))
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    return Shards(dict(zip(names, shards, strict=True)), sum(sizes))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = parse_strictly(read_file(path), object_pairs_hook=_object)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path}: holds a {type(content).__name__}, expected a JSON object; fetch it again")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. One of two values of a key would be left out without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key in found if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"{twice[:80]!r} is in an object twice")
    return found


def _files(folder: Path) -> dict[str, list[str] | None]:
    """Each file with tensors -> their names, or None for all."""
    for single in (SAFETENSORS, TORCH):
        if (folder / single).exists():
            return {single: None}
        if (folder / (single + INDEX)).exists():
            return dict(_indexed(folder / (single + INDEX), Path(single).suffix))
    raise CheckpointError(
        f"{folder}: has no weights; expected one of {SAFETENSORS}, {SAFETENSORS}{INDEX}, {TORCH} and {TORCH}{INDEX}"
    )


def _indexed(index: Path, suffix: str) -> dict[str, list[str]]:
    """file -> names, from an index of name -> file."""
    weight_map = read_json(regular_file(index.parent, index.name)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedCheckpoint(f"{index}: has no weight_map from tensors to files; fetch it again")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # A name with a folder or a null byte could lead out of this folder.
        if not isinstance(file, str) or Path(file).name != file or "\0" in file or not file.endswith(suffix):
            raise CheckpointError(f"{index}: lists {name} in {file!r}, which is not a {suffix} file of this folder")
        files.setdefault(file, []).append(name)
    return files


def _dtype(path: Path, name: str, dtype: torch.dtype | None, dtype_name: str) -> torch.dtype:
    if dtype not in FLOATS:
        raise CheckpointError(f"{path}: {name} has the unsupported dtype {dtype_name}; save it as float32")
    return dtype
