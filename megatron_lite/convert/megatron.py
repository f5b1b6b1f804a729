"""Megatron-LM's checkpoints (`--ckpt-format torch`) of all versions: nested names and megatron-core's.

    latest_checkpointed_iteration.txt     "1000" or "release"
    iter_0001000/mp_rank_{tp:02d}[_{pp:03d}]/model_optim_rng.pt
        {"args": argparse.Namespace, "checkpoint_version": 3.0, "iteration": 1000, "model": {...}, "optimizer": ...}

With virtual pipeline stages there are "model0", "model1" ... Layers are numbered from 0 in each of them. The order of
the rows of query, key and value depends on the version; except in the oldest, a rank has one contiguous range of rows:

    checkpoint_version 0     q of the rank's heads, their k, their v
    1.0                      for each head and each of its rows: q, k, v
    2.0, 3.0                 for each head or group: its queries, k, v

Source: https://github.com/NVIDIA/Megatron-LM, megatron/training/checkpointing.py, tools/checkpoint/schema_core.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.checkpoint.directory import TRACKER_FILE, write_durably
from megatron_lite.checkpoint.layout import iteration_folder
from megatron_lite.checkpoint.tensor_file import Spec, regular_file, save_errors
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.megatron_args import args_for, check_model, fields_of, padded_rows
from megatron_lite.convert.megatron_model import LAYER, model_from
from megatron_lite.convert.rank_files import ShardedTensor, check_one_save, sharded_tensors, write_shards
from megatron_lite.convert.recipe import (
    HEAD,
    VOCABULARY_TABLES,
    Checkpoint,
    Progress,
    Recipe,
    check_names,
    full_table,
    stored_iteration,
)
from megatron_lite.convert.torch_file import TorchFile, TorchWriter, flatten
from megatron_lite.errors import CheckpointError
from megatron_lite.files import read_file
from megatron_lite.model.ends import WORD_EMBEDDINGS
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamTable, Shard
from megatron_lite.text import listed

VERSIONS = (0, 1.0, 2.0, 3.0)
WRITTEN_VERSION = 3.0
OLD_QKV = (".query_key_value.weight", ".query_key_value.bias")
CHUNK = re.compile(r"model\d*")

# Patterns of old names -> megatron-core's names, which are ours.
SPELLINGS = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^language_model\.", ""),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"\.(self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.final_norm\.", ".final_layernorm."),
        # TransformerEngine's linear layers contain the norm in front of them.
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    )
]


def recognise(path: Path) -> bool:
    """Whether `path` is a folder of ranks' files, or contains one."""
    try:
        return bool(_rank_files(_folder(path)))
    except (CheckpointError, OSError):
        return False


def grid_of(path: Path) -> Grid:
    """The grid of the ranks that have files."""
    files = _rank_files(_folder(path))
    return Grid(tp=len(files[0]), pp=len(files))


