"""Parts of a config.json that one family alone has, and the orders of rows in fused tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.huggingface_fields import Fields
from megatron_lite.convert.huggingface_parts import Ours


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


def read_neox_parallel(fields: Fields, so_far: Ours) -> Ours:
    value = fields.take("use_parallel_residual", True)
    fields.expect("use_parallel_residual", value, True, False)
    return {"residual": "parallel" if value else "sequential"}


def read_falcon(fields: Fields, so_far: Ours) -> Ours:
    """Falcon 7B has one key/value head and one norm; `new_decoder_architecture`, of 40B, any number of each."""
    fields.expect("alibi", fields.take("alibi", False), False)
    fields.expect("parallel_attn", fields.take("parallel_attn", True), True)
    new, multi_query = fields.take("new_decoder_architecture", False), fields.take("multi_query", True)
    groups, norms = fields.take("num_kv_heads", so_far["num_heads"]), fields.take("num_ln_in_parallel_attn", 2)
    hidden, ffn = so_far["hidden_size"], fields.take("ffn_hidden_size", 0)
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
    rotated, hidden, heads = fields.take("rotary_dim", 64), so_far["hidden_size"], so_far["num_heads"]
    try:
        return {"position": "rotary", "rotary_percent": rotated * heads / hidden}
    except (TypeError, ZeroDivisionError):
        raise fields.error("rotary_dim", rotated, "expected a part of the head size") from None


def read_t5(fields: Fields, so_far: Ours) -> Ours:
    """The scale of T5's logits, and its one dropout."""
    kind, hidden, tied = so_far["activation"], so_far["hidden_size"], fields.take("tie_word_embeddings", True)
    inner = {"relu": "relu", "geglu": "gelu_new"}[kind]
    fields.expect("dense_act_fn", fields.take("dense_act_fn", inner), inner)
    fields.expect("is_gated_act", fields.take("is_gated_act", kind != "relu"), kind != "relu")
    # Version 5 has a field for what `tie_word_embeddings` meant before.
    is_scaled = fields.take("scale_decoder_outputs", tied)
    dropout = fields.take("dropout_rate", 0.1)
    fields.take("initializer_factor", 1.0)
    return {
        "tie_embeddings": tied,
        "logit_scale": hidden**-0.5 if is_scaled and isinstance(hidden, int) and hidden > 0 else 1.0,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
    }


def read_positions(fields: Fields, so_far: Ours) -> Ours:
    positions = so_far["max_position_embeddings"]
    fields.expect("n_ctx", fields.take("n_ctx", positions), positions)
    return {}


def read_projection(fields: Fields, so_far: Ours) -> Ours:
    """OPT 350M has word embeddings of another width than the residual stream."""
    hidden = so_far["hidden_size"]
    fields.expect("word_embed_proj_dim", fields.take("word_embed_proj_dim", hidden), hidden)
    return {}


def read_tokentypes(fields: Fields, so_far: Ours) -> Ours:
    """BERT always has token types."""
    types = fields.take("type_vocab_size", 2)
    if types == 0:
        raise fields.error("type_vocab_size", types, "expected at least 1")
    return {"num_tokentypes": types}
