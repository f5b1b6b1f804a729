"""CodeGeeX's released files: one file, or one for each tensor-parallel rank.

    codegeex_13b.pt                     {"module": {"language_model": ...}}, with or without "module"
    mp_rank_{tp:02d}_model_states.pt    the same, sharded; DeepSpeed's training checkpoints have this form too

Query, key and value are three matrices, or one stack of the three. Shards are contiguous everywhere. The position
queries, which our model replicates, are sharded by position.
Source: https://github.com/THUDM/CodeGeeX, codegeex/megatron/{model,convert_ckpt_parallel.py,get_ckpt_qkv.py}.
"""

import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.tensor_file import Spec, regular_file
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.rank_files import ShardedTensor, check_one_save, model_of, sharded_tensors, write_shards
from megatron_lite.convert.recipe import Checkpoint, Progress, Recipe, check_names, full_table, stored_iteration
from megatron_lite.convert.torch_file import TorchFile, TorchWriter
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.parallel.shard import ParamTable, Shard

# The fields of every CodeGeeX model; only sizes vary.
KINDS: dict[str, Any] = {
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "quick_gelu",
    "position": "learned",
    "bias": True,
    "tie_embeddings": True,
    "top_query_layer": True,
    "post_norm": False,
    "fp32_residual": False,
}
HEADS = {5120: 40}  # hidden size -> heads of the released model
VOCABULARY = {52224: 50400}  # rows -> tokens of the released model

EMBEDDING = "language_model.embedding."
TRANSFORMER = "language_model.transformer."
TOP_QUERY = "language_model.topQueryEmbedding.top_query_embeddings.weight"
MODULES = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_q": "attention.query",
    "self_attention.linear_proj": "attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
# Our matrix -> their separate matrices, and their stack of them.
STACKED = {
    "self_attention.linear_qkv": (("attention.query", "attention.key", "attention.value"), "attention.query_key_value"),
    "self_attention.linear_kv": (("attention.key", "attention.value"), "attention.key_value"),
}


def recognise(path: Path) -> bool:
    """Whether `path` is a file, or a folder of files, with position queries."""
    try:
        return any("topQueryEmbedding" in found for found in _language_models(TorchFile(_files(path)[0])))
    except (CheckpointError, OSError):
        return False


def read(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """The model in a file, or in a folder of mp_rank_XX_model_states.pt."""
    files = [TorchFile(file) for file in _files(path)]
    tensors = sharded_tensors(files, [{"language_model": _language_model(file)} for file in files])
    check_one_save(files, lambda file: {name: file.content.get(name) for name in ("iteration", "global_steps")})
    model = model_of(path, _fields(path, tensors, overrides))
    table = full_table(model)
    recipes = recipes_for(table, tensors)
    shards = {
        name: shard for recipe in recipes.values() for name, shard in zip(recipe.names, recipe.shards, strict=True)
    }
    check_names(
        path, recipes, table, {name: sharded.shape(shards.get(name, Shard())) for name, sharded in tensors.items()}
    )

    def read_tensor(name: str) -> Tensor:
        return recipes[name].join([tensors[foreign].join(shards[foreign]) for foreign in recipes[name].names])

    def dtype_of(recipe: Recipe) -> torch.dtype:
        return reduce(torch.promote_types, [tensors[name].dtype for name in recipe.names])

    iteration = files[0].content.get("iteration")
    return Checkpoint(
        model=model,
        tensors={name: Spec(dtype_of(recipe), table[name].shape) for name, recipe in recipes.items()},
        read=read_tensor,
        iteration=stored_iteration(iteration),
        notes=["optimizer state is left out"] if files[0].content.get("optimizer") else [],
    )


def write(path: Path, checkpoint: Checkpoint, *, tensor: int, pipeline: int, progress: Progress) -> None:
    """Write codegeex.pt, or for several ranks mp_rank_XX_model_states.pt, into the folder."""
    _check_model(checkpoint.model, tensor, pipeline)
    table = full_table(checkpoint.model)
    recipes = recipes_for(table, ())
    names = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(tensor)] if tensor > 1 else ["codegeex.pt"]
    module: dict[str, Any] = {}
    for name, recipe in recipes.items():
        shapes = recipe.foreign_shapes(table[name].shape)
        for foreign, shape, shard in zip(recipe.names, shapes, recipe.shards, strict=True):
            *folders, key = _nested(foreign)
            place = module
            for folder in folders:
                place = place.setdefault(folder, {})
            place[key] = torch.empty(shard.local_shape(shape, tensor), dtype=checkpoint.tensors[name].dtype)
    with ExitStack() as stack:
        writers = [stack.enter_context(TorchWriter(path / name, {"module": module})) for name in names]

        def write_tensor(name: str, recipe: Recipe) -> None:
            tensors = recipe.split(checkpoint.read(name))
            for foreign, full, shard in zip(recipe.names, tensors, recipe.shards, strict=True):
                write_shards(writers, f"module.{foreign}", full, shard, progress=progress)

        for name, recipe in recipes.items():
            write_tensor(name, recipe)
        for writer in writers:
            writer.close()


