"""Megatron-LM's checkpoints of `--ckpt-format torch_dist`, its default, and other folders with its names.

    latest_checkpointed_iteration.txt     "1000" or "release"
    iter_0001000/
        metadata.json                     {"sharded_backend": "torch_dist", ...}
        common.pt                         {"args": argparse.Namespace, "iteration": 1000, ...}
        .metadata, __0_0.distcp ...       the tensors (`distributed_files`), without the layout of ranks

A tensor of all layers is one with the layers as its first dimension, or one for each layer. Names are megatron-core's,
or older ones; rows of query, key and value are in the order of `checkpoint_version` 3.0. Saves of
torch.distributed.checkpoint itself with such names have no common.pt; fields that their tensors do not show are given.
Source: https://github.com/NVIDIA/Megatron-LM, megatron/core/dist_checkpointing.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.checkpoint.directory import TRACKER_FILE, write_durably
from megatron_lite.checkpoint.layout import iteration_folder
from megatron_lite.checkpoint.tensor_file import Spec, regular_file, save_errors
from megatron_lite.convert.distributed_files import METADATA, Chunk, DistributedFiles, write_chunks
from megatron_lite.convert.megatron import WRITTEN_VERSION, core_name, recipe, tracked_folder
from megatron_lite.convert.megatron_args import args_for, check_model, padded_rows
from megatron_lite.convert.megatron_model import LAYER, model_from
from megatron_lite.convert.recipe import (
    VOCABULARY_TABLES,
    Checkpoint,
    Progress,
    check_names,
    full_table,
    stored_iteration,
)
from megatron_lite.convert.torch_errors import torch_errors
from megatron_lite.convert.torch_file import TorchFile
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.ends import WORD_EMBEDDINGS
from megatron_lite.parallel.shard import Shard
from megatron_lite.text import listed

COMMON = "common.pt"
MAX_LAYERS = 10_000  # a damaged shape could ask for more names than memory has
# Tensors that are not weights of the model.
STATE = re.compile(r"^(optimizer|opt_param_scheduler|chained_\d+|rng_state|rerun_state|train_state|dataloader)\b")
PREFIX = re.compile(r"^(model|module|state_dict|app)\.")
# Layers for which megatron-core asks for the state of fp8, which is None without it.
LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
# megatron-core saves a norm with the layer after it, as TransformerEngine has them.
WITH_NORM = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}


@dataclass(frozen=True)
class Part:
    """One of our tensors: a part of a stored one, whose first dimension can be that of the layers."""

    stored: str
    layer: int | None
    dims: tuple[int, ...]
    ranks: int  # of the tensor-parallel group that padded the vocabulary

    @property
    def shards(self) -> range:
        """One for each rank."""
        return range(self.ranks)

    def shape(self, shard: Shard) -> tuple[int, ...]:
        """The shape of the full tensor, which is stored."""
        return self.dims


def recognise(path: Path) -> bool:
    """Whether `path` has torch.distributed.checkpoint's files, or names a folder that has them; ours have a layout."""
    try:
        folder = _folder(path)
        return (folder / METADATA).is_file() and not (folder / "config.json").exists()
    except (CheckpointError, OSError):
        return False


