"""The values of fields that a config.json of Hugging Face leaves out: one row for each model type, which is complete.

A field that a family reads and that is not in its row has no default: the file must have it. None is a null, for which
the part that reads the field has a meaning. Fields of version 4 of transformers have the values of its spellings.
Source: transformers, the configuration_*.py of each model type.
"""

from typing import Any

REQUIRED = object()

# fmt: off
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_positions": 1024, "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.1,
        "embd_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    "llama": {
        "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048, "initializer_range": 0.02,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False, "head_dim": None, "rope_theta": 10000.0,
    },
    "qwen2": {
        "num_key_value_heads": 32, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 32768,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28, "layer_types": None, "attention_dropout": 0.0,
        "rope_theta": 10000.0,
    },
    "qwen3": {
        "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
        "attention_dropout": 0.0, "rope_theta": 10000.0,
    },
    "mistral": {
        "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 131072,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "sliding_window": 4096,
        "attention_dropout": 0.0, "rope_theta": 10000.0,
    },
    "smollm3": {
        "num_key_value_heads": 4, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 32768,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": None,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, "attention_bias": False,
        "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": True, "rope_theta": 2000000.0,
    },
    "olmo2": {
        "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    },
    "olmo3": {
        "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None, "rope_theta": 500000.0,
        "rope_local_base_freq": 500000.0,  # a constant in version 5 of transformers, `rope_theta` in version 4
    },
    "phi3": {
        "num_key_value_heads": None, "head_dim": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096, "initializer_range": 0.02, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "sliding_window": None, "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    },
    "gemma": {
        "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "attention_bias": False, "attention_dropout": 0.0, "use_bidirectional_attention": None, "rope_theta": 10000.0,
        "hidden_activation": None,
    },
    "gemma2": {
        "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "attention_bias": False, "attention_dropout": 0.0, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        "use_bidirectional_attention": None, "rope_theta": 10000.0,
    },
    "gemma3_text": {
        "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072, "initializer_range": 0.02, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None, "attn_logit_softcapping": None,
        "use_bidirectional_attention": False, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    },
    "granite": {
        "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "attention_dropout": 0.0, "mlp_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0, "rope_theta": 10000.0,
    },
    "cohere": {
        "logit_scale": 0.0625, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 8192, "initializer_range": 0.02, "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "use_qk_norm": False,
        "rope_theta": REQUIRED,  # 10,000 in version 4 of transformers, 500,000 in version 5
    },
    "cohere2": {
        "logit_scale": 0.0625, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 8192, "initializer_range": 0.02, "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "sliding_window": 4096,
        "layer_types": None, "rope_theta": 10000.0,
    },
    "starcoder2": {
        "num_key_value_heads": 2, "head_dim": None, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "initializer_range": 0.018042, "norm_epsilon": 1e-5, "sliding_window": None,
        "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0, "use_bias": True,
        "tie_word_embeddings": True, "rope_theta": 10000.0,
    },
    "gpt_neox": {
        "hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0, "max_position_embeddings": 2048,
        "initializer_range": 0.02, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "use_parallel_residual": True, "attention_bias": True, "rotary_emb_base": 10000.0, "rotary_pct": 0.25,
    },
    "falcon": {
        "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "num_kv_heads": None, "alibi": False, "new_decoder_architecture": False,
        "multi_query": True, "parallel_attn": True, "bias": False, "max_position_embeddings": 2048,
        "ffn_hidden_size": None, "activation": "gelu", "tie_word_embeddings": True, "rope_theta": 10000.0,
    },
    "gptj": {
        "n_positions": 2048, "rotary_dim": 64, "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    "phi": {
        "num_key_value_heads": None, "head_dim": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attention_dropout": 0.0, "hidden_act": "gelu_new", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "qk_layernorm": False,
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
    "opt": {
        "max_position_embeddings": 2048, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
        "word_embed_proj_dim": None, "dropout": 0.1, "attention_dropout": 0.0, "activation_function": "relu",
        "layerdrop": 0.0, "init_std": 0.02, "enable_bias": True, "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    "bert": {
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    },
    "t5": {
        "num_decoder_layers": None, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu",
        "tie_word_embeddings": True, "n_positions": 512,
    },
}
# fmt: on
