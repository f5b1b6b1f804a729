"""The families of models in Hugging Face's format: one row with class, config.json and names for each model type.
Source: transformers, the configuration_*.py and modeling_*.py of each model type.
"""

from collections.abc import Sequence
from functools import partial

from megatron_lite.convert import huggingface_names as names_of
from megatron_lite.convert import huggingface_special as special
from megatron_lite.convert.huggingface_family import Family
from megatron_lite.convert.huggingface_parts import (
    ACTIVATIONS,
    GATED,
    NO_ROPE,
    T5_ACTIVATIONS,
    Part,
    biases,
    copied,
    dropouts,
    expected,
    fixed,
    flag,
    mapped,
    optional,
    same,
    scaled,
    sizes,
    window,
)
from megatron_lite.convert.huggingface_rope import rope

_SIZES = sizes(num_layers="num_hidden_layers", hidden_size="hidden_size", num_heads="num_attention_heads")
_VOCABULARY = (*sizes(vocab_size="vocab_size"), same("init_std", "initializer_range", 0.02))
_ATTENTION_DROPOUT = (same("attention_dropout", "attention_dropout", 0.0), fixed(hidden_dropout=0.0))
_GROUPS = (same("num_query_groups", "num_key_value_heads", "num_heads"), same("head_dim", "head_dim", 0))
_ATTENTION_BIAS = biases("attention_bias", mlp=False)


def _modern(
    *parts: Part,
    activation: str = "hidden_act",
    eps: str = "rms_norm_eps",
    dropout: Sequence[Part] = _ATTENTION_DROPOUT,
) -> tuple[Part, ...]:
    """What Llama and its successors share: RMSNorm, a gate, grouped queries."""
    return (
        *_SIZES,
        *_GROUPS,
        *_VOCABULARY,
        *sizes(ffn_hidden_size="intermediate_size"),
        same("max_position_embeddings", "max_position_embeddings", 2048),
        fixed(norm="layernorm" if eps == "layer_norm_eps" else "rmsnorm"),
        same("norm_eps", eps, 1e-6),
        mapped("activation", activation, GATED, "silu" if activation == "hidden_act" else "gelu_pytorch_tanh"),
        *dropout,
        *parts,
    )


_GEMMA = (
    fixed(zero_centered_norm=True),
    Part(special.read_gemma_scale, lambda model: {}),
    expected(use_bidirectional_attention=False),
    _ATTENTION_BIAS,
)


def _gemma_2(cls: str, softcaps: tuple[float | None, float | None], *parts: Part) -> Family:
    """Gemma 2 and 3; `softcaps` are the defaults of attention's and of the logits'."""
    return Family(
        cls,
        _modern(
            *_GEMMA,
            fixed(norm_placement="sandwich"),
            expected(hidden_act="gelu_pytorch_tanh"),
            scaled("attention_scale", "query_pre_attn_scalar", 256, -0.5),
            *parts,
            optional("attention_softcap", "attn_logit_softcapping", softcaps[0]),
            optional("logit_softcap", "final_logit_softcapping", softcaps[1]),
            activation="hidden_activation",
        ),
        names_of.GEMMA2,
        tied=True,
    )


_COHERE = (
    fixed(norm_bias=False, residual="parallel_shared_norm"),
    same("logit_scale", "logit_scale", 0.0625),
    expected(use_qk_norm=False),
    _ATTENTION_BIAS,
)
_QWEN_WINDOW = window(0, flag=True)


