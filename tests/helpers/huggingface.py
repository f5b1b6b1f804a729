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


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + around)
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