def read(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """The model of a checkpoint of any tensor- and pipeline-parallel size."""
    folder = _folder(path)
    stages = [[TorchFile(file) for file in files] for files in _rank_files(folder)]
    content = stages[0][0].content
    if not isinstance(content, dict):
        raise CheckpointError(f"{stages[0][0].path}: is not a dict, so it is not of Megatron-LM; give its folder")
    version = content.get("checkpoint_version", 0)
    if version not in VERSIONS:
        raise CheckpointError(f"{folder}: checkpoint_version is {version!r}; expected one of {VERSIONS}")
    if not any(name.endswith(OLD_QKV) for name in flatten(content.get("model", content.get("model0")), folder)):
        version = WRITTEN_VERSION  # like Megatron-LM: only tensors of the old names have the old orders of rows
    tensors = _all_tensors(folder, stages)
    pipelined = len(stages) > 1 or "model" not in content
    args = _args(folder, content, tensor=len(stages[0]), pipeline=len(stages))
    model, notes = model_from(folder, tensors, args, overrides, pipelined=pipelined)
    check_one_save([file for files in stages for file in files], _facts)
    if model.tie_embeddings and pipelined and (copy := tensors.pop(HEAD, None)):
        _check_copy(copy, tensors[WORD_EMBEDDINGS])
    table = full_table(model)
    rows = tensors[WORD_EMBEDDINGS].shape(Shard(0))[0]
    recipes = {name: recipe(name, table, model, folder, version, rows) for name in table}
    shards = {name: recipe.shards[0] for name, recipe in recipes.items()}
    check_names(
        folder, recipes, table, {name: sharded.shape(shards.get(name, Shard())) for name, sharded in tensors.items()}
    )

    def read_tensor(name: str) -> Tensor:
        if name in VOCABULARY_TABLES:
            return tensors[name].join(Shard(0), rows=model.padded_vocab)
        return recipes[name].join([tensors[name].join(shards[name])])

    iteration = 0 if folder.name == "release" else stored_iteration(_iteration(content))
    notes = notes + (["its optimizer state is left out"] if content.get("optimizer") else [])
    if re.fullmatch("iter_[0-9]+", folder.name) and iteration not in (0, int(folder.name[5:])):
        notes = [*notes, f"{folder.name} has files of iteration {iteration}, which the target is named by"]
    return Checkpoint(
        model=model,
        tensors={name: Spec(tensors[name].dtype, table[name].shape) for name in table},
        read=read_tensor,
        iteration=iteration,
        notes=notes,
    )


def _iteration(content: Mapping[str, Any]) -> Any:
    return content.get("iteration", content.get("total_iters"))


def _facts(file: TorchFile) -> dict[str, Any]:
    """What all files of a save have in common."""
    args = file.content.get("args")
    return {
        "iteration": _iteration(file.content),
        "checkpoint_version": file.content.get("checkpoint_version", 0),
        "the models": ", ".join(sorted(str(key) for key in file.content if CHUNK.fullmatch(str(key)))),
        **(fields_of(args, file.path) if isinstance(args, dict) else {}),
    }


def write(path: Path, checkpoint: Checkpoint, *, tensor: int, pipeline: int, progress: Progress) -> None:
    """Write iter_XXXXXXX/, or release/ for a checkpoint without an iteration, and the tracker into the folder."""
    model = checkpoint.model
    check_model(model, tensor, pipeline)
    table = full_table(model)
    rows = padded_rows(model.vocab_size, tensor)
    folder = path / (iteration_folder(checkpoint.iteration) if checkpoint.iteration else "release")
    dtypes = {name: spec.dtype for name, spec in checkpoint.tensors.items()}
    content = {
        "args": args_for(
            model, tensor=tensor, pipeline=pipeline, iteration=checkpoint.iteration, dtype=dtypes[WORD_EMBEDDINGS]
        ),
        "checkpoint_version": WRITTEN_VERSION,
        "iteration": checkpoint.iteration,
    }
    for stage in range(pipeline):
        names = _stage_names(model, table, stage, pipeline)
        recipes = {theirs: recipe(ours, table, model, folder, WRITTEN_VERSION, rows) for theirs, ours in names.items()}
        tensors = {}
        for theirs, ours in names.items():
            (shape,) = recipes[theirs].foreign_shapes(table[ours].shape)
            tensors[theirs] = torch.empty(recipes[theirs].shards[0].local_shape(shape, tensor), dtype=dtypes[ours])
        with ExitStack() as stack:
            writers = []
            for rank in range(tensor):
                place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
                with save_errors("creating the folder", place):
                    place.mkdir(parents=True)
                writer = TorchWriter(place / "model_optim_rng.pt", {**content, "model": tensors})
                writers.append(stack.enter_context(writer))
            for theirs, ours in names.items():
                resized = ours in VOCABULARY_TABLES
                write_shards(
                    writers,
                    f"model.{theirs}",
                    checkpoint.read(ours) if resized else recipes[theirs].split(checkpoint.read(ours))[0],
                    recipes[theirs].shards[0],
                    progress=progress,
                    rows=rows if resized else None,
                )
            for writer in writers:
                writer.close()
    write_durably(path / TRACKER_FILE, (str(checkpoint.iteration) if checkpoint.iteration else "release").encode())


def tracked_folder(path: Path) -> Path:
    """The folder that the tracker file of a run names."""
    try:
        text = read_file(path / TRACKER_FILE).decode(errors="replace").strip()
    except OSError:
        raise CheckpointError(
            f"{path}: has neither {TRACKER_FILE} nor mp_rank_XX folders; give the folder that Megatron-LM saved to"
        ) from None
    if not re.fullmatch("release|[0-9]{1,15}", text):
        raise CheckpointError(f"{path / TRACKER_FILE}: has {text[:40]!r}; expected an iteration or release")
    return path / (text if text == "release" else iteration_folder(int(text)))


def _folder(path: Path) -> Path:
    """The folder that contains the ranks' folders."""
    if any(path.glob("mp_rank_*")):
        return path
    folder = tracked_folder(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path / TRACKER_FILE}: names {folder.name}, which is missing")
    if (folder / ".metadata").exists() or (folder / "metadata.json").exists():
        raise CheckpointError(f"{folder}: is of --ckpt-format torch_dist; give --from torch_dist, or leave out --from")
    return folder


def _args(folder: Path, content: Mapping[str, Any], *, tensor: int, pipeline: int) -> Mapping[str, Any]:
    """The saved arguments, checked against the number of ranks; empty if there are none."""
    args = content.get("args")
    args = args if isinstance(args, dict) else {}
    for name, found in (("tensor_model_parallel_size", tensor), ("pipeline_model_parallel_size", pipeline)):
        if args.get(name) not in (None, found):
            raise CheckpointError(
                f"{folder}: its arguments have {name} {args[name]}, but files of {found} are here; all are needed"
            )
    return args


def _rank_files(folder: Path) -> list[list[Path]]:
    """The files of each pipeline stage, one for each tensor-parallel rank."""
    found = {}
    for place in folder.glob("mp_rank_*"):
        files = [name for name in ("model_optim_rng.pt", "model_rng.pt") if (place / name).exists()]
        if not files and (place / "optim.pt").exists():  # a data-parallel rank's, of Megatron-LM of 2022
            continue
        match = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3}))?(_\d{3})?", place.name)
        if match is None or match[3]:
            raise CheckpointError(f"{place}: is not named mp_rank_XX or mp_rank_XX_YYY; experts are not supported")
        name = f"{place.name}/{(files or ['model_optim_rng.pt'])[0]}"
        found[int(match[2] or 0), int(match[1])] = regular_file(folder, name)
    if not found:
        raise CheckpointError(f"{folder}: has no mp_rank_XX folders; only --ckpt-format torch is supported")
    stages, ranks = (1 + max(ranks) for ranks in zip(*found, strict=True))
    if count := stages * ranks - len(found):  # a folder can have any number, and so many are not listed
        places = ((pp, tp) for pp in range(stages) for tp in range(ranks))
        first = [*islice((f"mp_rank_{tp:02d}_{pp:03d}" for pp, tp in places if (pp, tp) not in found), 4)]
        missing = listed(first) if count == len(first) else f"{', '.join(first)} and {count - len(first):,} more"
        raise CheckpointError(
            f"{folder}: lacks {missing} of {ranks} tensor-parallel x {stages} pipeline ranks; all are needed"
        )
    return [[found[pp, tp] for tp in range(ranks)] for pp in range(stages)]


