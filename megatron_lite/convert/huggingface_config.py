"""config.json of Hugging Face's GPT-2 and Llama, to our fields and back.

A field of config.json is converted, or must have the value that our model computes, or is known not to change the
model's output. Any other field is an error: ignored silently, it could make the converted model write nonsense.
Source: transformers, `GPT2Config` and `LlamaConfig`, in the spellings of versions 4 and 5.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_lite.checkpoint.compatible import DERIVED, NOT_OF_WEIGHTS
from megatron_lite.config.schema import Config, DataConfig, ModelConfig
from megatron_lite.config.validate import failures
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.text import listed

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}

# Fields for files, generation, other heads than the language model's, or the speed of the computation.
HARMLESS = {
    *(
        "_name_or_path",
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "tokenizer_class",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "task_specific_params"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "prefix", "use_cache", "use_bfloat16"),
    *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate"),
    *("torchscript", "tf_legacy_loss", "gradient_checkpointing", "reorder_and_upcast_attn", "pretraining_tp"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "chunk_size_feed_forward"),
    *(
        "do_sample",
        "early_stopping",
        "max_length",
        "min_length",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
    ),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "begin_suppress_tokens"),
    *("suppress_tokens", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "_from_model_config"),
    *("_num_labels", "output_past", "is_llama_config", "transformers.js_config"),
}
# Field -> values that our model computes; the first is the default.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}
REQUIRED = object()


class _Fields:
    """The fields of a config.json, which are taken one by one."""

    def __init__(self, path: Path, content: Mapping[str, Any]):
        self._path, self._left = path, dict(content)

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field; null stands for a missing field."""
        value = self._left.pop(name, None)
        if value is None and default is REQUIRED:
            raise CheckpointError(f"{self._path}: has no {name}; give the config of these weights")
        return default if value is None else value

    def error(self, name: str, value: Any, reason: str) -> CheckpointError:
        """An error for a value that our model does not compute."""
        return CheckpointError(f"{self._path}: {name} is {value!r}; {reason}, so the converted model would differ")

    def expect(self, name: str, value: Any, *allowed: Any) -> None:
        """Raise CheckpointError unless the value is one of `allowed`."""
        if not any(type(value) is type(other) and value == other for other in allowed):
            raise self.error(name, value, f"ours computes with {' or '.join(map(repr, allowed))}")

    def finish(self) -> None:
        """Raise CheckpointError for fields that were not taken and could change the model."""
        for name, allowed in EXPECTED.items():
            if name in self._left:
                self.expect(name, self._left.pop(name), *allowed)
        if unknown := [name for name in self._left if name not in HARMLESS]:
            values = listed([f"{name} = {self._left[name]!r}" for name in unknown])
            raise CheckpointError(
                f"{self._path}: has the unknown {values}; remove fields that do not change the model's output"
            )


