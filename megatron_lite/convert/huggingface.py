"""Hugging Face's GPT-2 and Llama: config.json, model.safetensors and the tokenizer's files in one folder.

A recipe's `split` gives views of our tensor, one for each of theirs. Reading fills the views from the files in blocks,
so a tensor is in memory once; the vocabulary's padding, which is in no view, stays zero.
GPT-2 stores its matrices as `[in, out]`; Llama has separate matrices for query, key, value, gate and up.
"""

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.directory import write_durably
from megatron_lite.checkpoint.tensor_file import Spec, TensorWriter
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import tokenizer_files
from megatron_lite.convert.huggingface_config import from_model, to_model
from megatron_lite.convert.huggingface_files import (
    INDEX,
    SAFETENSORS,
    HuggingFaceFiles,
    plan_shards,
    read_json,
)
from megatron_lite.convert.recipe import VOCABULARY_TABLES, Checkpoint, Progress, Recipe, check_names, full_table
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.gpt import WORD_EMBEDDINGS
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.plan.sizes import num_parameters

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
SHARD_BYTES = 5_000_000_000  # the largest size of a file
THEIR_HEAD = "lm_head.weight"
EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
# Constants that old versions saved with the weights.
BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")

# Our name -> theirs, both without .weight or .bias at the end.
NAMES = {
    "gpt2": {
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
        "output_layer": "lm_head",
    },
    "llama": {
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.gate_proj mlp.up_proj",
        "mlp.linear_fc2": "mlp.down_proj",
        "output_layer": "lm_head",
    },
}
LAYERS = {"gpt2": "transformer.h.", "llama": "model.layers."}


