"""How many parameters a model has, and how many bytes each takes while it is trained, by arithmetic on the config."""

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.config.stages import layer_counts


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


def largest_rank_parameters(config: Config) -> float:
    """Parameters of the rank that holds most: its layers, and what the first and the last stage hold beside them."""
    model, parallel = config.model, config.parallel
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
    """Bytes that the first stage keeps between forward and backward, roughly: its layers for every micro-batch in
    flight, and the logits.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.1, without the scores that sdpa does not keep.
    """
    model, parallel, train = config.model, config.parallel, config.train
    tensor, length = parallel.tensor, config.data.seq_length
    tokens, wide = length * train.micro_batch_size, {"fp64": 4, "fp32": 2}.get(train.precision, 1)
    count = train.global_batch(dp) // (train.micro_batch_size * dp)
    in_flight = count if parallel.schedule == "gpipe" else min(count, parallel.pipeline)
    layers = max(layer_counts(model, parallel)) * parallel.virtual_pipeline
    block = tokens * model.hidden_size * wide * ((10 / tensor if parallel.sequence else 10) + 24 / tensor)
    if model.attention == "math" and train.recompute == "none":
        block += 5 * model.num_heads * length * tokens * wide / tensor
    recomputed = min(layers, train.full_recompute_layers)
    kept = (layers - recomputed) * block + recomputed * 2 * wide * tokens * model.hidden_size
    return kept * in_flight + 2 * 4 * tokens * model.padded_vocab / tensor


def state_bytes(config: Config, dp: int) -> dict[str, float]:
    """Bytes that one of a rank's parameters takes with `dp` data-parallel ranks: weight, gradient, optimizer.

    The optimizer has two moments, and masters where the weights are of 16 bits: 2 + 4 + 12 is Megatron-LM's 18.
    Source: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1, with gradients in fp32.
    """
    precision, ddp = config.train.precision, config.parallel.ddp
    low = precision in ("bf16", "fp16")
    wide = 8 if precision == "fp64" else 4
    weight, gradient, optimizer = (2 if low else wide), wide, (3 if low else 2) * wide
    if config.sync.mode == "delayed":
        gradient *= 1 + config.sync.delay
    if config.sync.is_local:  # the common model, and its momentum
        optimizer += wide * (1 + (config.sync.mode == "diloco" and config.sync.outer_momentum > 0))
    if ddp == "deepspeed":
        return _deepspeed_state_bytes(config.deepspeed.zero_stage, weight, dp, low=low)
    if dp == 1:
        return {"parameters": weight, "gradients": gradient, "optimizer": optimizer}
    if ddp == "fsdp":  # the shared-out weights are the masters
        return {"parameters": wide / dp, "gradients": wide / dp, "optimizer": 2 * wide / dp}
    if ddp == "torch" and low:  # its buckets are of 16 bits, their sums are not
        gradient += 2
    if config.optim.distributed:
        optimizer /= dp
    return {"parameters": weight, "gradients": gradient, "optimizer": optimizer}


def _deepspeed_state_bytes(stage: int, weight: float, dp: int, *, low: bool) -> dict[str, float]:
    """Between steps. Stages 1 to 3 have fp32 masters beside fp32 weights too; what gradients are held by nobody but
    backward, in 16 bits at stage 2 and in fp32 up to there, are gone."""
    if stage == 3:
        return {"parameters": weight / dp, "gradients": 4 / dp, "optimizer": 12 / dp}
    gradient = 4 if low and stage == 1 else 0
    return {"parameters": weight, "gradients": gradient, "optimizer": 12 / dp if stage else 8}
