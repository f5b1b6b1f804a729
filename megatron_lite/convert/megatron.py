"""Megatron-LM's checkpoints (`--ckpt-format torch`), of all its times: nested names and megatron-core's.

    latest_checkpointed_iteration.txt     "1000" or "release"
    iter_0001000/mp_rank_{tp:02d}[_{pp:03d}]/model_optim_rng.pt
        {"args": argparse.Namespace, "checkpoint_version": 3.0, "iteration": 1000, "model": {...}, "optimizer": ...}

With virtual pipeline stages there are "model0", "model1" ... Layers are numbered from 0 in each of them. The rows of
query, key and value have had three orders; in all of them a rank's rows are one run, but in the oldest:

    checkpoint_version 0     q of the rank's heads, their k, their v
    1.0                      of each head, of each of its numbers: q, k, v
    2.0, 3.0                 of each head or group: its queries, k, v

Source: https://github.com/NVIDIA/Megatron-LM, megatron/training/checkpointing.py, tools/checkpoint/schema_core.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.checkpoint.directory import TRACKER_FILE, write_durably
from megatron_lite.checkpoint.layout import iteration_folder
from megatron_lite.checkpoint.tensor_file import Spec, explained
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.megatron_args import args_for, check_model, padded_rows
from megatron_lite.convert.megatron_model import LAYER, model_from
from megatron_lite.convert.rank_files import Progress, ShardedTensor, sharded_tensors, write_shards
from megatron_lite.convert.recipe import HEAD, VOCABULARY_TABLES, Checkpoint, Recipe, check_names, full_table
from megatron_lite.convert.torch_file import TorchFile, TorchWriter
from megatron_lite.errors import CheckpointError
from megatron_lite.model.gpt import WORD_EMBEDDINGS
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamTable, Shard
from megatron_lite.text import listed

VERSIONS = (0, 1.0, 2.0, 3.0)
WRITTEN_VERSION = 3.0

# Every spelling there was -> megatron-core's, which is ours.
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
        # TransformerEngine's layers have the norm before them inside.
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    )
]


def recognise(path: Path) -> bool:
    """A folder of ranks' files, or one that has it."""
    try:
        return bool(_rank_files(_folder(path)))
    except (CheckpointError, OSError):
        return False


def grid_of(path: Path) -> Grid:
    """The ranks that have files."""
    files = _rank_files(_folder(path))
    return Grid(tp=len(files[0]), pp=len(files))