def _files(path: Path) -> list[Path]:
    """The files of the ranks, in order."""
    if path.is_file():
        return [path]
    ranks = {int(file.name[8:10]): file for file in sorted(path.glob("mp_rank_[0-9][0-9]_model_states.pt"))}
    if missing := [rank for rank in range(max(ranks, default=0)) if rank not in ranks]:
        raise CheckpointError(
            f"{path}: has mp_rank_{max(ranks):02d}_model_states.pt, but rank {missing[0]:02d} is missing; give all"
        )
    files = list(ranks.values()) or sorted(path.glob("*.pt"))
    if not ranks and len(files) != 1:
        raise CheckpointError(
            f"{path}: has no mp_rank_XX_model_states.pt, and not one .pt file; give the file, or the folder of the "
            "ranks' files"
        )
    return [regular_file(path, file.name) for file in files]


def _language_models(file: TorchFile) -> list[Mapping[str, Any]]:
    """The tensors at the top and in `module`, where they are."""
    root = file.content if isinstance(file.content, dict) else {}
    places = [place.get("language_model") for place in (root, root.get("module")) if isinstance(place, dict)]
    return [place for place in places if isinstance(place, dict)]


def _language_model(file: TorchFile) -> Mapping[str, Any]:
    found = _language_models(file)
    if not found:
        raise CheckpointError(f"{file.path}: has no language_model at its top or in module; give a file of CodeGeeX")
    if len(found) > 1:
        raise CheckpointError(f"{file.path}: has language_model at its top and in module; save one of them alone")
    return found[0]


def _fields(path: Path, tensors: Mapping[str, ShardedTensor], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the model section: sizes from shapes, the rest from KINDS."""
    try:
        rows, hidden_size = tensors[EMBEDDING + "word_embeddings.weight"].shape(Shard(0))
        positions, _ = tensors[EMBEDDING + "position_embeddings.weight"].shape(Shard())
        layers = {
            int(match[1]) for name in tensors if (match := re.match(re.escape(TRANSFORMER) + r"layers\.(\d+)\.", name))
        }
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: has no embedding tables and layers like CodeGeeX's ({error})") from None
    if hidden_size not in HEADS and "num_heads" not in overrides:
        raise CheckpointError(
            f"{path}: hidden size {hidden_size} is not that of the released model, and the number of heads is not in "
            "the file; give model.num_heads"
        )
    return {
        **KINDS,
        "mlp_dropout": False,
        "num_layers": len(layers),
        "hidden_size": hidden_size,
        "num_heads": HEADS.get(hidden_size),
        "max_position_embeddings": positions,
        "vocab_size": VOCABULARY.get(rows, rows),
        "padded_vocab_size": rows,
        **overrides,
    }


def recipes_for(table: ParamTable, found: Collection[str]) -> dict[str, Recipe]:
    """The recipe of each of our parameters; `found` decides between separate matrices and a stack."""
    return {name: _recipe(name, table, found) for name in table}


def _recipe(name: str, table: ParamTable, found: Collection[str]) -> Recipe:
    if name == "top_query_embeddings.weight":
        return Recipe((TOP_QUERY,), shards=(Shard(0),))
    if not name.startswith("decoder."):
        return Recipe((f"language_model.{name}",), shards=(table[name].shard,))
    place, module, end = _parts(name)
    if module not in STACKED:
        return Recipe((f"{TRANSFORMER}{place}{MODULES.get(module, module)}.{end}",), shards=(table[name].shard,))
    separate, stack = STACKED[module]
    if f"{TRANSFORMER}{place}{stack}.{end}" in found:
        return Recipe((f"{TRANSFORMER}{place}{stack}.{end}",), shards=(table[name].shard,))
    return Recipe(
        tuple(f"{TRANSFORMER}{place}{part}.{end}" for part in separate),
        join=lambda tensors: torch.cat(list(tensors)),
        split=lambda tensor: tensor.chunk(len(separate)),
        shards=(Shard(0),) * len(separate),
    )


def _parts(name: str) -> tuple[str, str, str]:
    """The parts of a name: `layers.3.`, `mlp.linear_fc1` and `bias` of `decoder.layers.3.mlp.linear_fc1.bias`."""
    match = re.fullmatch(r"decoder\.(layers\.\d+\.|top_query_layer\.|)(.+)\.(weight|bias)", name)
    assert match, name
    return match[1].replace("top_query_layer", "topQueryLayer"), match[2], match[3]


def _nested(name: str) -> list[str]:
    """The keys of the nested dicts around a tensor; inside the transformer, dots are part of the key."""
    if name.startswith(TRANSFORMER):
        return ["language_model", "transformer", name.removeprefix(TRANSFORMER)]
    return name.split(".")


def _check_model(model: ModelConfig, tensor: int, pipeline: int) -> None:
    """Raise ConfigError unless CodeGeeX's code can run the model on so many ranks."""
    expected = {
        **KINDS,
        "query_groups": model.num_heads,
        "head_size": model.hidden_size / model.num_heads,
        "ffn_size": 4 * model.hidden_size,
    }
    others = [
        f"model.{field} is {getattr(model, field)}" for field in expected if getattr(model, field) != expected[field]
    ]
    if others:
        raise ConfigError(f"CodeGeeX's format cannot hold this model: {', '.join(others)}; choose another format")
    if pipeline != 1:
        raise ConfigError(
            f"pipeline is {pipeline}, but CodeGeeX's code has no pipeline stages; use 1, and tensor for more ranks"
        )
    sizes = (model.num_heads, model.padded_vocab, model.max_position_embeddings)
    if any(size % tensor for size in sizes):
        fitting = [n for n in range(1, model.num_heads + 1) if not any(size % n for size in sizes)]
        raise ConfigError(
            f"tensor is {tensor}, which does not divide heads, rows of vocabulary and positions {sizes}; use one of "
            f"{fitting}"
        )