def core_name(theirs: str) -> str:
    """The name of megatron-core for a tensor, which is ours."""
    for pattern, spelling in SPELLINGS:
        theirs = pattern.sub(spelling, theirs)
    return theirs


def _all_tensors(folder: Path, stages: Sequence[Sequence[TorchFile]]) -> dict[str, ShardedTensor]:
    """Every tensor by our name, with layers numbered through the model."""
    tensors: dict[str, ShardedTensor] = {}
    first_layer = 0
    for files, key in _chunks(folder, stages):
        layers = 0
        for theirs, sharded in sharded_tensors(files, [file.content.get(key) for file in files]).items():
            if theirs.endswith("_extra_state"):  # TransformerEngine's fp8 state
                continue
            name = core_name(theirs)
            if match := LAYER.match(name):
                layers = max(layers, 1 + int(match[1]))
                name = f"decoder.layers.{first_layer + int(match[1])}.{name[match.end() :]}"
            if name in tensors:
                raise CheckpointError(
                    f"{files[0].path}: {theirs} is {name}, which {tensors[name].files[0].path} has too"
                )
            tensors[name] = ShardedTensor(name, sharded.files, sharded.shards)
        first_layer += layers
    if WORD_EMBEDDINGS not in tensors:
        raise CheckpointError(f"{folder}: has no word embeddings in model or model0 of its first stage")
    return tensors


