"""Megatron-LM's arguments, pickled with each of its checkpoints, to our model section and back.

Arguments for a computation that we do not have are an error that names them.
Source: https://github.com/NVIDIA/Megatron-LM, megatron/training/{arguments,checkpointing}.py.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.schema import ModelConfig
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.rotary import RAMPS
from megatron_lite.text import listed

DIVISIBLE_BY = 128  # --make-vocab-size-divisible-by; its multiple grows with the tensor-parallel size

# Our field -> the argument, where the value is the same.
SAME = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "kv_channels",
    "ffn_hidden_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "zero_centered_norm": "apply_layernorm_1p",
    "post_norm": "apply_residual_connection_post_layernorm",
    "fp32_residual": "fp32_residual_connection",
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "init_std": "init_method_std",
}
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}

# Arguments that change the computation, with the value that we compute; None is such a value too.
UNSUPPORTED: dict[str, Any] = {
    "squared_relu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "multi_latent_attention": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "num_experts": None,
    "mtp_num_layers": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "hybrid_override_pattern": None,
    "hybrid_layer_pattern": None,
    "retro_add_retriever": False,
}


def fields_of(args: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The fields of our model section that follow from the arguments."""
    given = {name: value for name, value in args.items() if value is not None}
    unsupported = [
        f"{name} is {given[name]}" for name, ours in UNSUPPORTED.items() if given.get(name, ours) not in (ours, False)
    ]
    for name in ("vocab_size", "make_vocab_size_divisible_by"):
        if type(given.get(name, 1)) is not int or given.get(name, 1) < 1:
            raise CheckpointError(f"{where}: its argument {name} is {given[name]!r}; expected a positive integer")
    fields = {ours: given[theirs] for ours, theirs in SAME.items() if theirs in given}
    attention, not_ours = _attention_fields(given)
    fields |= attention
    unsupported += not_ours
    for name, field, known in (("normalization", "norm", NORMS), ("position_embedding_type", "position", POSITIONS)):
        if name in given and str(given[name]) not in known:
            unsupported.append(f"{name} is {given[name]}")
        elif name in given:
            fields[field] = known[str(given[name])]
    if unsupported:
        raise CheckpointError(
            f"{where}: its model uses arguments that megatron_lite does not compute: {listed(unsupported)}"
        )
    if given.get("tokenizer_type") == "NullTokenizer" and "vocab_size" in fields:
        fields["vocab_size"] += 1  # it adds an end-of-document token to --vocab-size
    if given.get("use_rotary_position_embeddings"):
        fields["position"] = "rotary"
    if "num_attention_heads" in given:
        grouped = given.get("group_query_attention", False)
        fields["num_query_groups"] = given.get("num_query_groups", 0) if grouped else 0
        fields["activation"] = _activation(given)
    for name in ("norm_epsilon", "layernorm_epsilon"):
        if name in given:
            fields.setdefault("norm_eps", given[name])
    if "untie_embeddings_and_output_weights" in given:
        fields["tie_embeddings"] = not given["untie_embeddings_and_output_weights"]
    return fields


