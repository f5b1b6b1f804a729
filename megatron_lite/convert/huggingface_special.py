"""Parts of a config.json that one family alone has, and the orders of rows in fused tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.huggingface_fields import Fields
from megatron_lite.convert.huggingface_parts import GATED, Ours


def grouped(model: ModelConfig) -> Sequence[Tensor | None]:
    """One tensor with, for each key/value group, its queries, its key and its value."""
    heads, groups, size = model.num_heads, model.query_groups, model.head_size
    rows = torch.arange((heads + 2 * groups) * size)
    query, key, value = (part.view(groups, -1, size) for part in rows.split([heads * size, *[groups * size] * 2]))
    return [torch.cat((query, key, value), dim=1).flatten()]


def interleaved(model: ModelConfig) -> Sequence[Tensor | None]:
    """Rotated pairs are neighbours; element i pairs with i + r/2 in ours."""

    def rows(heads: int) -> Tensor:
        own = torch.arange(heads * model.head_size).view(heads, model.head_size)
        first, second = own[:, : model.rotary_size].chunk(2, dim=1)
        return torch.cat((torch.stack((first, second), 2).flatten(1), own[:, model.rotary_size :]), 1).flatten()

    return [rows(model.num_heads), rows(model.query_groups), None]


def after_two(model: ModelConfig) -> Sequence[Tensor | None]:
    """OPT's table of positions starts with two rows that a text without padding never reads."""
    return [torch.cat((torch.full((2,), -1), torch.arange(model.max_position_embeddings)))]


def read_gemma_scale(fields: Fields, so_far: Ours) -> Ours:
    hidden = so_far["hidden_size"]
    return {"embedding_scale": hidden**0.5 if isinstance(hidden, int) and hidden > 0 else 1.0}


def read_gemma_activation(fields: Fields, so_far: Ours) -> Ours:
    """Gemma 1: version 4 of transformers takes `hidden_activation`, version 5 `hidden_act`, and both must agree.

    The published configs have `gelu` in `hidden_act`, and the weights are for its tanh approximation.
    """
    names = {**GATED, "gelu": "geglu"}
    stated, other = fields.take("hidden_act"), fields.take("hidden_activation", null=None)
    if not isinstance(stated, str) or stated not in names:
        raise fields.error("hidden_act", stated, f"ours are {', '.join(names)}")
    if other is not None and (not isinstance(other, str) or GATED.get(other) != names[stated]):
        raise fields.error("hidden_activation", other, f"hidden_act is {stated!r}")
    return {"activation": names[stated]}


def write_gemma_activation(model: ModelConfig) -> Ours:
    name = "gelu_pytorch_tanh" if model.activation == "geglu" else "silu"
    return {"hidden_act": name, "hidden_activation": name}


def read_cohere2_positions(fields: Fields, so_far: Ours) -> Ours:
    """Layers without a window have no positions."""
    return {"no_rope_freq": so_far["window_attn_skip_freq"] if so_far["window_size"] else 1}


def read_neox_parallel(fields: Fields, so_far: Ours) -> Ours:
    value = fields.take_as("use_parallel_residual", bool)
    return {"residual": "parallel" if value else "sequential"}


def read_falcon(fields: Fields, so_far: Ours) -> Ours:
    """Falcon 7B has one key/value head and one norm; `new_decoder_architecture`, of 40B, any number of each."""
    fields.expect("alibi", fields.take("alibi"), False)
    fields.expect("parallel_attn", fields.take("parallel_attn"), True)
    new, multi_query = (fields.take_as(name, bool) for name in ("new_decoder_architecture", "multi_query"))
    groups, norms = (
        fields.take("num_kv_heads", null=so_far["num_heads"]),
        fields.take("num_ln_in_parallel_attn", null=2),
    )
    hidden, ffn = so_far["hidden_size"], fields.take("ffn_hidden_size", null=0)
    fields.expect("num_ln_in_parallel_attn", norms, 1, 2)
    old_groups = 1 if multi_query else so_far["num_heads"]
    return {
        "num_query_groups": groups if new else old_groups,
        "residual": "parallel" if new and norms == 2 else "parallel_shared_norm",
        "ffn_hidden_size": ffn or 4 * hidden,
    }


def write_falcon(model: ModelConfig) -> Ours:
    """The fields of 40B, which also describe 7B."""
    return {
        "alibi": False,
        "parallel_attn": True,
        "new_decoder_architecture": True,
        "multi_query": True,
        "num_kv_heads": model.query_groups,
        "num_ln_in_parallel_attn": 2 if model.residual == "parallel" else 1,
        "ffn_hidden_size": model.ffn_size,
    }


def read_rotary_dim(fields: Fields, so_far: Ours) -> Ours:
    rotated, hidden, heads = fields.take("rotary_dim"), so_far["hidden_size"], so_far["num_heads"]
    try:
        percent = rotated * heads / hidden
    except (TypeError, ZeroDivisionError):
        percent = 0
    if not 0 < percent <= 1:
        raise fields.error("rotary_dim", rotated, "expected a part of the head size")
    return {"position": "rotary", "rotary_percent": percent}


def read_t5(fields: Fields, so_far: Ours) -> Ours:
    """The scale of T5's logits, and its one dropout."""
    kind, hidden, tied = so_far["activation"], so_far["hidden_size"], fields.take("tie_word_embeddings")
    inner = {"relu": "relu", "geglu": "gelu_new"}[kind]
    fields.expect("dense_act_fn", fields.take("dense_act_fn", inner), inner)
    fields.expect("is_gated_act", fields.take("is_gated_act", kind != "relu"), kind != "relu")
    # Version 5 has a field for what `tie_word_embeddings` meant before.
    is_scaled = fields.take("scale_decoder_outputs", tied)
    dropout = fields.take("dropout_rate")
    return {
        "tie_embeddings": tied,
        "logit_scale": hidden**-0.5 if is_scaled and isinstance(hidden, int) and hidden > 0 else 1.0,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
    }


def write_original_positions(model: ModelConfig) -> Ours:
    """The field of Phi 3 that its scaling reads; without a scaling it has no effect."""
    return {"original_max_position_embeddings": model.rotary_original_positions or model.max_position_embeddings}


def read_positions(fields: Fields, so_far: Ours) -> Ours:
    positions = so_far["max_position_embeddings"]
    fields.expect("n_ctx", fields.take("n_ctx", positions), positions)
    return {}


def read_projection(fields: Fields, so_far: Ours) -> Ours:
    """OPT 350M has word embeddings of another width than the residual stream."""
    hidden = so_far["hidden_size"]
    fields.expect("word_embed_proj_dim", fields.take("word_embed_proj_dim", null=hidden), hidden)
    return {}


def read_tokentypes(fields: Fields, so_far: Ours) -> Ours:
    """BERT always has token types."""
    types = fields.take("type_vocab_size")
    if types == 0:
        raise fields.error("type_vocab_size", types, "expected at least 1")
    return {"num_tokentypes": types}
