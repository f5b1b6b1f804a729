"""Small random models of transformers, saved as it saves them: every bias and norm is a number of its own."""

import json
from pathlib import Path
from typing import Any

import torch

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


MODELS = {
    "gpt2": gpt2,
    "gpt2 quick_gelu": lambda: gpt2(activation_function="quick_gelu", n_inner=64, vocab_size=256),
    "gpt2 untied, gelu": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "llama": llama,
    "llama tied, with biases": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama rope, head_dim": lambda: llama(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, head_dim=8, num_key_value_heads=8
    ),
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
    """Sets fields of a config.json; None removes one."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
