"""What other programs read in the same files: safetensors, torch.load and torch's reader of distributed checkpoints."""

import argparse
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

Tensors = dict[str, Tensor]


def flat(node: Any, prefix: str = "") -> Tensors:
    """The tensors in nested dicts, by path."""
    found: Tensors = {}
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
        else:
            found |= flat(value, f"{prefix}{key}.")
    return found


def of_safetensors(*patterns: str) -> Callable[[Path], Tensors]:
    """A reader of all files that match."""

    def read(folder: Path) -> Tensors:
        found: Tensors = {}
        for pattern in patterns:
            for file in sorted(folder.glob(pattern)):
                with safe_open(file, "pt") as opened:
                    found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return found

    return read


def of_index(name: str) -> Callable[[Path], Tensors]:
    """A reader of the tensors that an index lists, each in its file."""

    def read(folder: Path) -> Tensors:
        path = folder / name
        found: Tensors = {}
        for key, file in json.loads(path.read_bytes())["weight_map"].items():
            with safe_open(path.parent / file, "pt") as opened:
                found[key] = opened.get_tensor(key)
        return found

    return read


def of_native(name: str) -> Callable[[Path], Tensors]:
    """A reader of layout.json and its files, for one rank."""

    def read(folder: Path) -> Tensors:
        (path,) = folder.glob(f"{name}/checkpoints/iter_*/layout.json")
        found: Tensors = {}
        for key, tensor in json.loads(path.read_bytes())["tensors"].items():
            (rule,) = tensor["values"]["weight"]["rules"]
            assert rule == {"pp": 0, "tp": [0, 1], "dp": None, "chunk": 0, "shift": 0}
            with safe_open(path.parent / "mp_rank_00" / "model.safetensors", "pt") as opened:
                found[key] = opened.get_tensor(key).reshape(tensor["shape"])
        return found

    return read


def of_torch(*patterns: str) -> Callable[[Path], Tensors]:
    """A reader of all files of torch.save that match."""

    def read(folder: Path) -> Tensors:
        found: Tensors = {}
        with torch.serialization.safe_globals([argparse.Namespace]):
            for pattern in patterns:
                for file in sorted(folder.glob(pattern)):
                    found |= flat(torch.load(file, map_location="cpu", weights_only=True), f"{file.name}:")
        return found

    return read


def of_torch_dist(pattern: str) -> Callable[[Path], Tensors]:
    """A reader of a distributed checkpoint. It runs what a pickle asks for, so its process is thrown away."""

    def read(folder: Path) -> Tensors:
        from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

        (path,) = folder.glob(pattern)
        state: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_loader._load_state_dict(
                state, storage_reader=FileSystemReader(path.parent), planner=_EmptyStateDictLoadPlanner(), no_dist=True
            )
        return flat(state)

    return read


def joined(tensors: Tensors) -> Tensor:
    """All elements, in the order of names."""
    return torch.cat([tensors[name].detach().double().flatten() for name in sorted(tensors)] or [torch.empty(0)])


class Moved:
    """Where a conversion puts each element, learned from sound files whose elements are all different."""

    def __init__(self, source: Tensors, target: Tensors):
        values, order = joined(source).sort()
        self.shapes = {name: tensor.shape for name, tensor in source.items()}
        wanted = joined(target)
        at = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
        self.known = values[at] == wanted
        self.places, self.constants = order[at], wanted
        assert self.known.double().mean() > 0.5, "the sound conversion has other values than its source"

    def wrong(self, source: Tensors, target: Tensors) -> str:
        """How the target differs from what the source says; empty if it does not."""
        shapes = {name: tensor.shape for name, tensor in source.items() if name in self.shapes}
        if shapes != self.shapes:
            odd = [name for name, shape in self.shapes.items() if shapes.get(name) != shape]
            return f"{odd[:3]} have other shapes, and were taken"
        expected = torch.where(
            self.known, joined({name: source[name] for name in self.shapes})[self.places], self.constants
        )
        got = joined(target)
        if got.shape != expected.shape:
            return f"{len(got)} elements, not {len(expected)}"
        differing = int((~((got == expected) | (got.isnan() & expected.isnan()))).sum())
        return f"{differing} elements have other values" if differing else ""
