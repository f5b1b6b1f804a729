"""Small transformers models with random weights, biases and norms, saved by transformers."""

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

VOCAB = 251  # odd, so 5 rows are padding


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4}
    ids = {"bos_token_id": None, "eos_token_id": None}
    return randomized(GPT2LMHeadModel(GPT2Config(**{**sizes, **ids, **changes})))


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 24,
        "rms_norm_eps": 1e-6,
    }
    return randomized(LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})))


def bert(cls: str = "BertForPreTraining", **changes: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
        "attn_implementation": "eager",
    }
    return randomized(getattr(transformers, cls)(transformers.BertConfig(**{**sizes, **changes})))


def t5(**changes: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 12,
        "d_ff": 48,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
    }
    return randomized(T5ForConditionalGeneration(T5Config(**{**sizes, **changes})))


MODELS = {
    "gpt2": gpt2,
    "gpt2 quick_gelu": lambda: gpt2(activation_function="quick_gelu", n_inner=64, vocab_size=256),
    "gpt2 relu": lambda: gpt2(activation_function="relu"),
    "gpt2 untied, gelu": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "llama": llama,
    "llama tied, with biases": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama rope, head_dim": lambda: llama(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, head_dim=8, num_key_value_heads=8
    ),
}
ENCODERS = {
    "bert": bert,
    "bert without a binary head, relu": lambda: bert("BertForMaskedLM", hidden_act="relu"),
    "t5": t5,
    "t5 gated, not scaled": lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}


# The sizes of tiny models: those of Llama in transformers' names. Three layers make windows and positions alternate.
LLAMA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
}
# All tokens of a test's vocabulary exist; a config's own ids could be larger than it.
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.5, 2.0, 4.0, 8.0]}
NEOX_SIZES = {name: size for name, size in LLAMA_SIZES.items() if name != "num_key_value_heads"}
# Family and variant -> the prefix of the classes of transformers, and fields of its config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4}),
    "llama": ("Llama", {"mlp_bias": True}),
    "llama 3": (
        "Llama",
        {"rope_parameters": {**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 12}},
    ),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    "llama dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
            "max_position_embeddings": 20,
        },
    ),
    "llama yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 100.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
            },
            "attention_bias": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 6, "num_hidden_layers": 5}),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3 partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 100.0}},
    ),
    "phi3 longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "gpt_neox": ("GPTNeoX", NEOX_SIZES),
    "gpt_neox sequential": ("GPTNeoX", {**NEOX_SIZES, "use_parallel_residual": False, "attention_bias": False}),
    "gemma": ("Gemma", {"head_dim": 12}),
    "gemma2": ("Gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 20, "head_dim": 8}),
    "gemma3_text": (
        "Gemma3Text",
        {
            "sliding_window": 5,
            "num_hidden_layers": 7,
            "head_dim": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2", {"sliding_window": 5, "num_hidden_layers": 5, "logit_scale": 0.5}),
    "falcon": ("Falcon", {"num_kv_heads": 1}),
    "falcon of two norms": ("Falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}),
    "gptj": (
        "GPTJ",
        {"vocab_size": VOCAB, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 2, "rotary_dim": 8},
    ),
    "phi": ("Phi", {}),
    "opt": ("OPT", {**NEOX_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def config_of_family(name: str) -> Any:
    """The config of a tiny model of one of FAMILIES."""
    import transformers

    prefix, fields = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")
    sizes = {} if prefix in ("GPT2", "GPTJ") else LLAMA_SIZES
    known = set(config().to_dict())
    given = {key: value for key, value in {**sizes, **NO_IDS}.items() if key in known} | fields
    given = {key: value for key, value in given.items() if key in known or key == "head_dim"}
    return config(**given, attn_implementation="eager")


def of_family(name: str) -> Any:
    """A tiny model of one of FAMILIES."""
    from transformers import AutoModelForCausalLM

    # Logits stay below 6. Gemma adds 1 to the weights of norms.
    norms = 0.0 if name.startswith("gemma") else 1.0
    return randomized(AutoModelForCausalLM.from_config(config_of_family(name)), std=0.15, norms=norms)


def randomized(model: Any, std: float = 0.2, norms: float = 1.0) -> Any:
    """The model with normal weights; those of norms are around `norms`."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = norms if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + around)
    return model.eval()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def tokens(vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randint(vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))


def edit_config(folder: Path, **changes: Any) -> None:
    """Set fields of a config.json; None removes a field."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def copy(source: Path, target: Path) -> Path:
    """Copy `source` to `target`, a folder that a test may change."""
    shutil.copytree(source, target)
    return target


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same_tensors(got: Path, want: Path) -> None:
    """Tensor names, dtypes and bits of two folders are equal; tied models store no head."""
    first, second = tensors_of(got), tensors_of(want)
    assert first.keys() == second.keys()
    for name, tensor in second.items():
        assert first[name].dtype == tensor.dtype and torch.equal(first[name], tensor), name


def transformers_without_warnings(folder: Path) -> Any:
    """The model that transformers loads from `folder`; any warning or log message is a failure."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as theirs

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    theirs.set_verbosity_warning()
    theirs.add_handler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = AutoModelForCausalLM.from_pretrained(folder)
    finally:
        theirs.remove_handler(handler)
    assert messages == []
    return loaded.eval()


# Values that no family has by default, by field; a sequence has several values. Flags are inverted.
_DROPOUTS = (
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "residual_dropout"),
    *("embedding_dropout", "dropout", "dropout_rate", "layerdrop", "hidden_dropout_prob", "classifier_dropout"),
    *("attention_probs_dropout_prob", "summary_first_dropout"),
)
_ROTARY = {"rope_type": "default", "rope_theta": 77.0}
OTHER_VALUES: dict[str, Any] = {
    **dict.fromkeys(_DROPOUTS, 0.25),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), 3e-2),
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.05),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 0.7),
    **dict.fromkeys(("hidden_act", "activation_function", "activation"), ("silu", "relu", "gelu", "gelu_new")),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 7),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "max_position_embeddings", "n_positions"), 40),
    "hidden_activation": ["silu", "gelu"],
    "feed_forward_proj": ["gated-gelu", "gated-silu"],
    "attn_logit_softcapping": [0.5, None],
    "final_logit_softcapping": [2.0, None],
    "logit_scale": 0.6,
    "query_pre_attn_scalar": 3,
    "rope_parameters": [_ROTARY, {**_ROTARY, "rope_type": "linear", "factor": 2.0}],
    "sliding_window": [3, None],
    "max_window_layers": [0, 1, 2],
    "layer_types": [["sliding_attention"] * 3, ["full_attention"] * 3, ["sliding_attention", "full_attention"] * 2],
    "no_rope_layers": [[1, 1, 1], [1, 0, 1], [0, 1, 1]],
    "no_rope_layer_interval": [1, 3],
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1, 2, 4)),
    "num_ln_in_parallel_attn": [1, 2],
    "head_dim": [12, 16],
    "rotary_dim": 4,
    "original_max_position_embeddings": 12,
    "num_decoder_layers": [1, 4],
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 20,
    "type_vocab_size": 3,
    "word_embed_proj_dim": 16,
    "pretraining_tp": 2,
    "summary_type": "last",
    "summary_activation": "tanh",
    "use_bidirectional_attention": True,
}


def other_values(name: str, default: Any) -> list[Any]:
    """Values of a field that are not its default."""
    values = [not default] if isinstance(default, bool) else OTHER_VALUES[name]
    return [value for value in (values if isinstance(values, (list, tuple)) else [values]) if value != default]