def recognise(path: Path) -> bool:
    """Whether `path` is a folder with a config.json of Hugging Face."""
    try:
        content = json.loads((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and ("model_type" in content or "architectures" in content)


def recipes(model_type: str, model: ModelConfig, table: ParamTable) -> dict[str, Recipe]:
    """The recipe of each of our parameters; `split` gives views, and `join` is not used."""
    return {name: _recipe(model_type, name, model, table) for name in table}


def _recipe(model_type: str, name: str, model: ModelConfig, table: ParamTable) -> Recipe:
    ours, _, kind = name.rpartition(".")
    prefix = ""
    if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", ours):
        prefix, ours = f"{LAYERS[model_type]}{match[1]}.", match[2]
    names = tuple(f"{prefix}{theirs}.{kind}" for theirs in NAMES[model_type][ours].split())
    if name in VOCABULARY_TABLES:
        return Recipe(names, split=lambda tensor: (tensor[: model.vocab_size],))
    if len(names) > 1:
        return Recipe(names, split=lambda tensor: tensor.split(table[name].shard.parts))
    if model_type == "gpt2" and ours.rpartition(".")[2].startswith("linear") and kind == "weight":
        return Recipe(names, split=lambda tensor: (tensor.t(),))
    return Recipe(names, split=lambda tensor: (tensor,))


def read(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """The model in a folder."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not a folder; give the one of {CONFIG_FILE} and the weights")
    model_type, model = to_model(path / CONFIG_FILE, read_json(path / CONFIG_FILE), overrides)
    files = HuggingFaceFiles(path)
    found = {_full_name(model_type, name): name for name in files.specs if not BUFFERS.fullmatch(name)}
    kept = set(found.values())
    if twice := [name for name in files.specs if not BUFFERS.fullmatch(name) and name not in kept]:
        other = found[_full_name(model_type, twice[0])]
        raise CheckpointError(f"{path}: has both {twice[0]} and {other}; remove one of them")
    stored = sum(prod(files.specs[name].shape) for name in found.values())
    # A model of wrong sizes could be too large to build, even without memory.
    if num_parameters(model) > 2 * stored:
        raise CheckpointError(
            f"{path}: {CONFIG_FILE} describes {num_parameters(model):,} parameters, the files hold {stored:,}"
        )
    table = full_table(model)
    ours = recipes(model_type, model, table)
    shapes = {name: tuple(files.specs[theirs].shape) for name, theirs in found.items()}
    embedding = EMBEDDING[model_type]
    tied_head = model.tie_embeddings and shapes.get(THEIR_HEAD) == shapes.get(embedding)
    check_names(
        path, ours, table, {name: shape for name, shape in shapes.items() if not tied_head or name != THEIR_HEAD}
    )
    if tied_head and THEIR_HEAD in found:
        _check_equal(path, files, found[THEIR_HEAD], found[embedding])

    def dtype_of(name: str) -> torch.dtype:
        dtypes = [files.specs[found[theirs]].dtype for theirs in ours[name].names]
        return dtypes[0] if len(set(dtypes)) == 1 else torch.float32

    tensors = {name: Spec(dtype_of(name), meta.shape) for name, meta in table.items()}

    def read_tensor(name: str) -> Tensor:
        full = torch.zeros(tuple(tensors[name].shape), dtype=tensors[name].dtype)
        for view, theirs in zip(ours[name].split(full), ours[name].names, strict=True):
            files.fill(view, found[theirs])
        return full

    notes = []
    if rows := model.padded_vocab - model.vocab_size:
        notes.append(f"the vocabulary of {model.vocab_size:,} is padded with {rows:,} rows of zeros")
    tokenizer = tokenizer_files.files_in(path)
    if tokenizer and not tokenizer_files.readable(tokenizer_files.spec_in(path), model.vocab_size):
        notes.append(f"the tokenizer is copied, but megatron_lite cannot read it for {model.vocab_size:,} tokens")
    return Checkpoint(model, tensors, read_tensor, tokenizer=tokenizer, notes=notes)


def write(
    path: Path,
    checkpoint: Checkpoint,
    *,
    tensor: int,
    pipeline: int,
    progress: Progress,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json, the weights and the tokenizer's files."""
    if (tensor, pipeline) != (1, 1):
        raise ConfigError(
            f"--tensor is {tensor} and --pipeline {pipeline}, but huggingface has no ranks; leave them out"
        )
    content = from_model(checkpoint.model)
    table = full_table(checkpoint.model)
    ours = recipes(content["model_type"], checkpoint.model, table)
    groups = {
        name: {
            theirs: Spec(checkpoint.tensors[name].dtype, shape)
            for theirs, shape in zip(recipe.names, recipe.foreign_shapes(table[name].shape), strict=True)
        }
        for name, recipe in ours.items()
    }
    shards = plan_shards(list(groups.values()), shard_bytes)
    of_theirs = {theirs: name for name, recipe in ours.items() for theirs in recipe.names}
    specs = {theirs: spec for group in groups.values() for theirs, spec in group.items()}
    for file, names in shards.files.items():
        _write_file(path / file, {name: specs[name] for name in names}, of_theirs, ours, checkpoint, progress)
    if len(shards.files) > 1:
        weight_map = {name: file for file, names in shards.files.items() for name in names}
        _write_json(
            path / (SAFETENSORS + INDEX), {"metadata": {"total_size": shards.total_bytes}, "weight_map": weight_map}
        )
    tokenizer_files.carry(checkpoint.tokenizer, path)
    spec = tokenizer_files.spec_in(path) or checkpoint.tokenizer_spec
    tokenizer = tokenizer_files.readable(spec, checkpoint.model.vocab_size)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eod if tokenizer else None, "pad_token_id": None}
    if not (path / GENERATION_FILE).exists():  # else copied from the source
        _write_json(path / GENERATION_FILE, ends)
    type_name = str(checkpoint.tensors[WORD_EMBEDDINGS].dtype).removeprefix("torch.")
    # The name of version 5 and that of version 4.
    _write_json(path / CONFIG_FILE, {**content, **ends, "dtype": type_name, "torch_dtype": type_name})


def _write_file(
    path: Path,
    specs: Mapping[str, Spec],
    of_theirs: Mapping[str, str],
    ours: Mapping[str, Recipe],
    checkpoint: Checkpoint,
    progress: Progress,
) -> None:
    """Write one file; each of our tensors is read once, because the foreign tensors from it are adjacent."""
    parts: dict[str, Tensor] = {}
    with TensorWriter(path, specs, metadata={"format": "pt"}) as writer:
        for theirs in writer.keys:
            if theirs not in parts:
                name = of_theirs[theirs]
                parts.clear()
                full = checkpoint.read(name)
                parts = dict(zip(ours[name].names, ours[name].split(full), strict=True))
                del full
            writer.add(parts.pop(theirs))
            progress(specs[theirs].dtype.itemsize * prod(specs[theirs].shape))
        writer.close()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps(content, indent=2) + "\n").encode())


def _full_name(model_type: str, name: str) -> str:
    """The name of a tensor in the model with a head; a model without one saves names without the prefix."""
    prefix = EMBEDDING[model_type].partition(".")[0] + "."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _check_equal(path: Path, files: HuggingFaceFiles, head: str, embedding: str) -> None:
    """Raise CheckpointError if a head that is stored although tied differs from the embedding."""
    spec = files.specs[embedding]
    full = torch.empty(tuple(spec.shape), dtype=spec.dtype)
    files.fill(full, embedding)
    if not files.equals(full, head):
        raise CheckpointError(
            f"{path}: {CONFIG_FILE} has tie_word_embeddings, but {head} differs from {embedding}; if untied, "
            "give model.tie_embeddings=false"
        )