def to_model(path: Path, content: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    """The model type and our model section of a config.json; `path` is for messages."""
    fields = _Fields(path, content)
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in _IMPORTS:
        raise CheckpointError(f"{path}: model_type is {model_type!r}; expected {' or '.join(_IMPORTS)}")
    ours = _IMPORTS[model_type](fields)
    fields.finish()
    try:
        model, stated = ModelConfig(**{**ours, **overrides}), ModelConfig(**ours)
    except (ValidationError, TypeError) as error:
        problems = error.errors() if isinstance(error, ValidationError) else []
        values = [f"{'.'.join(map(str, problem['loc']))} {problem['input']!r}" for problem in problems]
        raise CheckpointError(f"{path}: has invalid values: {listed(values) if values else error}") from None
    names = [name for name in ours.keys() & overrides.keys() if name not in NOT_OF_WEIGHTS | {"tie_embeddings"}]
    pairs = [(name, *(getattr(each, DERIVED.get(name, name)) for each in (model, stated))) for name in sorted(names)]
    if other := [f"model.{name} is {given}, not the {value}" for name, given, value in pairs if given != value]:
        raise ConfigError(f"{path}: {listed(other)} of this file; leave out fields of another model")
    config = Config(model=model, data=DataConfig(seq_length=min(1024, model.max_position_embeddings)))
    if problems := failures(config, 1):
        raise CheckpointError(f"{path}: does not describe a model that megatron_lite has: {problems[0]}")
    from_model(model)  # raises if the overrides have made a model that the format cannot hold
    return model_type, model


def _from_gpt2(fields: _Fields) -> dict[str, Any]:
    hidden, positions = fields.take("n_embd"), fields.take("n_positions")
    fields.expect("n_ctx", fields.take("n_ctx", positions), positions)
    activation = fields.take("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise fields.error("activation_function", activation, f"ours are {', '.join(ACTIVATIONS)}")
    residual = fields.take("resid_pdrop", 0.0)
    if (embedding := fields.take("embd_pdrop", residual)) != residual:
        raise fields.error("embd_pdrop", embedding, f"resid_pdrop is {residual!r}, and ours has one hidden_dropout")
    return {
        "num_layers": fields.take("n_layer"),
        "hidden_size": hidden,
        "num_heads": fields.take("n_head"),
        "ffn_hidden_size": fields.take("n_inner", 0),
        "max_position_embeddings": positions,
        "vocab_size": fields.take("vocab_size"),
        "norm_eps": fields.take("layer_norm_epsilon", 1e-5),
        "activation": ACTIVATIONS[activation],
        "tie_embeddings": fields.take("tie_word_embeddings", True),
        "hidden_dropout": residual,
        "attention_dropout": fields.take("attn_pdrop", 0.0),
        "init_std": fields.take("initializer_range", 0.02),
    }


def _from_llama(fields: _Fields) -> dict[str, Any]:
    fields.expect("hidden_act", fields.take("hidden_act", "silu"), "silu")
    bias = fields.take("attention_bias", False)
    mlp_bias = fields.take("mlp_bias", False)
    if bias is not mlp_bias:
        raise fields.error(
            "attention_bias", bias, f"mlp_bias is {mlp_bias!r}, and ours has biases in all linear layers or in none"
        )
    return {
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": fields.take("hidden_size"),
        "num_heads": (heads := fields.take("num_attention_heads")),
        "num_query_groups": fields.take("num_key_value_heads", heads),
        "head_dim": fields.take("head_dim", 0),
        "ffn_hidden_size": fields.take("intermediate_size"),
        "max_position_embeddings": fields.take("max_position_embeddings", 2048),
        "vocab_size": fields.take("vocab_size"),
        "norm": "rmsnorm",
        "norm_eps": fields.take("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "position": "rotary",
        "rotary_base": _rotary_base(fields),
        "bias": bias,
        "tie_embeddings": fields.take("tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.take("attention_dropout", 0.0),
        "init_std": fields.take("initializer_range", 0.02),
    }


def _rotary_base(fields: _Fields) -> float:
    """The base from `rope_theta` and `rope_scaling` (version 4) or `rope_parameters` (version 5)."""
    base, scaling = fields.take("rope_theta", 10000.0), fields.take("rope_scaling", {})
    parameters = fields.take("rope_parameters", {})
    for name, given in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not isinstance(given, dict):
            raise fields.error(name, given, "expected an object")
        plain = {"type": ("default",), "rope_type": ("default",), "partial_rotary_factor": (1.0, 1)}
        if any(key != "rope_theta" and value not in plain.get(key, ()) for key, value in given.items()):
            raise fields.error(name, given, "ours has no scaling of angles")
    fields.expect("partial_rotary_factor", fields.take("partial_rotary_factor", 1.0), 1.0, 1)
    return parameters.get("rope_theta", scaling.get("rope_theta", base))


_IMPORTS: dict[str, Callable[[_Fields], dict[str, Any]]] = {"gpt2": _from_gpt2, "llama": _from_llama}


def from_model(model: ModelConfig) -> dict[str, Any]:
    """The config.json of the Hugging Face model that computes the same; CheckpointError if there is none."""
    obstacles = {
        "gpt2": _differing(
            model,
            norm=("layernorm",),
            position=("learned",),
            activation=("gelu", "gelu_tanh", "quick_gelu", "relu"),
            bias=(True,),
            query_groups=(model.num_heads,),
            head_size=(model.hidden_size / model.num_heads,),
        ),
        "llama": _differing(model, norm=("rmsnorm",), position=("rotary",), activation=("swiglu",)),
    }
    common = _differing(model, top_query_layer=(False,), post_norm=(False,))
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    if differing := [*obstacles[nearest], *common]:
        raise CheckpointError(
            f"Hugging Face has no model that computes the same: {', '.join(differing)} (nearest: {nearest}); choose "
            "another format"
        )
    exported = _to_gpt2(model) if nearest == "gpt2" else _to_llama(model)
    return {
        "architectures": [ARCHITECTURES[nearest]],
        "model_type": nearest,
        **exported,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _differing(model: ModelConfig, **wanted: tuple[Any, ...]) -> list[str]:
    return [
        f"model.{field} is {getattr(model, field)}"
        for field, values in wanted.items()
        if getattr(model, field) not in values
    ]


def _to_gpt2(model: ModelConfig) -> dict[str, Any]:
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_size,
        "n_positions": model.max_position_embeddings,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": activation,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _to_llama(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "rope_theta": model.rotary_base,  # version 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},  # version 5
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.attention_dropout,
    }
