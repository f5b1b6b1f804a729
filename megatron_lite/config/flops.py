"""How many floating-point operations a model needs, by arithmetic on its config.

Counts the matrix products of the model itself, a multiply-add as two, backward as twice forward, causal
attention as half a square, or the part of it in the window. Recomputation is not counted, so these are the FLOPs of
"model FLOPs utilisation"; documents that a mask separates are not known here.
Source: Narayanan et al., arXiv 2104.04473, appendix; Korthikanti et al., arXiv 2205.05198, section 5.
"""

from megatron_lite.config.schema import ModelConfig


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Forward and backward FLOPs for one token of a sequence of `seq_length`, head included."""
    hidden, query = model.hidden_size, model.num_heads * model.head_size
    key_value = 2 * model.query_groups * model.head_size
    attention = hidden * (query + key_value) + query * hidden
    mlp = (3 if model.activation == "swiglu" else 2) * hidden * model.ffn_size
    blocks = model.num_layers + int(model.top_query_layer)
    scores = sum(2 * query * _mean_keys(model.window_of(layer), seq_length) for layer in range(blocks))  # two products
    forward_macs = blocks * (attention + mlp) + scores + hidden * model.padded_vocab
    return 3 * 2 * forward_macs


def _mean_keys(window: int, seq_length: int) -> float:
    """The mean number of keys that a query of a causal mask sees; the diagonal counts half."""
    width = min(window or seq_length, seq_length)
    return width - width**2 / (2 * seq_length)
