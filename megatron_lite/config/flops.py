"""How many floating-point operations a model needs, by arithmetic on its config.

Counts the matrix products of the model itself, a multiply-add as two, backward as twice forward, causal
attention as half a square, or the part of it in the window. Recomputation is not counted, so these are the FLOPs of
"model FLOPs utilisation"; documents that a mask separates are not known here.
Source: Narayanan et al., arXiv 2104.04473, appendix; Korthikanti et al., arXiv 2205.05198, section 5.
"""

from megatron_lite.config.schema import ModelConfig


def flops_per_token(model: ModelConfig, seq_length: int, decoder_length: int = 0) -> float:
    """Forward and backward FLOPs for one token of a sequence of `seq_length`, head included.

    For an `encoder_decoder` this is a token of the encoder, and `decoder_length` the tokens of the decoder's sequence:
    with those of all its tokens, divided by the encoder's.
    """
    hidden, query = model.hidden_size, model.num_heads * model.head_size
    key_value = 2 * model.query_groups * model.head_size
    block = hidden * (query + key_value) + query * hidden
    block += (3 if model.has_gate else 2) * hidden * model.ffn_size
    head = hidden * model.padded_vocab
    if model.architecture == "encoder":
        scores = sum(2 * query * _keys(model.window_of(layer), seq_length) for layer in range(model.num_layers))
        return 3 * 2 * (model.num_layers * block + scores + hidden * hidden + head)
    if model.architecture == "encoder_decoder":
        encoder = model.encoder_layers * (block + 2 * query * seq_length)
        decoder = model.num_layers * (block + 2 * query * _mean_keys(0, decoder_length)) + head
        cross = model.num_layers * (2 * hidden * query + 2 * query * seq_length)
        memory = model.num_layers * hidden * key_value  # keys and values of the encoder's output
        return 3 * 2 * (encoder + memory + (decoder + cross) * decoder_length / seq_length)
    blocks = model.num_layers + int(model.top_query_layer)
    scores = sum(2 * query * _mean_keys(model.window_of(layer), seq_length) for layer in range(blocks))  # two products
    return 3 * 2 * (blocks * block + scores + head)


def _keys(window: int, seq_length: int) -> float:
    """The number of keys that a query sees without a causal mask, where the ends of the sequence are far."""
    return min(2 * window - 1, seq_length) if window else seq_length


def _mean_keys(window: int, seq_length: int) -> float:
    """The mean number of keys that a query of a causal mask sees; the diagonal counts half."""
    width = min(window or seq_length, seq_length)
    return width - width**2 / (2 * seq_length)
