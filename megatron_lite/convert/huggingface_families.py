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
_VOCABULARY = (*sizes(vocab_size="vocab_size"), same("init_std", "initializer_range"))
_ATTENTION_DROPOUT = (same("attention_dropout", "attention_dropout"), fixed(hidden_dropout=0.0))
_GROUPS = (same("num_query_groups", "num_key_value_heads", null="num_heads"), same("head_dim", "head_dim", null=0))
_ATTENTION_BIAS = biases("attention_bias", mlp=False)
_GEMMA_ACTIVATION = Part(special.read_gemma_activation, special.write_gemma_activation)


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
        same("max_position_embeddings", "max_position_embeddings"),
        fixed(norm="layernorm" if eps == "layer_norm_eps" else "rmsnorm"),
        same("norm_eps", eps),
        mapped("activation", activation, GATED) if activation else _GEMMA_ACTIVATION,
        *dropout,
        *parts,
    )


_GEMMA = (
    fixed(zero_centered_norm=True),
    Part(special.read_gemma_scale, lambda model: {}),
    expected(use_bidirectional_attention=False),
    _ATTENTION_BIAS,
)


def _gemma_2(cls: str, *parts: Part) -> Family:
    """Gemma 2 and 3."""
    return Family(
        cls,
        _modern(
            *_GEMMA,
            fixed(norm_placement="sandwich"),
            expected(hidden_act="gelu_pytorch_tanh"),
            scaled("attention_scale", "query_pre_attn_scalar", -0.5),
            *parts,
            optional("logit_softcap", "final_logit_softcapping"),
            activation="hidden_activation",
        ),
        names_of.GEMMA2,
    )


_COHERE = (
    fixed(norm_bias=False, residual="parallel_shared_norm"),
    same("logit_scale", "logit_scale"),
    expected(use_qk_norm=False),
    _ATTENTION_BIAS,
)
_COHERE_2_POSITIONS = Part(special.read_cohere2_positions, lambda model: {})
_QWEN_WINDOW = window(0, flag=True)


