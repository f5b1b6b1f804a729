"""How many parameters a model has, by arithmetic on its config."""

from megatron_lite.config.schema import ModelConfig


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model as they are published.

    Published counts hold the vocabulary's own rows, or the padded ones where a release fixes the padding: so
    `padded_vocab_size` is counted when it is given, and padding that only follows from a multiple is not.
    """
    rows = model.padded_vocab_size or model.vocab_size
    embeddings = rows * model.hidden_size * (1 if model.tie_embeddings else 2)
    if model.position == "learned":
        embeddings += model.max_position_embeddings * model.hidden_size
    if model.top_query_layer:
        embeddings += model.max_position_embeddings * model.hidden_size
    blocks = model.num_layers + int(model.top_query_layer)
    return embeddings + blocks * block_parameters(model) + _norm_parameters(model)


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one transformer block: attention, MLP and two norms."""
    hidden, ffn = model.hidden_size, model.ffn_size
    query, key_value = model.num_heads * model.head_size, 2 * model.query_groups * model.head_size
    up = 2 * ffn if model.activation == "swiglu" else ffn
    weights = hidden * (query + key_value) + query * hidden + hidden * up + ffn * hidden
    biases = (query + key_value) + hidden + up + hidden if model.bias else 0
    return weights + biases + 2 * _norm_parameters(model)


def _norm_parameters(model: ModelConfig) -> int:
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)