def _attention_fields(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of attention and its biases, and a message for each argument that we do not compute."""
    fields: dict[str, Any] = {}
    unsupported = []
    if "add_bias_linear" in given:
        of_qkv_alone = given.get("add_qkv_bias") and not given["add_bias_linear"]
        fields["bias"] = "qkv" if of_qkv_alone else given["add_bias_linear"]
    if given.get("qk_layernorm"):
        fields["qk_norm"] = "head"
    if given.get("softmax_scale"):
        fields["attention_scale"] = given["softmax_scale"]
    if given.get("use_rope_scaling"):
        fields |= {**ROPE_SCALING, "rotary_scaling_factor": given.get("rope_scaling_factor", 8.0)}
    if window := given.get("window_size"):  # tokens before a query, and after it
        if isinstance(window, list | tuple) and [type(n) for n in window] == [int, int] and window[1] == 0:
            fields["window_size"] = window[0] + 1
        else:
            unsupported.append(f"window_size is {window}")
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        if type(given.get(name, 0)) is int:
            fields[name] = given.get(name, 0)
        else:
            unsupported.append(f"{name} is {given[name]}")
    if not fields.get("window_size"):
        fields.pop("window_attn_skip_freq", None)
    return fields, unsupported


def _activation(args: Mapping[str, Any]) -> str:
    if args.get("swiglu"):
        return "swiglu"
    # The kernel that also adds the bias has the tanh form, the plain one does not.
    fused = args.get("bias_gelu_fusion", False) and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused or args.get("openai_gelu") else "gelu"


# What --use-rope-scaling computes.
ROPE_SCALING = {"rotary_scaling": "llama3", "rotary_original_positions": 8192, "rotary_ramp": (1.0, 4.0)}


def padded_rows(vocab_size: int, tensor: int, divisible_by: int = DIVISIBLE_BY) -> int:
    """The rows of a vocabulary table, padded for `tensor` ranks."""
    multiple = divisible_by * tensor
    return -(-vocab_size // multiple) * multiple


def check_model(model: ModelConfig, tensor: int, pipeline: int) -> None:
    """Raise ConfigError unless Megatron-LM's code computes this model on so many ranks."""
    others = []
    if model.top_query_layer:
        others.append("model.top_query_layer is True")
    if model.activation in ("quick_gelu", "relu") or (model.activation == "gelu_tanh" and model.bias is not True):
        others.append(f"model.activation is {model.activation}" + ("" if model.bias is True else " without model.bias"))
    if model.bias not in (True, False, "qkv"):
        others.append(f"model.bias is {model.bias}")
    if model.qk_norm == "full":
        others.append("model.qk_norm is full")
    if model.rotary_scaling != "none":
        ramp = model.rotary_ramp or RAMPS.get(model.rotary_scaling, ())
        found = {"rotary_scaling": model.rotary_scaling, "rotary_ramp": ramp}
        found["rotary_original_positions"] = model.rotary_original_positions or model.max_position_embeddings
        others += [f"model.{name} is {value}" for name, value in found.items() if ROPE_SCALING[name] != value]
    if model.no_rope_freq and model.num_layers % model.no_rope_freq:
        others.append(f"model.no_rope_freq is {model.no_rope_freq}, which does not divide model.num_layers")
    if others:
        raise ConfigError(f"Megatron-LM has no arguments for this model: {', '.join(others)}; choose another format")
    if model.num_layers % pipeline:
        raise ConfigError(
            f"pipeline is {pipeline}, which does not divide model.num_layers ({model.num_layers}); Megatron-LM's "
            "stages are equal"
        )
    sizes = {"num_heads": model.num_heads, "num_query_groups": model.query_groups, "ffn_hidden_size": model.ffn_size}
    if wrong := [f"model.{name} ({size})" for name, size in sizes.items() if size % tensor]:
        raise ConfigError(f"tensor is {tensor}, which does not divide {', '.join(wrong)}")


def args_for(
    model: ModelConfig, *, tensor: int, pipeline: int, iteration: int, dtype: torch.dtype
) -> argparse.Namespace:
    """The arguments that --use-checkpoint-args loads, and that a run's own arguments are compared with."""
    arguments = {theirs: getattr(model, ours) for ours, theirs in SAME.items()}
    grouped = model.query_groups != model.num_heads
    return argparse.Namespace(
        **{
            **arguments,
            **UNSUPPORTED,
            "kv_channels": model.head_size,
            "ffn_hidden_size": model.ffn_size,
            "seq_length": model.max_position_embeddings,
            "group_query_attention": grouped,
            "num_query_groups": model.query_groups if grouped else 1,
            "normalization": {ours: theirs for theirs, ours in NORMS.items()}[model.norm],
            "norm_epsilon": model.norm_eps,
            "layernorm_epsilon": model.norm_eps,
            "swiglu": model.activation == "swiglu",
            "bias_gelu_fusion": model.activation == "gelu_tanh",
            "openai_gelu": False,
            "add_bias_linear": model.bias is True,
            "add_qkv_bias": model.has_bias("qkv"),
            "qk_layernorm": model.qk_norm == "head",
            "softmax_scale": model.attention_scale or None,
            "use_rope_scaling": model.rotary_scaling == "llama3",
            "rope_scaling_factor": model.rotary_scaling_factor if model.rotary_scaling == "llama3" else 8.0,
            "window_size": (model.window_size - 1, 0) if model.window_size else None,
            "window_attn_skip_freq": model.window_attn_skip_freq or None,
            "no_rope_freq": model.no_rope_freq or None,
            "position_embedding_type": {ours: theirs for theirs, ours in POSITIONS.items()}[model.position],
            "add_position_embedding": model.position == "learned",
            "use_rotary_position_embeddings": model.position == "rotary",
            "untie_embeddings_and_output_weights": not model.tie_embeddings,
            "apply_query_key_layer_scaling": False,
            "make_vocab_size_divisible_by": DIVISIBLE_BY,
            "padded_vocab_size": padded_rows(model.vocab_size, tensor),
            # Compared only with --vocab-file, for GPT-2's tokenizer.
            "tokenizer_type": "GPT2BPETokenizer" if model.vocab_size == 50257 else None,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "virtual_pipeline_model_parallel_size": None,
            "expert_model_parallel_size": 1,
            "ckpt_format": "torch",
            "transformer_impl": "local",
            "params_dtype": dtype,
            "fp16": dtype == torch.float16,
            "bf16": dtype == torch.bfloat16,
            "iteration": iteration,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
        }
    )