def read(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """The model of a checkpoint of any layout."""
    folder = _folder(path)
    files = DistributedFiles(folder)
    common = TorchFile(regular_file(folder, COMMON)).content if (folder / COMMON).exists() else {}
    args = common.get("args") if isinstance(common, dict) else None
    args = args if isinstance(args, dict) else {}
    parts = _parts(folder, files, args)
    if WORD_EMBEDDINGS not in parts:
        raise CheckpointError(
            f"{folder}: has no word embeddings under a name of megatron-core or Megatron-LM; its tensors are "
            f"{listed(list(files.specs))}. Put a config.json beside tensors with names of Hugging Face"
        )
    model, notes = model_from(folder, parts, args, overrides, pipelined=False)
    table = full_table(model)
    rows = parts[WORD_EMBEDDINGS].dims[0]
    recipes = {name: recipe(name, table, model, folder, WRITTEN_VERSION, rows) for name in table}
    check_names(folder, recipes, table, {name: part.dims for name, part in parts.items()})

    def read_tensor(name: str) -> Tensor:
        part, wanted = parts[name], table[name].shape
        if name in VOCABULARY_TABLES:
            kept = min(rows, wanted[0])
            return _resized(_read(files, part, (kept, *part.dims[1:])), wanted[0])
        return recipes[name].join([_read(files, part, part.dims)])

    iteration = common.get("iteration") if isinstance(common, dict) else 0
    has_state = any(STATE.match(name) for name in files.specs)
    return Checkpoint(
        model=model,
        tensors={name: Spec(files.specs[parts[name].stored].dtype, table[name].shape) for name in table},
        read=read_tensor,
        iteration=0 if folder.name == "release" else stored_iteration(iteration),
        notes=notes + (["its optimizer state is left out"] if has_state else []),
    )


def write(path: Path, checkpoint: Checkpoint, *, tensor: int, pipeline: int, progress: Progress) -> None:
    """Write iter_XXXXXXX/, or release/ for a checkpoint without an iteration, and the tracker into the folder."""
    if (tensor, pipeline) != (1, 1):
        raise ConfigError(
            f"--tensor is {tensor} and --pipeline {pipeline}, but torch_dist has no ranks; leave them out"
        )
    model = checkpoint.model
    check_model(model, 1, 1)
    folder = path / (iteration_folder(checkpoint.iteration) if checkpoint.iteration else "release")
    with save_errors("creating the folder", folder):
        folder.mkdir(parents=True)
    layers = range(model.num_layers)
    states = [f"decoder.layers.{linear}._extra_state/shard_{n}_{len(layers)}" for linear in LINEAR for n in layers]
    write_chunks(folder, _chunks(checkpoint, folder, progress), states)
    dtype = checkpoint.tensors[WORD_EMBEDDINGS].dtype
    common = {
        "args": args_for(model, tensor=1, pipeline=1, iteration=checkpoint.iteration, dtype=dtype),
        "checkpoint_version": WRITTEN_VERSION,
        "iteration": checkpoint.iteration,
    }
    common["args"].ckpt_format = "torch_dist"
    with torch_errors(folder / COMMON):
        torch.save(common, folder / COMMON)
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    write_durably(folder / "metadata.json", json.dumps(backends).encode())
    write_durably(path / TRACKER_FILE, (str(checkpoint.iteration) if checkpoint.iteration else "release").encode())


def _folder(path: Path) -> Path:
    """The folder with the files."""
    if (path / METADATA).is_file() or not (path / TRACKER_FILE).is_file():
        return path
    return tracked_folder(path)


def _parts(folder: Path, files: DistributedFiles, args: Mapping[str, Any]) -> dict[str, Part]:
    """Each of our names -> its part of a stored tensor."""
    ranks = args.get("tensor_model_parallel_size")
    ranks = ranks if type(ranks) is int and 0 < ranks < 1 << 16 else 1
    parts: dict[str, Part] = {}
    for stored, spec in files.specs.items():
        if STATE.match(stored) or "_extra_state" in stored:
            continue
        name = core_name(PREFIX.sub("", stored))
        found = {name: Part(stored, None, tuple(spec.shape), ranks)}
        if name.startswith("decoder.layers.") and not LAYER.match(name):
            if not spec.shape:
                raise CheckpointError(f"{folder}: {stored} is a single value, which no parameter is")
            if spec.shape[0] > MAX_LAYERS:
                raise CheckpointError(
                    f"{folder}: {stored} has {spec.shape[0]:,} layers, expected at most {MAX_LAYERS:,}"
                )
            rest = name.removeprefix("decoder.layers.")
            found = {
                f"decoder.layers.{layer}.{rest}": Part(stored, layer, tuple(spec.shape[1:]), ranks)
                for layer in range(spec.shape[0])
            }
        if twice := sorted(found.keys() & parts.keys()):
            raise CheckpointError(f"{folder}: {stored} is {twice[0]}, which {parts[twice[0]].stored} is too")
        parts |= found
    return parts


def _read(files: DistributedFiles, part: Part, shape: tuple[int, ...]) -> Tensor:
    """The first values of a part, of this shape."""
    if part.layer is None:
        return files.read(part.stored, (0,) * len(shape), shape)
    return files.read(part.stored, (part.layer, *(0,) * len(shape)), (1, *shape)).squeeze(0)


def _chunks(checkpoint: Checkpoint, folder: Path, progress: Progress) -> Iterator[Chunk]:
    model, table = checkpoint.model, full_table(checkpoint.model)
    rows = padded_rows(model.vocab_size, 1)
    for name in table:
        found, dtype = recipe(name, table, model, folder, WRITTEN_VERSION, rows), checkpoint.tensors[name].dtype
        (shape,) = found.foreign_shapes(table[name].shape)
        full, start, theirs = shape, (0,) * len(shape), name
        if match := LAYER.match(name):
            full, start, shape = (model.num_layers, *shape), (int(match[1]), *start), (1, *shape)
            module, _, kind = name[match.end() :].rpartition(".")
            theirs = f"decoder.layers.{module}.{kind}"
            if module in WITH_NORM:
                theirs = f"decoder.layers.{WITH_NORM[module]}.layer_norm_{kind}"
        split = (lambda tensor: [_resized(tensor, rows)]) if name in VOCABULARY_TABLES else found.split
        take = partial(_foreign, checkpoint, name, shape, split, progress)
        yield Chunk(theirs, full, start, shape, dtype, take)


def _resized(table: Tensor, rows: int) -> Tensor:
    """The first rows of a table, with zeros after its last one; no copy of a table that has so many."""
    missing = rows - len(table)
    return F.pad(table, (0, 0) * (table.ndim - 1) + (0, missing)) if missing > 0 else table[:rows]


def _foreign(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], split: Any, progress: Progress) -> Tensor:
    full = split(checkpoint.read(name))[0].contiguous().view(shape)
    progress(full.dtype.itemsize * prod(shape))
    return full
