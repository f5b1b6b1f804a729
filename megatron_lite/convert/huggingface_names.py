"""The names of tensors in Hugging Face's models, one `Family` for each model type.

A name is without `.weight` or `.bias` at its end, and `*` stands for the number of a layer. Several names are fused
parts of our tensor, in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """A model type. `embedding` is its word embedding; a model without a head has names without `prefix`."""

    prefix: str
    embedding: str
    names: Mapping[str, str]  # ours -> theirs
    head: str = "lm_head.weight"
    copies: Mapping[str, str] = field(default_factory=dict)  # equal tensors that some files have -> the original

    def theirs(self, ours: str, number: str, *, gated: bool) -> list[str]:
        """The names of a parameter; `ours` has `*` for the number of its layer."""
        found = self.names.get(f"{ours} with gate", "") if gated else ""
        return (found or self.names[ours]).replace("*", number).split()


def _layers(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """The names of parameters inside a layer, with the prefixes of the layer."""
    return {f"{ours}{name}": " ".join(theirs + part for part in parts.split()) for name, parts in names.items()}


_GPT2 = Family(
    prefix="transformer.",
    embedding="transformer.wte.weight",
    names={
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
        **_layers(
            "decoder.layers.*.",
            "transformer.h.*.",
            {
                "input_layernorm": "ln_1",
                "self_attention.linear_qkv": "attn.c_attn",
                "self_attention.linear_proj": "attn.c_proj",
                "pre_mlp_layernorm": "ln_2",
                "mlp.linear_fc1": "mlp.c_fc",
                "mlp.linear_fc2": "mlp.c_proj",
            },
        ),
    },
)
_LLAMA = Family(
    prefix="model.",
    embedding="model.embed_tokens.weight",
    names={
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
        **_layers(
            "decoder.layers.*.",
            "model.layers.*.",
            {
                "input_layernorm": "input_layernorm",
                "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
                "self_attention.linear_proj": "self_attn.o_proj",
                "pre_mlp_layernorm": "post_attention_layernorm",
                "mlp.linear_fc1": "mlp.gate_proj mlp.up_proj",
                "mlp.linear_fc2": "mlp.down_proj",
            },
        ),
    },
)
_BERT = Family(
    prefix="bert.",
    embedding="bert.embeddings.word_embeddings.weight",
    head="cls.predictions.decoder.weight",
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    names={
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
    },
)


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


_T5 = Family(
    prefix="",
    embedding="shared.weight",
    copies={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    names={
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
    },
)
FAMILIES = {"gpt2": _GPT2, "llama": _LLAMA, "bert": _BERT, "t5": _T5}