def read(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """The model of a checkpoint of any tensor- and pipeline-parallel size."""
    folder = _folder(path)
    stages = [[TorchFile(file) for file in files] for files in _rank_files(folder)]
    content = stages[0][0].content
    if not isinstance(content, dict):
        raise CheckpointError(f"{stages[0][0].path}: holds no dict, so Megatron-LM has not written it")
    version = content.get("checkpoint_version", 0)
    if version not in VERSIONS:
        raise CheckpointError(f"{folder}: its checkpoint_version is {version!r}, known are {VERSIONS}")
    cuts = _all_cuts(folder, stages)
    pipelined = len(stages) > 1 or "model" not in content
    args = _args(folder, content, tensor=len(stages[0]), pipeline=len(stages))
    model, notes = model_from(folder, cuts, args, overrides, pipelined=pipelined)
    if model.tie_embeddings and pipelined and (copy := cuts.pop(HEAD, None)):
        _check_copy(copy, cuts[WORD_EMBEDDINGS])
    table = full_table(model)
    rows = cuts[WORD_EMBEDDINGS].shape(Shard(0))[0]
    recipes = {name: _recipe(name, table, model, folder, version, rows) for name in table}
    shards = {name: recipe.shards[0] for name, recipe in recipes.items()}
    check_names(folder, recipes, table, {name: cut.shape(shards.get(name, Shard())) for name, cut in cuts.items()})

    def read_tensor(name: str) -> Tensor:
        if name in VOCABULARY_TABLES:
            return cuts[name].join(Shard(0), rows=model.padded_vocab)
        return recipes[name].join([cuts[name].join(shards[name])])

    iteration = content.get("iteration", content.get("total_iters"))
    return Checkpoint(
        model=model,
        tensors={name: Spec(cuts[name].dtype, table[name].shape) for name in table},
        read=read_tensor,
        iteration=iteration if type(iteration) is int and iteration > 0 and folder.name != "release" else 0,
        notes=notes + (["its optimizer state is left out"] if content.get("optimizer") else []),
    )


def write(path: Path, checkpoint: Checkpoint, *, tensor: int, pipeline: int, progress: Progress) -> None:
    """Writes iter_XXXXXXX/, or release/ for what was not trained here, and the tracker into the folder."""
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
        recipes = {theirs: _recipe(ours, table, model, folder, WRITTEN_VERSION, rows) for theirs, ours in names.items()}
        tensors = {}
        for theirs, ours in names.items():
            (shape,) = recipes[theirs].foreign_shapes(table[ours].shape)
            tensors[theirs] = torch.empty(recipes[theirs].shards[0].local_shape(shape, tensor), dtype=dtypes[ours])
        with ExitStack() as stack:
            writers = []
            for rank in range(tensor):
                place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
                with explained("creating the folder", place):
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


def _folder(path: Path) -> Path:
    """The folder with the ranks' folders in it."""
    if any(path.glob("mp_rank_*")):
        return path
    try:
        text = (path / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        raise CheckpointError(
            f"{path}: has neither {TRACKER_FILE} nor mp_rank_XX folders; give the folder that Megatron-LM saved to"
        ) from None
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{path / TRACKER_FILE}: says {text[:40]!r}, which is neither an iteration nor release")
    folder = path / (text if text == "release" else iteration_folder(int(text)))
    if not folder.is_dir():
        raise CheckpointError(f"{path / TRACKER_FILE}: names {text}, but {folder.name} is missing")
    if (folder / ".metadata").exists() or (folder / "metadata.json").exists():
        raise CheckpointError(
            f"{folder}: was saved with --ckpt-format torch_dist; let Megatron-LM load it and save it with "
            "--ckpt-convert-format torch first"
        )
    return folder


def _args(folder: Path, content: Mapping[str, Any], *, tensor: int, pipeline: int) -> Mapping[str, Any]:
    """Its arguments, which must be of as many ranks as there are; empty where it has none."""
    args = content.get("args")
    args = args if isinstance(args, dict) else {}
    for name, found in (("tensor_model_parallel_size", tensor), ("pipeline_model_parallel_size", pipeline)):
        if args.get(name) not in (None, found):
            raise CheckpointError(
                f"{folder}: its arguments say that {name} is {args[name]}, but here are {found}; all are needed"
            )
    return args


def _rank_files(folder: Path) -> list[list[Path]]:
    """Each pipeline stage's files, of each tensor-parallel rank."""
    found = {}
    for place in folder.glob("mp_rank_*"):
        files = [name for name in ("model_optim_rng.pt", "model_rng.pt") if (place / name).exists()]
        if not files and (place / "optim.pt").exists():  # of a data-parallel rank, by Megatron-LM of 2022
            continue
        match = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3}))?(_\d{3})?", place.name)
        if match is None or match[3]:
            raise CheckpointError(f"{place}: is not named mp_rank_XX or mp_rank_XX_YYY; expert ranks are not read")
        found[int(match[2] or 0), int(match[1])] = place / (files or ["model_optim_rng.pt"])[0]
    if not found:
        raise CheckpointError(f"{folder}: has no mp_rank_XX folders, so it is not of --ckpt-format torch")
    stages, ranks = (1 + max(numbers) for numbers in zip(*found, strict=True))
    if missing := [
        f"mp_rank_{tp:02d}_{pp:03d}" for pp in range(stages) for tp in range(ranks) if (pp, tp) not in found
    ]:
        raise CheckpointError(
            f"{folder}: has ranks of {ranks} tensor-parallel and {stages} pipeline ranks, but not "
            f"{listed(missing)}; all are needed"
        )
    return [[found[pp, tp] for tp in range(ranks)] for pp in range(stages)]


