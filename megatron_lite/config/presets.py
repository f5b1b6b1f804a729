"""Models by name: published sizes and kinds, as values of `ModelConfig` fields.

Sources: GPT-2 and Brown et al., arXiv 2005.14165, table 2.1 (gpt); Zheng et al., arXiv 2303.17568 and its released
code (codegeex); Touvron et al., arXiv 2307.09288, and the released configs (llama); Devlin et al., arXiv 1810.04805,
section 3, and its released configs (bert); Raffel et al., arXiv 1910.10683, section 3.1.1 and appendix C, and its
released configs (t5).
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

_BERT: dict[str, Any] = {
    "architecture": "encoder",
    "vocab_size": 30522,
    "norm_eps": 1e-12,
    "norm_placement": "post",
    "embedding_norm": True,
    "num_tokentypes": 2,
    "binary_head": True,
}
_T5: dict[str, Any] = {
    "architecture": "encoder_decoder",
    "vocab_size": 32128,
    "head_dim": 64,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "activation": "relu",
    "position": "relative",
    "bias": False,
    "attention_scale": 1.0,
    "embedding_init_std": 1.0,
}


def _sizes(layers: int, hidden: int, heads: int, positions: int, **others: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "max_position_embeddings": positions}
    return sizes | others


PRESETS: dict[str, dict[str, Any]] = {  # layers, hidden size, heads, positions
    "gpt-125m": _GPT | _sizes(12, 768, 12, 1024),
    "gpt-345m": _GPT | _sizes(24, 1024, 16, 1024),
    "gpt-1.3b": _GPT | _sizes(24, 2048, 16, 2048),
    "gpt-175b": _GPT | _sizes(96, 12288, 96, 2048),
    # 52,224 is 51 * 1024, as released.
    "codegeex-13b": _CODEGEEX | _sizes(39, 5120, 40, 2048, vocab_size=50400, padded_vocab_size=52224),
    # Small enough to learn on a laptop's CPU; its vocabulary is the tokenizer's.
    "codegeex-mini": _CODEGEEX | _sizes(4, 256, 4, 256),
    "bert-base": _BERT | _sizes(12, 768, 12, 512),
    "bert-large": _BERT | _sizes(24, 1024, 16, 512),
    # Layers of the encoder, and as many of the decoder.
    "t5-small": _T5 | _sizes(6, 512, 8, 512, ffn_hidden_size=2048, logit_scale=512**-0.5),
    "t5-base": _T5 | _sizes(12, 768, 12, 512, ffn_hidden_size=3072, logit_scale=768**-0.5),
    "llama-160m": _LLAMA | _sizes(12, 768, 12, 2048, ffn_hidden_size=3072, norm_eps=1e-6),
    "llama-7b": _LLAMA | _sizes(32, 4096, 32, 4096, ffn_hidden_size=11008, norm_eps=1e-5),
    "llama-70b": _LLAMA | _sizes(80, 8192, 64, 4096, num_query_groups=8, ffn_hidden_size=28672, norm_eps=1e-5),
}
