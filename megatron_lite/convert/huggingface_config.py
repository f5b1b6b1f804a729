"""config.json of Hugging Face's GPT-2, Llama, BERT and T5, to our fields and back.
Source: transformers, `GPT2Config`, `LlamaConfig`, `BertConfig` and `T5Config`, in the spellings of versions 4 and 5.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_lite.checkpoint.compatible import DERIVED, NOT_OF_WEIGHTS
from megatron_lite.config.schema import Config, DataConfig, ModelConfig
from megatron_lite.config.validate import failures
from megatron_lite.convert.huggingface_fields import Fields
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
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}

T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu"}


def to_model(path: Path, content: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    """The model type and our model section of a config.json; `path` is for messages."""
    fields = Fields(path, content)
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


def _from_gpt2(fields: Fields) -> dict[str, Any]:
    hidden, positions = fields.take("n_embd"), fields.take("n_positions")
    fields.expect("n_ctx", fields.take("n_ctx", positions), positions)
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
        "activation": _activation(fields, "activation_function", "gelu_new"),
        "tie_embeddings": fields.take("tie_word_embeddings", True),
        "hidden_dropout": residual,
        "attention_dropout": fields.take("attn_pdrop", 0.0),
        "init_std": fields.take("initializer_range", 0.02),
    }


def _from_llama(fields: Fields) -> dict[str, Any]:
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


def _from_bert(fields: Fields) -> dict[str, Any]:
    fields.expect("is_decoder", fields.take("is_decoder", False), False)
    fields.expect("position_embedding_type", fields.take("position_embedding_type", "absolute"), "absolute")
    return {
        "architecture": "encoder",
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": fields.take("hidden_size"),
        "num_heads": fields.take("num_attention_heads"),
        "ffn_hidden_size": fields.take("intermediate_size"),
        "max_position_embeddings": fields.take("max_position_embeddings"),
        "vocab_size": fields.take("vocab_size"),
        "norm_eps": fields.take("layer_norm_eps", 1e-12),
        "norm_placement": "post",
        "embedding_norm": True,
        "activation": _activation(fields, "hidden_act", "gelu"),
        "num_tokentypes": fields.take("type_vocab_size", 2),
        "tie_embeddings": fields.take("tie_word_embeddings", True),
        "hidden_dropout": fields.take("hidden_dropout_prob", 0.1),
        "attention_dropout": fields.take("attention_probs_dropout_prob", 0.1),
        "init_std": fields.take("initializer_range", 0.02),
    }


def _from_t5(fields: Fields) -> dict[str, Any]:
    fields.expect("is_encoder_decoder", fields.take("is_encoder_decoder", True), True)
    kind = fields.take("feed_forward_proj", "relu")
    if kind not in T5_ACTIVATIONS:
        raise fields.error("feed_forward_proj", kind, f"ours are {', '.join(T5_ACTIVATIONS)}")
    inner = {"relu": "relu", "gated-gelu": "gelu_new"}[kind]
    fields.expect("dense_act_fn", fields.take("dense_act_fn", inner), inner)
    fields.expect("is_gated_act", fields.take("is_gated_act", kind != "relu"), kind != "relu")
    hidden, encoder_layers = fields.take("d_model"), fields.take("num_layers")
    tied = fields.take("tie_word_embeddings", True)
    # Version 5 has a field for what `tie_word_embeddings` meant before.
    scaled = fields.take("scale_decoder_outputs", tied)
    dropout = fields.take("dropout_rate", 0.1)
    fields.take("initializer_factor", 1.0)
    return {
        "architecture": "encoder_decoder",
        "num_encoder_layers": encoder_layers,
        "num_layers": fields.take("num_decoder_layers", encoder_layers),
        "hidden_size": hidden,
        "num_heads": fields.take("num_heads"),
        "head_dim": fields.take("d_kv"),
        "ffn_hidden_size": fields.take("d_ff"),
        "max_position_embeddings": fields.take("n_positions", 512),
        "vocab_size": fields.take("vocab_size"),
        "norm": "rmsnorm",
        "norm_eps": fields.take("layer_norm_epsilon", 1e-6),
        "activation": T5_ACTIVATIONS[kind],
        "position": "relative",
        "relative_buckets": fields.take("relative_attention_num_buckets", 32),
        "relative_max_distance": fields.take("relative_attention_max_distance", 128),
        "bias": False,
        "attention_scale": 1.0,
        "tie_embeddings": tied,
        "logit_scale": hidden**-0.5 if scaled and isinstance(hidden, int) and hidden > 0 else 1.0,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "embedding_init_std": 1.0,
    }


def _activation(fields: Fields, name: str, default: str) -> str:
    """Our name of an activation without a gate."""
    activation = fields.take(name, default)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise fields.error(name, activation, f"ours are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _rotary_base(fields: Fields) -> float:
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


_IMPORTS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "gpt2": _from_gpt2,
    "llama": _from_llama,
    "bert": _from_bert,
    "t5": _from_t5,
}


def from_model(model: ModelConfig) -> dict[str, Any]:
    """The config.json of the Hugging Face model that computes the same; CheckpointError if there is none."""
    candidates = {"decoder": ("gpt2", "llama"), "encoder": ("bert",), "encoder_decoder": ("t5",)}[model.architecture]
    obstacles = {name: _obstacles(name, model) for name in candidates}
    common = _differing(model, top_query_layer=(False,), post_norm=(False,))
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    if differing := [*obstacles[nearest], *common]:
        raise CheckpointError(
            f"Hugging Face has no model that computes the same: {', '.join(differing)} (nearest: {nearest}); choose "
            "another format"
        )
    exported = {"gpt2": _to_gpt2, "llama": _to_llama, "bert": _to_bert, "t5": _to_t5}[nearest](model)
    architecture = "BertForPreTraining" if model.binary_head else ARCHITECTURES[nearest]
    return {
        "architectures": [architecture],
        "model_type": nearest,
        **exported,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _obstacles(nearest: str, model: ModelConfig) -> list[str]:
    """The fields of a model that this model type cannot compute."""
    plain: dict[str, tuple[Any, ...]] = {
        "query_groups": (model.num_heads,),
        "head_size": (model.hidden_size / model.num_heads,),
    }
    if nearest == "bert":
        wanted = {"norm": ("layernorm",), "position": ("learned",), "activation": ACTIVATIONS.values(), "bias": (True,)}
        wanted |= {"norm_placement": ("post",), "embedding_norm": (True,), "logit_scale": (1.0,), **plain}
        wanted["num_tokentypes"] = range(1, 1 << 20)
        return _differing(model, **wanted, **_standard_scale(model))
    if nearest == "t5":
        wanted = {"norm": ("rmsnorm",), "position": ("relative",), "activation": T5_ACTIVATIONS.values()}
        wanted |= {"bias": (False,), "norm_placement": ("pre",), "embedding_norm": (False,), "attention_scale": (1.0,)}
        scales = (1.0, model.hidden_size**-0.5)
        return _differing(model, **wanted, logit_scale=scales, query_groups=(model.num_heads,))
    wanted = {"norm_placement": ("pre",), "embedding_norm": (False,), "logit_scale": (1.0,)} | _standard_scale(model)
    if nearest == "llama":
        return _differing(model, norm=("rmsnorm",), position=("rotary",), activation=("swiglu",), **wanted)
    wanted |= {"norm": ("layernorm",), "position": ("learned",), "bias": (True,), **plain}
    return _differing(model, activation=("gelu", "gelu_tanh", "quick_gelu", "relu"), **wanted)


def _standard_scale(model: ModelConfig) -> dict[str, tuple[Any, ...]]:
    return {"attention_scale": (0.0, model.head_size**-0.5)}


def _differing(model: ModelConfig, **wanted: Iterable[Any]) -> list[str]:
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
        "initializer_range": model.init_std,
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
        "initializer_range": model.init_std,
    }


def _to_bert(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.max_position_embeddings,
        "type_vocab_size": model.num_tokentypes,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation),
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "initializer_range": model.init_std,
    }


def _to_t5(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.encoder_layers,
        "num_decoder_layers": model.num_layers,
        "d_model": model.hidden_size,
        "num_heads": model.num_heads,
        "d_kv": model.head_size,
        "d_ff": model.ffn_size,
        "n_positions": model.max_position_embeddings,
        "layer_norm_epsilon": model.norm_eps,
        "feed_forward_proj": next(theirs for theirs, ours in T5_ACTIVATIONS.items() if ours == model.activation),
        "relative_attention_num_buckets": model.relative_buckets,
        "relative_attention_max_distance": model.relative_max_distance,
        "dropout_rate": model.hidden_dropout,
        "is_encoder_decoder": True,
        "scale_decoder_outputs": model.logit_scale != 1.0,
    }