_GPT2_SIZES = (
    *sizes(num_layers="n_layer", hidden_size="n_embd", num_heads="n_head", max_position_embeddings="n_positions"),
    same("ffn_hidden_size", "n_inner", null=0),
    same("norm_eps", "layer_norm_epsilon"),
    mapped("activation", "activation_function", ACTIVATIONS),
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
        _modern(rope(), biases("attention_bias", "mlp_bias"), NO_ROPE, window(0, flag=True, no_rope=True)),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _modern(rope(), _ATTENTION_BIAS, fixed(norm_placement="output", qk_norm="full")),
        names_of.OLMO2,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _modern(window(4), rope(local="rope_theta"), _ATTENTION_BIAS, fixed(norm_placement="output", qk_norm="full")),
        names_of.OLMO2,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _modern(
            Part(lambda fields, so_far: {}, special.write_original_positions),
            rope(partial=True, types=("longrope",)),
            fixed(bias=False),
            expected(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1),
            window(),
            dropout=[dropouts("resid_pdrop", "embd_pdrop", "attention_dropout")],
        ),
        names_of.PHI3,
    ),
    "gemma": _LLAMA_LIKE("GemmaForCausalLM", _modern(rope(), *_GEMMA, activation="")),
    "gemma2": _gemma_2("Gemma2ForCausalLM", rope(), window(2), optional("attention_softcap", "attn_logit_softcapping")),
    "gemma3_text": _gemma_2(
        "Gemma3ForCausalLM",
        expected(attn_logit_softcapping=None),
        fixed(qk_norm="head"),
        window(6, named=True),
        rope(local="rope_local_base_freq"),
    ),
    "granite": _LLAMA_LIKE(
        "GraniteForCausalLM",
        _modern(
            rope(),
            biases("attention_bias", "mlp_bias"),
            same("embedding_scale", "embedding_multiplier"),
            same("residual_scale", "residual_multiplier"),
            scaled("logit_scale", "logits_scaling", -1),
            scaled("attention_scale", "attention_multiplier", 1),
        ),
    ),
    "cohere": Family(
        "CohereForCausalLM",
        _modern(rope(), *_COHERE, eps="layer_norm_eps"),
        names_of.LLAMA,
        orders={"self_attention.linear_qkv": special.interleaved},
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _modern(rope(), *_COHERE, window(4, named=True), _COHERE_2_POSITIONS, eps="layer_norm_eps"),
        names_of.LLAMA,
        orders={"self_attention.linear_qkv": special.interleaved},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        (
            *_SIZES,
            *_GROUPS,
            *_VOCABULARY,
            *sizes(ffn_hidden_size="intermediate_size", max_position_embeddings="max_position_embeddings"),
            same("norm_eps", "norm_epsilon"),
            mapped("activation", "hidden_act", ACTIVATIONS),
            dropouts("residual_dropout", "embedding_dropout", "attention_dropout"),
            flag("bias", "use_bias", (False, True)),
            rope(),
            window(),
            fixed(norm="layernorm"),
            expected(mlp_type="default", norm_type="layer_norm"),
        ),
        names_of.STARCODER2,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        (
            *_SIZES,
            *_VOCABULARY,
            *sizes(ffn_hidden_size="intermediate_size", max_position_embeddings="max_position_embeddings"),
            same("norm_eps", "layer_norm_eps"),
            mapped("activation", "hidden_act", ACTIVATIONS),
            dropouts("hidden_dropout", "", "attention_dropout"),
            biases("attention_bias", mlp=True),
            rope(partial=True, old=("rotary_emb_base", "rotary_pct")),
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
            same("max_position_embeddings", "max_position_embeddings"),
            same("norm_eps", "layer_norm_epsilon"),
            mapped("activation", "activation", ACTIVATIONS),
            dropouts("hidden_dropout", "", "attention_dropout"),
            flag("bias", "bias", (False, True)),
            rope(),
            expected(apply_residual_connection_post_layernorm=False),
            Part(special.read_falcon, special.write_falcon),
        ),
        names_of.FALCON,
        prefix="transformer.",
        embedding="transformer.word_embeddings.weight",
        orders={"self_attention.linear_qkv": special.grouped},
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        (
            *_GPT2_SIZES,
            Part(special.read_rotary_dim, lambda model: {"rotary_dim": model.rotary_size}),
            expected(rotary=True, tie_word_embeddings=False),
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
            same("norm_eps", "layer_norm_eps"),
            mapped("activation", "hidden_act", ACTIVATIONS),
            dropouts("resid_pdrop", "embd_pdrop", "attention_dropout"),
            rope(partial=True),
            expected(qk_layernorm=False, tie_word_embeddings=False),
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
            same("init_std", "init_std"),
            mapped("activation", "activation_function", ACTIVATIONS),
            dropouts("dropout", "", "attention_dropout"),
            flag("bias", "enable_bias", (False, True)),
            expected(do_layer_norm_before=True, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True),
            Part(special.read_projection, lambda model: {"word_embed_proj_dim": model.hidden_size}),
            expected(layerdrop=0.0, activation_dropout=0.0),
        ),
        names_of.OPT,
        embedding="model.decoder.embed_tokens.weight",
        orders={"embedding.position_embeddings": special.after_two},
    ),
    "bert": Family(
        "BertForMaskedLM",
        (
            fixed(architecture="encoder", norm_placement="post", embedding_norm=True),
            expected(is_decoder=False, position_embedding_type="absolute"),
            *_SIZES,
            *_VOCABULARY,
            *sizes(ffn_hidden_size="intermediate_size", max_position_embeddings="max_position_embeddings"),
            same("norm_eps", "layer_norm_eps"),
            mapped("activation", "hidden_act", ACTIVATIONS),
            Part(special.read_tokentypes, lambda model: {"type_vocab_size": model.num_tokentypes}),
            dropouts("hidden_dropout_prob", "", "attention_probs_dropout_prob"),
        ),
        names_of.BERT,
        prefix="bert.",
        embedding="bert.embeddings.word_embeddings.weight",
        head="cls.predictions.decoder.weight",
        copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        architecture="encoder",
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        (
            fixed(architecture="encoder_decoder", norm="rmsnorm", position="relative", bias=False),
            fixed(attention_scale=1.0, embedding_init_std=1.0),
            *sizes(num_encoder_layers="num_layers", hidden_size="d_model", num_heads="num_heads", head_dim="d_kv"),
            same("num_layers", "num_decoder_layers", null="num_encoder_layers"),
            *sizes(ffn_hidden_size="d_ff", vocab_size="vocab_size"),
            same("max_position_embeddings", "n_positions"),
            same("norm_eps", "layer_norm_epsilon"),
            mapped("activation", "feed_forward_proj", T5_ACTIVATIONS),
            same("relative_buckets", "relative_attention_num_buckets"),
            same("relative_max_distance", "relative_attention_max_distance"),
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
        architecture="encoder_decoder",
    ),
}