def _all_cuts(folder: Path, stages: Sequence[Sequence[TorchFile]]) -> dict[str, ShardedTensor]:
    """Every tensor by our name, layers numbered through the model."""
    cuts: dict[str, ShardedTensor] = {}
    first_layer = 0
    for files, key in _chunks(folder, stages):
        layers = 0
        for theirs, cut in sharded_tensors(files, [file.content.get(key) for file in files]).items():
            if theirs.endswith("_extra_state"):  # TransformerEngine's, of fp8
                continue
            name = theirs
            for pattern, spelling in SPELLINGS:
                name = pattern.sub(spelling, name)
            if match := LAYER.match(name):
                layers = max(layers, 1 + int(match[1]))
                name = f"decoder.layers.{first_layer + int(match[1])}.{name[match.end() :]}"
            if name in cuts:
                raise CheckpointError(
                    f"{files[0].path}: has {theirs}, which is {name}, but so has {cuts[name].files[0].path}"
                )
            cuts[name] = ShardedTensor(name, cut.files, cut.shards)
        first_layer += layers
    if WORD_EMBEDDINGS not in cuts:
        raise CheckpointError(f"{folder}: has no word embeddings in model or model0 of its first stage")
    return cuts


def _check_copy(head: ShardedTensor, embedding: ShardedTensor) -> None:
    """The last stage's copy of a tied embedding is one, on every tensor-parallel rank."""
    places = zip(head.files, head.shards, embedding.files, embedding.shards, strict=True)
    for file, copy, first_file, original in places:
        if copy.dtype != original.dtype or not torch.equal(copy, original):
            raise CheckpointError(
                f"{file.path}: {HEAD} differs from {WORD_EMBEDDINGS} in {first_file.path}, although they are tied; if "
                "the head is its own, give model.tie_embeddings=false"
            )


def _chunks(folder: Path, stages: Sequence[Sequence[TorchFile]]) -> Iterator[tuple[Sequence[TorchFile], str]]:
    """The parts of the model in order, as files of a stage and the key there: stage by stage, then the next chunk."""
    keys = [key for key in stages[0][0].content if re.fullmatch(r"model\d*", str(key))]
    numbered = [f"model{number}" for number in range(len(keys))]
    keys = ["model"] if keys == ["model"] else numbered
    for key in keys:
        for files in stages:
            for file in files:
                if not isinstance(file.content, dict) or not isinstance(file.content.get(key), dict):
                    raise CheckpointError(f"{file.path}: has no {key}, as the others of {folder} have")
            yield files, key


def _recipe(name: str, table: ParamTable, model: ModelConfig, where: Path, version: float, rows: int) -> Recipe:
    """Under the same name, and for most in the same form."""
    if name in VOCABULARY_TABLES:  # where there are values, resized piece by piece: no other tensor is as large
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
            f"{where}: its checkpoint_version is {version}, from before there were groups, but it has "
            f"{model.query_groups} for {model.num_heads} heads"
        )
    paired = partial(_pairs, model=model, version=version)

    def join(tensors: Sequence[Tensor]) -> Tensor:
        together, apart = tensors[0], torch.empty_like(tensors[0])
        for ours, theirs in paired(apart, together):
            ours.copy_(theirs)
        return apart

    def split(apart: Tensor) -> tuple[Tensor, ...]:
        together = torch.empty_like(apart)
        for ours, theirs in paired(apart, together):
            theirs.copy_(ours)
        return (together,)

    return Recipe((name,), join, split, (Shard(0),))


def _pairs(apart: Tensor, together: Tensor, *, model: ModelConfig, version: float) -> list[tuple[Tensor, Tensor]]:
    """Views of the same queries, keys and values in our order of rows, and in Megatron-LM's."""
    groups, size, columns = model.query_groups, model.head_size, apart.shape[1:]
    parts = apart.split([model.num_heads * size, groups * size, groups * size])
    query, key, value = (part.view(groups, -1, size, *columns) for part in parts)
    if version < 2:
        theirs = together.view(groups, 1, size, 3, *columns)
        return [(ours, theirs[:, :, :, place]) for place, ours in enumerate((query, key, value))]
    theirs = together.view(groups, -1, size, *columns)
    return [(query, theirs[:, :-2]), (key, theirs[:, -2:-1]), (value, theirs[:, -1:])]


def _stage_names(model: ModelConfig, table: ParamTable, stage: int, pipeline: int) -> dict[str, str]:
    """The names in a stage's file, where layers start at 0, and ours."""
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
