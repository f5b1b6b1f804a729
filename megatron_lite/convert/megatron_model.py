"""The model section that a checkpoint of Megatron-LM amounts to, from all that tells something of it.

Tensors' shapes tell the sizes, but not what is computed with them; the arguments tell most of it, where there are any;
the user knows the rest. Where shapes and the others disagree, nothing is right.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.megatron_args import DIVISIBLE_BY, fields_of, padded_rows
from megatron_lite.convert.rank_files import ShardedTensor, model_of
from megatron_lite.convert.recipe import HEAD
from megatron_lite.errors import CheckpointError
from megatron_lite.model.gpt import WORD_EMBEDDINGS
from megatron_lite.parallel.shard import Shard
from megatron_lite.text import listed

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def model_from(
    folder: Path,
    cuts: Mapping[str, ShardedTensor],
    args: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    pipelined: bool,
) -> tuple[ModelConfig, list[str]]:
    """The model section, from what was given, the arguments and the tensors' shapes; and what to know about it."""
    rows = cuts[WORD_EMBEDDINGS].shape(Shard(0))[0]
    told = fields_of(args, folder)
    fields = {**_fields_of_shapes(cuts, pipelined), **told, **overrides}
    if args.get("padded_vocab_size") not in (None, rows):
        raise CheckpointError(
            f"{folder}: its arguments say {args['padded_vocab_size']} rows of vocabulary, its tensors have {rows}; "
            "tensor-parallel ranks are missing, or of another checkpoint"
        )
    needed = ["num_heads", "activation", "norm_eps", "max_position_embeddings", "tie_embeddings"]
    needed += ["rotary_base"] if fields["position"] == "rotary" else []
    if missing := [f"model.{name}" for name in needed if name not in fields]:
        raise CheckpointError(
            f"{folder}: neither its arguments nor its tensors tell {', '.join(missing)}; give them as for the training"
        )
    notes = []
    if not fields.get("vocab_size"):
        fields["vocab_size"] = rows
        notes.append(f"model.vocab_size was not given and is all {rows} rows, padding included")
    if not args:
        notes.append("it has no arguments; sizes are from its tensors, the rest as given or by default")
    model = model_of(folder, fields)
    _check_sizes(folder, model, cuts)
    if model.vocab_size > rows:
        raise CheckpointError(
            f"{folder}: model.vocab_size is {model.vocab_size}, but its tensors have {rows} rows; give the right one"
        )
    said = told.get("vocab_size", model.vocab_size)
    divisible_by = args.get("make_vocab_size_divisible_by") or DIVISIBLE_BY
    tensor = len(cuts[WORD_EMBEDDINGS].shards)
    # Megatron-LM takes most tokenizers' sizes from their files, and whatever --vocab-size says stays unused.
    if "vocab_size" not in overrides and rows not in (said, padded_rows(said, tensor, divisible_by)):
        raise CheckpointError(
            f"{folder}: its arguments say that vocab_size is {said}, which is not padded to the {rows} rows of its "
            f"tensors (by {divisible_by} x {tensor} ranks); give model.vocab_size, that of the tokenizer"
        )
    if said != model.vocab_size:
        notes.append(f"model.vocab_size is {model.vocab_size} as given, its arguments say {said}")
    if rows > model.padded_vocab:
        notes.append(f"{rows - model.padded_vocab} of its {rows} rows of vocabulary are left out as padding")
    return model, notes


def _check_sizes(folder: Path, model: ModelConfig, cuts: Mapping[str, ShardedTensor]) -> None:
    """They are the tensors': a model of any other size may be too large to even describe."""
    told = _fields_of_shapes(cuts, pipelined=True)
    sizes = {"num_layers": model.num_layers, "hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_size}
    if model.position == "learned":
        sizes["max_position_embeddings"] = model.max_position_embeddings
    problems = [
        f"model.{name} is {size}, not {told[name]}" for name, size in sizes.items() if told.get(name, size) != size
    ]
    attention = {
        "linear_proj": (Shard(1), -1, model.num_heads),
        "linear_qkv": (Shard(0), 0, model.num_heads + 2 * model.query_groups),
    }
    for module, (shard, dim, heads) in attention.items():
        cut = cuts.get(f"decoder.layers.0.self_attention.{module}.weight")
        if cut and cut.shape(shard)[dim] != heads * model.head_size:
            problems.append(
                f"model.num_heads {model.num_heads}, num_query_groups {model.query_groups} and head_dim "
                f"{model.head_size} do not make the {cut.shape(shard)[dim]} rows or columns of {module}"
            )
    if problems:
        raise CheckpointError(f"{folder}: its arguments, or what was given, do not fit its tensors; {listed(problems)}")


def _fields_of_shapes(cuts: Mapping[str, ShardedTensor], pipelined: bool) -> dict[str, Any]:
    """What tensors tell of the model section."""
    layers = {match[1] for name in cuts if (match := LAYER.match(name))}
    fields: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden_size": cuts[WORD_EMBEDDINGS].shape(Shard(0))[-1],
        "norm": "layernorm" if "decoder.final_layernorm.bias" in cuts else "rmsnorm",
        "bias": "decoder.layers.0.mlp.linear_fc1.bias" in cuts,
        "position": "rotary",
    }
    if "embedding.position_embeddings.weight" in cuts:
        positions = cuts["embedding.position_embeddings.weight"].shape(Shard())[0]
        fields |= {"position": "learned", "max_position_embeddings": positions}
    if HEAD not in cuts or not pipelined:
        fields["tie_embeddings"] = HEAD not in cuts
    up, down = (cuts.get(f"decoder.layers.0.mlp.linear_{name}.weight") for name in ("fc1", "fc2"))
    if up and down:
        fields["ffn_hidden_size"] = down.shape(Shard(1))[-1]
        if up.shape(Shard(0))[0] == 2 * fields["ffn_hidden_size"]:
            fields["activation"] = "swiglu"
    return fields
