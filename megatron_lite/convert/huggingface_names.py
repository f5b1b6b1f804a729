"""The names of tensors in Hugging Face's models: ours -> theirs.

A name is without `.weight` or `.bias` at its end, and `*` stands for the number of a layer. Several names are fused
parts of our tensor, in order.
"""

from collections.abc import Mapping


def _layers(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """The names of parameters inside a layer, with the prefixes of the layer."""
    return {f"{ours}{name}": " ".join(theirs + part for part in parts.split()) for name, parts in names.items()}


def _decoder(prefix: str, ends: str, layers: Mapping[str, str]) -> dict[str, str]:
    """The names of a decoder: `ends` are the word embedding, the positions or `-`, the final norm and the head."""
    words, positions, norm, head = ends.split()
    return {
        "embedding.word_embeddings": prefix + words,
        **({} if positions == "-" else {"embedding.position_embeddings": prefix + positions}),
        "decoder.final_layernorm": prefix + norm,
        "output_layer": head,
        **_layers("decoder.layers.*.", f"{prefix}{'h' if prefix == 'transformer.' else 'layers'}.*.", layers),
    }


_QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_LLAMA_ENDS = "embed_tokens - norm lm_head"
_LLAMA_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": _QKV,
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.gate_proj mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
LLAMA = _decoder("model.", _LLAMA_ENDS, _LLAMA_LAYER)
_OUTPUT_NORMS = {
    "post_attention_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
OLMO2 = _decoder("model.", _LLAMA_ENDS, _LLAMA_LAYER | _OUTPUT_NORMS)
GEMMA2 = _decoder(
    "model.", _LLAMA_ENDS, _LLAMA_LAYER | _OUTPUT_NORMS | {"pre_mlp_layernorm": "pre_feedforward_layernorm"}
)
PHI3 = _decoder(
    "model.",
    _LLAMA_ENDS,
    _LLAMA_LAYER | {"self_attention.linear_qkv": "self_attn.qkv_proj", "mlp.linear_fc1": "mlp.gate_up_proj"},
)
STARCODER2 = _decoder(
    "model.", _LLAMA_ENDS, _LLAMA_LAYER | {"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}
)
PHI = _decoder(
    "model.",
    "embed_tokens - final_layernorm lm_head",
    _LLAMA_LAYER
    | {"self_attention.linear_proj": "self_attn.dense", "mlp.linear_fc1": "mlp.fc1", "mlp.linear_fc2": "mlp.fc2"},
)
OPT = _decoder(
    "model.decoder.",
    "embed_tokens embed_positions final_layer_norm lm_head",
    {
        "input_layernorm": "self_attn_layer_norm",
        "self_attention.linear_qkv": _QKV,
        "self_attention.linear_proj": "self_attn.out_proj",
        "pre_mlp_layernorm": "final_layer_norm",
        "mlp.linear_fc1": "fc1",
        "mlp.linear_fc2": "fc2",
    },
)
_WIDE_MLP = {"mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h"}
GPT_NEOX = _decoder(
    "gpt_neox.",
    "embed_in - final_layer_norm embed_out",
    {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        **_WIDE_MLP,
    },
)
FALCON = _decoder(
    "transformer.",
    "word_embeddings - ln_f lm_head",
    {
        "input_layernorm": "input_layernorm",
        "input_layernorm of two norms": "ln_attn",
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "ln_mlp",
        **_WIDE_MLP,
    },
)
GPT2 = _decoder(
    "transformer.",
    "wte wpe ln_f lm_head",
    {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    },
)
GPTJ = _decoder(
    "transformer.",
    "wte - ln_f lm_head",
    {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.q_proj attn.k_proj attn.v_proj",
        "self_attention.linear_proj": "attn.out_proj",
        "mlp.linear_fc1": "mlp.fc_in",
        "mlp.linear_fc2": "mlp.fc_out",
    },
)
BERT = {
    "embedding.word_embeddings": "bert.embeddings.word_embeddings",
    "embedding.position_embeddings": "bert.embeddings.position_embeddings",
    "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
    "embedding.layernorm": "bert.embeddings.LayerNorm",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layernorm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions",  # its bias
    "output_layer": "cls.predictions.decoder",
    "pooler": "bert.pooler.dense",
    "binary_head": "cls.seq_relationship",
    **_layers(
        "encoder.layers.*.",
        "bert.encoder.layer.*.",
        {
            "self_attention.linear_qkv": "attention.self.query attention.self.key attention.self.value",
            "self_attention.linear_proj": "attention.output.dense",
            "post_attention_layernorm": "attention.output.LayerNorm",
            "mlp.linear_fc1": "intermediate.dense",
            "mlp.linear_fc2": "output.dense",
            "post_mlp_layernorm": "output.LayerNorm",
        },
    ),
}


def _t5_layers(stack: str, mlp: int) -> dict[str, str]:
    """The layers of a stack of T5, in which the MLP is the sublayer number `mlp`."""
    attention, dense = "layer.0.SelfAttention.", f"layer.{mlp}.DenseReluDense."
    return _layers(
        f"{stack}.layers.*.",
        f"{stack}.block.*.",
        {
            "input_layernorm": "layer.0.layer_norm",
            "self_attention.linear_qkv": f"{attention}q {attention}k {attention}v",
            "self_attention.linear_proj": f"{attention}o",
            "pre_mlp_layernorm": f"layer.{mlp}.layer_norm",
            "mlp.linear_fc1": f"{dense}wi",
            "mlp.linear_fc1 with gate": f"{dense}wi_0 {dense}wi_1",
            "mlp.linear_fc2": f"{dense}wo",
        },
    )


T5 = {
    "embedding.word_embeddings": "shared",
    "encoder_relative_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "decoder_relative_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "encoder.final_layernorm": "encoder.final_layer_norm",
    "decoder.final_layernorm": "decoder.final_layer_norm",
    "output_layer": "lm_head",
    **_t5_layers("encoder", mlp=1),
    **_t5_layers("decoder", mlp=2),
    **_layers(
        "decoder.layers.*.",
        "decoder.block.*.layer.1.",
        {
            "pre_cross_attn_layernorm": "layer_norm",
            "cross_attention.linear_q": "EncDecAttention.q",
            "cross_attention.linear_kv": "EncDecAttention.k EncDecAttention.v",
            "cross_attention.linear_proj": "EncDecAttention.o",
        },
    ),
}
