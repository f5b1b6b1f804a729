"""Models by name: published sizes and kinds, as values of `ModelConfig` fields.

Sources: GPT-2 and Brown et al., arXiv 2005.14165, table 2.1 (gpt); Zheng et al., arXiv 2303.17568 and its released
code (codegeex); Touvron et al., arXiv 2307.09288, and the released configs (llama).
"""

from typing import Any

_GPT: dict[str, Any] = {"vocab_size": 50257}
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rotary",
    "bias": False,
    "tie_embeddings": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_CODEGEEX: dict[str, Any] = {
    "activation": "quick_gelu",
    "position": "learned",
    "tie_embeddings": True,
    "top_query_layer": True,
    "mlp_dropout": False,
}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt-125m": _GPT | {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "max_position_embeddings": 1024},
    "gpt-345m": _GPT | {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "max_position_embeddings": 1024},
    "gpt-1.3b": _GPT | {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "max_position_embeddings": 2048},
    "gpt-175b": _GPT | {"num_layers": 96, "hidden_size": 12288, "num_heads": 96, "max_position_embeddings": 2048},
    "codegeex-13b": _CODEGEEX
    | {
        "num_layers": 39,
        "hidden_size": 5120,
        "num_heads": 40,
        "max_position_embeddings": 2048,
        "vocab_size": 50400,
        "padded_vocab_size": 52224,  # 51 * 1024, as released
    },
    # Small enough to learn on a laptop's CPU; its vocabulary is the tokenizer's.
    "codegeex-mini": _CODEGEEX | {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "max_position_embeddings": 256},
    "llama-160m": _LLAMA
    | {
        "num_layers": 12,
        "hidden_size": 768,
        "num_heads": 12,
        "ffn_hidden_size": 3072,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-6,
    },
    "llama-7b": _LLAMA
    | {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "ffn_hidden_size": 11008,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
    },
    "llama-70b": _LLAMA
    | {
        "num_layers": 80,
        "hidden_size": 8192,
        "num_heads": 64,
        "num_query_groups": 8,
        "ffn_hidden_size": 28672,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
    },
}