_GPT2_SIZES = (
    *sizes(num_layers="n_layer", hidden_size="n_embd", num_heads="n_head", max_position_embeddings="n_positions"),
    same("ffn_hidden_size", "n_inner", 0),
    same("norm_eps", "layer_norm_epsilon", 1e-5),
    mapped("activation", "activation_function", ACTIVATIONS, "gelu_new"),
    dropouts("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *_VOCABULARY,
)


_GPT2 = Family(
    "GPT2LMHeadModel",
    (*_GPT2_SIZES, Part(special.read_positions, lambda model: {})),
    names_of.GPT2,
    prefix="transformer.",
    embedding="transformer.wte.weight",
    transposed=("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
    tied=True,
)
_LLAMA_LIKE = partial(Family, names=names_of.LLAMA)
FAMILIES: dict[str, Family] = {  # of two families that compute a model, an export takes the first
    "gpt2": _GPT2,
    "llama": _LLAMA_LIKE("LlamaForCausalLM", _modern(rope(), biases("attention_bias", "mlp_bias"))),
    "qwen2": _LLAMA_LIKE(
        "Qwen2ForCausalLM", _modern(rope(), fixed(bias="qkv"), _QWEN_WINDOW, expected(use_mrope=False))
    ),
    "qwen3": _LLAMA_LIKE("Qwen3ForCausalLM", _modern(rope(), _ATTENTION_BIAS, fixed(qk_norm="head"), _QWEN_WINDOW)),
    "mistral": _LLAMA_LIKE("MistralForCausalLM", _modern(rope(), fixed(bias=False), window())),
    "smollm3": _LLAMA_LIKE(
        "SmolLM3ForCausalLM",
        _modern(rope(), biases("attention_bias", "mlp_bias"), NO_ROPE, window(0, flag=True)),
        tied=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _modern(rope(), _ATTENTION_BIAS, fixed(norm_placement="output", qk_norm="full")),
        names_of.OLMO2,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _modern(window(4), rope(local=True), _ATTENTION_BIAS, fixed(norm_placement="output", qk_norm="full")),
        names_of.OLMO2,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _modern(
            rope(partial=True),
            fixed(bias=False),
            expected(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1),
            window(),
            dropout=[dropouts("resid_pdrop", "embd_pdrop", "attention_dropout")],
        ),
        names_of.PHI3,
    ),
    "gemma": _LLAMA_LIKE(
        "GemmaForCausalLM", _modern(rope(), *_GEMMA, expected(hidden_activation="gelu_pytorch_tanh")), tied=True
    ),
    "gemma2": _gemma_2("Gemma2ForCausalLM", (50.0, 30.0), rope(), window(2)),
    "gemma3_text": _gemma_2("Gemma3ForCausalLM", (None, None), fixed(qk_norm="head"), window(6), rope(local=True)),
    "granite": _LLAMA_LIKE(
        "GraniteForCausalLM",
        _modern(
            rope(),
            biases("attention_bias", "mlp_bias"),
            same("embedding_scale", "embedding_multiplier", 1.0),
            same("residual_scale", "residual_multiplier", 1.0),
            scaled("logit_scale", "logits_scaling", 1.0, -1),
            scaled("attention_scale", "attention_multiplier", 1.0, 1),
        ),
    ),
    "cohere": Family(
        "CohereForCausalLM",
        _modern(rope(), *_COHERE, eps="layer_norm_eps"),
        names_of.LLAMA,
        orders={"self_attention.linear_qkv": special.interleaved},
        tied=True,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _modern(rope(), *_COHERE, window(4), copied("no_rope_freq", "window_attn_skip_freq"), eps="layer_norm_eps"),
        names_of.LLAMA,
        orders={"self_attention.linear_qkv": special.interleaved},
        tied=True,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        (
            *_SIZES,
            *_GROUPS,
            *_VOCABULARY,
            *sizes(ffn_hidden_size="intermediate_size", max_position_embeddings="max_position_embeddings"),
            same("norm_eps", "norm_epsilon", 1e-5),
            mapped("activation", "hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
            dropouts("residual_dropout", "embedding_dropout", "attention_dropout"),
            flag("bias", "use_bias", (False, True), True),
            rope(),
            window(),
            fixed(norm="layernorm"),
            expected(mlp_type="default", norm_type="layer_norm"),
        ),
        names_of.STARCODER2,
        tied=True,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        (
            *_SIZES,
            *_VOCABULARY,
            *sizes(ffn_hidden_size="intermediate_size", max_position_embeddings="max_position_embeddings"),
            same("norm_eps", "layer_norm_eps", 1e-5),
            mapped("activation", "hidden_act", ACTIVATIONS, "gelu"),
            dropouts("hidden_dropout", "", "attention_dropout"),
            biases("attention_bias", mlp=True, default=True),
            rope(partial=True, percent=0.25, old=("rotary_emb_base", "rotary_pct")),
            Part(special.read_neox_parallel, lambda model: {"use_parallel_residual": model.residual == "parallel"}),
        ),
        names_of.GPT_NEOX,
        prefix="gpt_neox.",
        embedding="gpt_neox.embed_in.weight",
        head="embed_out.weight",
        orders={"self_attention.linear_qkv": special.grouped},
    ),
    "falcon": Family(
        "FalconForCausalLM",
        (
            *_SIZES,
            *_VOCABULARY,
            same("max_position_embeddings", "max_position_embeddings", 2048),
            same("norm_eps", "layer_norm_epsilon", 1e-5),
            mapped("activation", "activation", ACTIVATIONS, "gelu"),
            dropouts("hidden_dropout", "", "attention_dropout"),
            flag("bias", "bias", (False, True), False),
            rope(),
            expected(apply_residual_connection_post_layernorm=False),
            Part(special.read_falcon, special.write_falcon),
        ),
        names_of.FALCON,
        prefix="transformer.",
        embedding="transformer.word_embeddings.weight",
        orders={"self_attention.linear_qkv": special.grouped},
        tied=True,
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        (
            *_GPT2_SIZES,
            Part(special.read_rotary_dim, lambda model: {"rotary_dim": model.rotary_size}),
            expected(rotary=True),
            fixed(bias="mlp", head_bias=True, residual="parallel_shared_norm"),
        ),
        names_of.GPTJ,
        prefix="transformer.",
        embedding="transformer.wte.weight",
        orders={"self_attention.linear_qkv": special.interleaved},
    ),
    "phi": Family(
        "PhiForCausalLM",
        (
            *_SIZES,
            *_GROUPS,
            *_VOCABULARY,
            *sizes(ffn_hidden_size="intermediate_size", max_position_embeddings="max_position_embeddings"),
            same("norm_eps", "layer_norm_eps", 1e-5),
            mapped("activation", "hidden_act", ACTIVATIONS, "gelu_new"),
            dropouts("resid_pdrop", "embd_pdrop", "attention_dropout"),
            rope(partial=True, percent=0.5),
            expected(qk_layernorm=False),
            fixed(head_bias=True, residual="parallel_shared_norm"),
        ),
        names_of.PHI,
    ),
    "opt": Family(
        "OPTForCausalLM",
        (
            *_SIZES,
            *sizes(ffn_hidden_size="ffn_dim", max_position_embeddings="max_position_embeddings"),
            *sizes(vocab_size="vocab_size"),
            same("init_std", "init_std", 0.02),
            mapped("activation", "activation_function", ACTIVATIONS, "relu"),
            dropouts("dropout", "", "attention_dropout"),
            flag("bias", "enable_bias", (False, True), True),
            expected(do_layer_norm_before=True, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True),
            Part(
                lambda fields, so_far: (
                    fields.expect(
                        "word_embed_proj_dim",
                        fields.take("word_embed_proj_dim", so_far["hidden_size"]),
                        so_far["hidden_size"],
                    )
                    or {}
                ),
                lambda model: {"word_embed_proj_dim": model.hidden_size},
            ),
            expected(layerdrop=0.0, activation_dropout=0.0),
        ),
        names_of.OPT,
        embedding="model.decoder.embed_tokens.weight",
        orders={"embedding.position_embeddings": special.after_two},
        tied=True,
    ),
    "bert": Family(
        "BertForMaskedLM",
        (
            fixed(architecture="encoder", norm_placement="post", embedding_norm=True),
            expected(is_decoder=False, position_embedding_type="absolute"),
            *_SIZES,
            *_VOCABULARY,
            *sizes(ffn_hidden_size="intermediate_size", max_position_embeddings="max_position_embeddings"),
            same("norm_eps", "layer_norm_eps", 1e-12),
            mapped("activation", "hidden_act", ACTIVATIONS, "gelu"),
            Part(special.read_tokentypes, lambda model: {"type_vocab_size": model.num_tokentypes}),
            dropouts("hidden_dropout_prob", "", "attention_probs_dropout_prob"),
        ),
        names_of.BERT,
        prefix="bert.",
        embedding="bert.embeddings.word_embeddings.weight",
        head="cls.predictions.decoder.weight",
        copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        tied=True,
        architecture="encoder",
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        (
            fixed(architecture="encoder_decoder", norm="rmsnorm", position="relative", bias=False),
            fixed(attention_scale=1.0, embedding_init_std=1.0),
            *sizes(num_encoder_layers="num_layers", hidden_size="d_model", num_heads="num_heads", head_dim="d_kv"),
            same("num_layers", "num_decoder_layers", "num_encoder_layers"),
            *sizes(ffn_hidden_size="d_ff", vocab_size="vocab_size"),
            same("max_position_embeddings", "n_positions", 512),
            same("norm_eps", "layer_norm_epsilon", 1e-6),
            mapped("activation", "feed_forward_proj", T5_ACTIVATIONS, "relu"),
            same("relative_buckets", "relative_attention_num_buckets", 32),
            same("relative_max_distance", "relative_attention_max_distance", 128),
            expected(is_encoder_decoder=True),
            Part(
                special.read_t5,
                lambda model: {"dropout_rate": model.hidden_dropout, "scale_decoder_outputs": model.logit_scale != 1.0},
            ),
        ),
        names_of.T5,
        prefix="",
        embedding="shared.weight",
        copies={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
        tied=True,
        architecture="encoder_decoder",
    ),
}
