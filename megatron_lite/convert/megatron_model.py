"""The model section of a checkpoint of Megatron-LM, from its tensors, its arguments and the user's settings.

The shapes of tensors give the sizes, the saved arguments most of the computation, the user the rest. A checkpoint whose
shapes contradict the others is an error.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.megatron_args import DIVISIBLE_BY, fields_of, padded_rows
from megatron_lite.convert.rank_files import Shaped, model_of
from megatron_lite.convert.recipe import HEAD
from megatron_lite.errors import CheckpointError
from megatron_lite.model.ends import WORD_EMBEDDINGS
from megatron_lite.parallel.shard import Shard
from megatron_lite.text import listed

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def model_from(
    folder: Path,
    tensors: Mapping[str, Shaped],
    args: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    pipelined: bool,
) -> tuple[ModelConfig, list[str]]:
    """The model section, and notes for the user; `overrides` take precedence over `args`, and those over shapes."""
    rows = tensors[WORD_EMBEDDINGS].shape(Shard(0))[0]
    from_args = fields_of(args, folder)
    fields = {**_fields_of_shapes(tensors, pipelined), **from_args, **overrides}
    if args.get("padded_vocab_size") not in (None, rows):
        raise CheckpointError(
            f"{folder}: its arguments have {args['padded_vocab_size']} rows of vocabulary, its tensors {rows}; "
            "tensor-parallel ranks are missing, or of another checkpoint"
        )
    needed = ["num_heads", "activation", "norm_eps", "max_position_embeddings", "tie_embeddings"]
    needed += ["rotary_base"] if fields["position"] == "rotary" else []
    if missing := [f"model.{name}" for name in needed if name not in fields]:
        raise CheckpointError(
            f"{folder}: neither its arguments nor its tensors have {', '.join(missing)}; give those of the training"
        )
    notes = []
    if not fields.get("vocab_size"):
        fields["vocab_size"] = rows
        notes.append(f"model.vocab_size was not given and is all {rows} rows, padding included")
    if not args:
        notes.append("it has no arguments; sizes are from its tensors, the rest as given or by default")
    model = model_of(folder, fields)
    _check_sizes(folder, model, tensors)
    if model.vocab_size > rows:
        raise CheckpointError(
            f"{folder}: model.vocab_size is {model.vocab_size}, but the tensors have {rows} rows; "
            "give that of the tokenizer"
        )
    vocab_size = from_args.get("vocab_size", model.vocab_size)
    divisible_by = args.get("make_vocab_size_divisible_by") or DIVISIBLE_BY
    tp = len(tensors[WORD_EMBEDDINGS].shards)
    # Megatron-LM takes the size of most tokenizers from their files, and ignores --vocab-size.
    if "vocab_size" not in overrides and rows not in (vocab_size, padded_rows(vocab_size, tp, divisible_by)):
        raise CheckpointError(
            f"{folder}: its arguments have vocab_size {vocab_size}, which padding to {divisible_by} x {tp} ranks does "
            f"not make the {rows} rows of its tensors; give model.vocab_size, that of the tokenizer"
        )
    if vocab_size != model.vocab_size:
        notes.append(f"model.vocab_size is {model.vocab_size} as given, its arguments have {vocab_size}")
    if rows > model.padded_vocab:
        notes.append(f"{rows - model.padded_vocab} of its {rows} rows of vocabulary are left out as padding")
    return model, notes


def _check_sizes(folder: Path, model: ModelConfig, tensors: Mapping[str, Shaped]) -> None:
    """Raise CheckpointError unless the sizes are those of the tensors: others could be too large to build a model."""
    from_shapes = _fields_of_shapes(tensors, pipelined=True)
    sizes = {"num_layers": model.num_layers, "hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_size}
    if model.position == "learned":
        sizes["max_position_embeddings"] = model.max_position_embeddings
    problems = [
        f"model.{name} is {size}, not {from_shapes[name]}"
        for name, size in sizes.items()
        if from_shapes.get(name, size) != size
    ]
    attention = {
        "linear_proj": (Shard(1), -1, model.num_heads),
        "linear_qkv": (Shard(0), 0, model.num_heads + 2 * model.query_groups),
    }
    for module, (shard, dim, heads) in attention.items():
        weight = tensors.get(f"decoder.layers.0.self_attention.{module}.weight")
        if weight and weight.shape(shard)[dim] != heads * model.head_size:
            problems.append(
                f"model.num_heads {model.num_heads}, num_query_groups {model.query_groups} and head_dim "
                f"{model.head_size} do not make the {weight.shape(shard)[dim]} rows or columns of {module}"
            )
    if problems:
        raise CheckpointError(f"{folder}: its arguments or the given fields do not fit its tensors; {listed(problems)}")


def _bias(tensors: Mapping[str, Shaped]) -> bool | str:
    if "decoder.layers.0.mlp.linear_fc1.bias" in tensors:
        return True
    return "qkv" if "decoder.layers.0.self_attention.linear_qkv.bias" in tensors else False


def _fields_of_shapes(tensors: Mapping[str, Shaped], pipelined: bool) -> dict[str, Any]:
    """The fields of the model section that follow from tensors."""
    layers = {match[1] for name in tensors if (match := LAYER.match(name))}
    fields: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden_size": tensors[WORD_EMBEDDINGS].shape(Shard(0))[-1],
        "norm": "layernorm" if "decoder.final_layernorm.bias" in tensors else "rmsnorm",
        "bias": _bias(tensors),
        "position": "rotary",
    }
    if "embedding.position_embeddings.weight" in tensors:
        positions = tensors["embedding.position_embeddings.weight"].shape(Shard())[0]
        fields |= {"position": "learned", "max_position_embeddings": positions}
    if HEAD not in tensors or not pipelined:
        fields["tie_embeddings"] = HEAD not in tensors
    up, down = (tensors.get(f"decoder.layers.0.mlp.linear_{name}.weight") for name in ("fc1", "fc2"))
    if up and down:
        fields["ffn_hidden_size"] = down.shape(Shard(1))[-1]
        if up.shape(Shard(0))[0] == 2 * fields["ffn_hidden_size"]:
            fields["activation"] = "swiglu"
    return fields