def _check_copy(head: ShardedTensor, embedding: ShardedTensor) -> None:
    """Raise CheckpointError unless the last stage's copy of a tied embedding equals it on every rank."""
    places = zip(head.files, head.shards, embedding.files, embedding.shards, strict=True)
    for file, copy, first_file, original in places:
        if copy.dtype != original.dtype or not torch.equal(copy, original):
            raise CheckpointError(
                f"{file.path}: {HEAD} differs from the tied {WORD_EMBEDDINGS} in {first_file.path}; if they are not "
                "tied, give model.tie_embeddings=false"
            )


def _chunks(folder: Path, stages: Sequence[Sequence[TorchFile]]) -> Iterator[tuple[Sequence[TorchFile], str]]:
    """The chunks of the model in order, each as the files of a stage and its key in them."""
    keys = [key for key in stages[0][0].content if CHUNK.fullmatch(str(key))]
    numbered = [f"model{number}" for number in range(len(keys))]
    keys = ["model"] if keys == ["model"] else numbered
    for key in keys:
        for files in stages:
            for file in files:
                if not isinstance(file.content, dict) or not isinstance(file.content.get(key), dict):
                    raise CheckpointError(f"{file.path}: has no {key}, unlike the other files of {folder}")
            yield files, key


def recipe(name: str, table: ParamTable, model: ModelConfig, where: Path, version: float, rows: int) -> Recipe:
    """The recipe of a parameter: the same name, and for most the same form."""
    if name in VOCABULARY_TABLES:  # only for shapes: values, the largest of all tensors, are resized by shards
        ours = table[name].shape[0]
        return Recipe(
            (name,),
            join=lambda tensors: F.pad(tensors[0], (0, 0, 0, ours - rows)),
            split=lambda tensor: (F.pad(tensor, (0, 0, 0, rows - ours)),),
            shards=(Shard(0),),
        )
    if ".linear_qkv." not in name or version == 0:
        return Recipe((name,), shards=(table[name].shard,))
    if version < 2 and model.query_groups != model.num_heads:
        raise CheckpointError(
            f"{where}: checkpoint_version {version} has no query groups, but the model has {model.query_groups} for "
            f"{model.num_heads} heads"
        )
    paired = partial(_pairs, model=model, version=version)

    def join(tensors: Sequence[Tensor]) -> Tensor:
        stacked = torch.empty_like(tensors[0])
        for ours, theirs in paired(stacked, tensors[0]):
            ours.copy_(theirs)
        return stacked

    def split(stacked: Tensor) -> tuple[Tensor, ...]:
        interleaved = torch.empty_like(stacked)
        for ours, theirs in paired(stacked, interleaved):
            theirs.copy_(ours)
        return (interleaved,)

    return Recipe((name,), join, split, (Shard(0),))


def _pairs(stacked: Tensor, interleaved: Tensor, *, model: ModelConfig, version: float) -> list[tuple[Tensor, Tensor]]:
    """Views of queries, keys and values in our order of rows (stacked) and in Megatron-LM's (interleaved)."""
    groups, size, columns = model.query_groups, model.head_size, stacked.shape[1:]
    parts = stacked.split([model.num_heads * size, groups * size, groups * size])
    query, key, value = (part.view(groups, -1, size, *columns) for part in parts)
    if version < 2:
        theirs = interleaved.view(groups, 1, size, 3, *columns)
        return [(ours, theirs[:, :, :, place]) for place, ours in enumerate((query, key, value))]
    theirs = interleaved.view(groups, -1, size, *columns)
    return [(query, theirs[:, :-2]), (key, theirs[:, -2:-1]), (value, theirs[:, -1:])]


def _stage_names(model: ModelConfig, table: ParamTable, stage: int, pipeline: int) -> dict[str, str]:
    """The names in a stage's file, where layers start at 0 -> our names."""
    share = model.num_layers // pipeline
    names = {}
    for name in table:
        if match := LAYER.match(name):
            if int(match[1]) // share == stage:
                names[f"decoder.layers.{int(match[1]) % share}.{name[match.end() :]}"] = name
        elif stage == (0 if name.startswith("embedding.") else pipeline - 1):
            names[name] = name
    if model.tie_embeddings and 0 < stage == pipeline - 1:
        names[HEAD] = WORD_EMBEDDINGS
    return names
