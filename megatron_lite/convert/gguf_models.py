"""What llama.cpp computes: a row for each of its architectures, and the metadata from which it builds a model.

Every field of our model section is written under a key, or has one of the values in the row, or has its default. So a
new field of ours, and a new architecture, is an error until it is listed here.
Source: llama.cpp, src/llama-model.cpp and src/models/, for the keys and the tensors that each architecture reads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint.compatible import DERIVED, NOT_OF_WEIGHTS
from megatron_lite.config.schema import ModelConfig
from megatron_lite.errors import CheckpointError
from megatron_lite.model.rotary import RAMPS, RotaryTable

ANY = None  # in a row: each value of the field is in the file
# Fields that are in the file for each architecture: as a key, or in the shapes and values of tensors.
WRITTEN = {
    *("num_layers", "hidden_size", "num_heads", "num_query_groups", "ffn_hidden_size", "max_position_embeddings"),
    *("vocab_size", "norm_eps", "rotary_base", "rotary_scaling_factor", "rotary_original_positions"),
    "rotary_attention_factor",
}
_NOT_COMPUTED = NOT_OF_WEIGHTS | {"padded_vocab_size", "fp32_residual"}
_SCALINGS = ("none", "linear", "yarn")


@dataclass(frozen=True)
class Architecture:
    """One architecture. `values` has the fields of ours that may, or must, have other values than the default."""

    family: str  # of Hugging Face, with its names of tensors
    values: Mapping[str, tuple[Any, ...] | None]
    interleaved: bool = False  # rotated pairs are neighbours
    tied_head: bool = True  # without a head, llama.cpp takes the embedding


_ROTARY = {"position": ("rotary",), "rotary_scaling": _SCALINGS, "tie_embeddings": ANY}
_LLAMA = {**_ROTARY, "norm": ("rmsnorm",), "activation": ("swiglu",)}
_GPT = {"activation": ("gelu_tanh",), "tie_embeddings": ANY}
# The name in gguf -> what it computes. Of several that compute a model, the first one is written.
ARCHITECTURES = {
    "gpt2": Architecture("gpt2", _GPT),
    "qwen2": Architecture("qwen2", {**_LLAMA, "bias": ("qkv",)}),
    "qwen3": Architecture("qwen3", {**_LLAMA, "bias": (False,), "qk_norm": ("head",), "head_dim": ANY}),
    "olmo2": Architecture(
        "olmo2",
        {**_LLAMA, "bias": (False,), "qk_norm": ("full",), "norm_placement": ("output",)},
        tied_head=False,
    ),
    "starcoder2": Architecture("starcoder2", {**_GPT, **_ROTARY}),
    "llama": Architecture(
        "llama",
        {**_LLAMA, "bias": ANY, "head_dim": ANY, "rotary_scaling": (*_SCALINGS, "llama3"), "rotary_ramp": ANY},
        interleaved=True,
    ),
}


def architecture_of(model: ModelConfig) -> str:
    """The name of the architecture that computes the model; raises CheckpointError if there is none."""
    fields = _compared(model)
    obstacles = {name: _obstacles(row, fields) for name, row in ARCHITECTURES.items()}
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    if obstacles[nearest]:
        raise CheckpointError(
            f"gguf is not written for this model: {'; '.join(obstacles[nearest])} (nearest architecture of llama.cpp: "
            f"{nearest}); use --to huggingface"
        )
    return nearest


def _obstacles(row: Architecture, fields: Mapping[str, Any]) -> list[str]:
    """The fields that llama.cpp would replace by values of its own."""
    found = []
    for name, value in fields.items():
        allowed = row.values.get(name, (ModelConfig.model_fields[name].default,))
        if name not in WRITTEN and allowed is not None and value not in allowed:
            found.append(f"model.{name} is {value}, llama.cpp has {' or '.join(map(str, allowed))}")
    return found


def _compared(model: ModelConfig) -> dict[str, Any]:
    """The fields that the function of the weights depends on; values that say the same as a default are that."""
    fields = {name: getattr(model, DERIVED.get(name, name)) for name in ModelConfig.model_fields}
    unused = set(_NOT_COMPUTED)
    if model.head_size * model.num_heads == model.hidden_size:
        fields["head_dim"] = 0
    if not _has_ramp(model):
        fields["rotary_ramp"] = ()
    if math.isclose(model.attention_scale, model.head_size**-0.5):
        fields["attention_scale"] = 0.0
    if model.norm == "rmsnorm":
        unused.add("norm_bias")
    if model.position != "relative":
        unused |= {name for name in fields if name.startswith("relative_")}
    if not model.window_size or (model.window_size >= model.max_position_embeddings and not model.local_rotary_base):
        unused |= {"window_size", "window_attn_skip_freq", "local_rotary_base"}
    if model.position != "rotary":
        unused |= {"no_rope_freq", "local_rotary_base", *(name for name in fields if name.startswith("rotary_"))}
    if model.rotary_scaling != "longrope":
        unused |= {"rotary_short_factors", "rotary_long_factors"}
    return {name: value for name, value in fields.items() if name not in unused}


def add_sizes(gguf: Any, writer: Any, model: ModelConfig) -> None:
    """The keys that llama.cpp builds the model from."""
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.ffn_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.query_groups)
    writer.add_vocab_size(model.vocab_size)
    if model.norm == "rmsnorm":
        writer.add_layer_norm_rms_eps(model.norm_eps)
    else:
        writer.add_layer_norm_eps(model.norm_eps)
    if model.position != "rotary":
        return
    writer.add_key_length(model.head_size)
    writer.add_value_length(model.head_size)
    writer.add_rope_dimension_count(model.rotary_size)
    writer.add_rope_freq_base(model.rotary_base)
    of_kernel = 1.0  # llama.cpp multiplies this factor of YaRN's paper by that of the file
    if model.rotary_scaling == "linear" or (model.rotary_scaling == "yarn" and not _has_ramp(model)):
        writer.add_rope_scaling_type(gguf.RopeScalingType[model.rotary_scaling.upper()])
        writer.add_rope_scaling_factor(model.rotary_scaling_factor)
        if model.rotary_scaling == "yarn":
            writer.add_rope_scaling_orig_ctx_len(model.rotary_original_positions or model.max_position_embeddings)
            of_kernel = 0.1 * math.log(max(1.0, model.rotary_scaling_factor)) + 1
    if (factor := RotaryTable(model).attention_factor / of_kernel) != 1:
        writer.add_rope_scaling_attn_factors(factor)


def frequency_divisors(model: ModelConfig) -> Tensor | None:
    """The divisor of each frequency, `[r/2]`, for scalings that llama.cpp computes from a tensor; else None.

    It reads the keys of YaRN's ramp for other architectures only.
    """
    if model.rotary_scaling != "llama3" and not _has_ramp(model):
        return None
    plain = RotaryTable(model.model_copy(update={"rotary_scaling": "none"})).frequencies(0)
    return (plain / RotaryTable(model).frequencies(0)).float()


def _has_ramp(model: ModelConfig) -> bool:
    """Whether the ramp of a scaling is another than its default."""
    return bool(model.rotary_ramp) and model.rotary_ramp != RAMPS.get(model.rotary_scaling, model.rotary_ramp)
