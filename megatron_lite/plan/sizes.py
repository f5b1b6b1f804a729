"""How many parameters a model has, and how many bytes its activations take, by arithmetic on the config."""

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.config.stages import layer_counts


def num_parameters(model: ModelConfig) -> int:
    """The parameters of the full model, as published.

    Published counts include the rows of the vocabulary, or padded rows where a release fixes the padding. So
    `padded_vocab_size` counts when it is given; padding to a multiple does not.
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
    """The parameters of one transformer block: attention, MLP and two norms."""
    hidden, ffn = model.hidden_size, model.ffn_size
    query, key_value = model.num_heads * model.head_size, 2 * model.query_groups * model.head_size
    up = 2 * ffn if model.activation == "swiglu" else ffn
    weights = hidden * (query + key_value) + query * hidden + hidden * up + ffn * hidden
    biases = (query + key_value) + hidden + up + hidden if model.bias else 0
    return weights + biases + 2 * _norm_parameters(model)


def _norm_parameters(model: ModelConfig) -> int:
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def largest_rank_parameters(config: Config) -> float:
    """The parameters of the rank with the most: its layers, and the embedding or head of the first and last stage."""
    model, parallel = config.model, config.parallel
    if model.query_groups < parallel.tensor:  # each rank holds a copy of one group
        model = model.model_copy(update={"num_query_groups": parallel.tensor})
    word, positions = model.padded_vocab * model.hidden_size, model.max_position_embeddings * model.hidden_size
    stages = [count * block_parameters(model) for count in layer_counts(model, parallel)]
    stages[0] += word + positions * (model.position == "learned")
    if len(stages) > 1 or not model.tie_embeddings:
        stages[-1] += word
    if model.top_query_layer:
        stages[-1] += block_parameters(model) + positions
    stages[-1] += _norm_parameters(model)
    return max(sum(stages[rank :: parallel.pipeline]) for rank in range(parallel.pipeline)) / parallel.tensor


def activation_bytes(config: Config, dp: int) -> float:
    """An estimate of the bytes that the first stage keeps between forward and backward.

    They are the activations of its layers for every micro-batch in flight, those that backward recomputes at a time
    for one micro-batch, and the logits.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.1, without the scores that sdpa does not keep.
    """
    model, parallel, train = config.model, config.parallel, config.train
    tensor, length = parallel.tensor, config.data.seq_length
    tokens, wide = length * train.micro_batch_size / parallel.context, {"fp64": 4, "fp32": 2}.get(train.precision, 1)
    count = train.global_batch(dp) // (train.micro_batch_size * dp)
    in_flight = count if parallel.schedule == "gpipe" else min(count, parallel.pipeline)
    chunk = max(layer_counts(model, parallel))
    layers = chunk * parallel.virtual_pipeline
    block = tokens * model.hidden_size * wide * ((10 / tensor if parallel.sequence else 10) + 24 / tensor)
    keeps_scores = parallel.context == 1 or parallel.context_mode == "ulysses"
    if model.attention == "math" and keeps_scores and train.recompute != "selective":
        block += 5 * model.num_heads * length * tokens * wide / tensor
    stream = 2 * wide * tokens * model.hidden_size
    group = chunk if train.recompute == "stage" else min(train.recompute_group, chunk)
    if group:
        kept, recomputed = -(-chunk // group) * parallel.virtual_pipeline * stream, group
    else:
        recomputed = min(layers, train.full_recompute_layers)
        kept = (layers - recomputed) * block + recomputed * stream
        recomputed = min(1, recomputed)
    return kept * in_flight + recomputed * block + 2 * 4 * tokens * model.padded_vocab / tensor
