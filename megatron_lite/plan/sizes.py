"""How many parameters a model has, and how many bytes these and its activations take, by arithmetic on the config."""

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.config.stages import encoder_stages, layer_counts
from megatron_lite.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_lite.checkpoint.layout import Layout  # loads torch


def num_parameters(model: ModelConfig) -> int:
    """The parameters of the full model, as published.

    Published counts include the rows of the vocabulary, or padded rows where a release fixes the padding. So
    `padded_vocab_size` counts when it is given; padding to a multiple does not.
    """
    rows, norm = model.padded_vocab_size or model.vocab_size, _norm_parameters(model)
    head = 0 if model.tie_embeddings else rows * (model.hidden_size + model.head_bias)
    if model.architecture == "encoder":
        head += _encoder_head_parameters(model, rows)
    if model.top_query_layer:
        head += model.max_position_embeddings * model.hidden_size
    blocks = model.total_layers + int(model.top_query_layer)
    blocks = blocks * block_parameters(model) + model.num_layers * cross_parameters(model)
    stacks = 2 if model.encoder_layers else 1
    final_norms = 0 if model.norm_placement == "post" else stacks * norm
    return rows * model.hidden_size + _other_embeddings(model) + blocks + final_norms + head


def check_fits(where: Path, model: ModelConfig, *, elements: int, tensors: int, reason: str = "") -> None:
    """Raise CheckpointError for a model that files with so many elements and tensors cannot hold.

    A model of wrong sizes could be too large to build, even without memory: call this before its parameters are listed.
    """
    if num_parameters(model) > 2 * elements:
        raise CheckpointError(
            f"{where}: describes {num_parameters(model):,} parameters, the files hold {elements:,}{reason}"
        )
    if model.total_layers > tensors:
        raise CheckpointError(f"{where}: describes {model.total_layers:,} layers, the files hold {tensors:,} tensors")


def check_layout(folder: Path, layout: "Layout", model: ModelConfig) -> None:
    """`check_fits` for our checkpoint in `folder`, whose files have at least a byte for each element."""
    elements = sum(path.stat().st_size for name in layout.files if (path := folder / name).is_file())
    check_fits(folder, model, elements=elements, tensors=len(layout.tensors))


def _other_embeddings(model: ModelConfig) -> int:
    """The parameters at the model's start without the word embedding."""
    tables = model.num_tokentypes + (model.max_position_embeddings if model.position == "learned" else 0)
    relative = 2 * model.relative_buckets * model.num_heads if model.position == "relative" else 0
    return tables * model.hidden_size + relative + model.embedding_norm * _norm_parameters(model)


def _encoder_head_parameters(model: ModelConfig, rows: int) -> int:
    """The parameters of BERT's heads without a matrix of the vocabulary."""
    hidden = model.hidden_size
    dense = hidden * hidden + hidden
    return dense + _norm_parameters(model) + rows + model.binary_head * (dense + 2 * hidden + 2)


def cross_parameters(model: ModelConfig) -> int:
    """The parameters of the cross attention of a decoder's block, and its norms; 0 without an encoder."""
    if not model.encoder_layers:
        return 0
    return _attention_parameters(model) + _norms_of_a_branch(model) * _norm_parameters(model)


def _norms_of_a_branch(model: ModelConfig) -> int:
    return 2 if model.norm_placement == "sandwich" else 1


def _attention_parameters(model: ModelConfig) -> int:
    hidden, query = model.hidden_size, model.num_heads * model.head_size
    key_value = 2 * model.query_groups * model.head_size
    weights = hidden * (query + key_value) + query * hidden
    biases = model.has_bias("qkv") * (query + key_value) + model.has_bias("proj") * hidden
    heads = {"none": 0, "head": 2, "full": model.num_heads + model.query_groups}[model.qk_norm]
    return weights + biases + heads * model.head_size * _norm_vectors(model)


def block_parameters(model: ModelConfig) -> int:
    """The parameters of one transformer block without cross attention: attention, MLP and norms."""
    hidden, ffn = model.hidden_size, model.ffn_size
    up = 2 * ffn if model.has_gate else ffn
    mlp = hidden * up + ffn * hidden + model.has_bias("mlp") * (up + hidden)
    norms = 1 if model.residual == "parallel_shared_norm" else 2 * _norms_of_a_branch(model)
    return _attention_parameters(model) + mlp + norms * _norm_parameters(model)


def _norm_parameters(model: ModelConfig) -> int:
    return model.hidden_size * _norm_vectors(model)


def _norm_vectors(model: ModelConfig) -> int:
    return 2 if model.norm == "layernorm" and model.norm_bias else 1


def largest_rank_parameters(config: Config) -> float:
    """The parameters of the rank with the most: its layers, and the embedding or head of the first and last stage."""
    model, parallel = config.model, config.parallel
    if model.query_groups < parallel.tensor:  # each rank holds a copy of one group
        model = model.model_copy(update={"num_query_groups": parallel.tensor})
    word, positions = model.padded_vocab * model.hidden_size, model.max_position_embeddings * model.hidden_size
    counts, block, cross = layer_counts(model, parallel), block_parameters(model), cross_parameters(model)
    decoder_stages = len(counts) - encoder_stages(model, parallel)
    if len(counts) > 1:
        stages = [count * (block + cross * (len(counts) - at <= decoder_stages)) for at, count in enumerate(counts)]
    else:
        stages = [counts[0] * block + model.num_layers * cross]
    stages[0] += word + _other_embeddings(model)
    if len(stages) > 1 or not model.tie_embeddings:
        stages[-1] += word
    if model.top_query_layer:
        stages[-1] += block + positions
    if model.architecture == "encoder":
        stages[-1] += _encoder_head_parameters(model, model.padded_vocab)
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
    if train.recompute == "activation":
        block -= 2 * tokens * model.ffn_size * wide / tensor
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


def state_bytes(config: Config, dp: int) -> dict[str, float]:
    """The bytes of the weight, gradient and optimizer state of one parameter of a rank. `dp` data- and context-parallel
    ranks have this parameter.

    The optimizer has two moments, and fp32 masters of 16-bit weights: 2 + 4 + 12 bytes are Megatron-LM's 18.
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
    shards = config.shard_size or dp
    if ddp == "fsdp":  # the sharded weights are the masters
        return {"parameters": wide / shards, "gradients": wide / shards, "optimizer": 2 * wide / shards}
    if ddp == "torch" and low:  # 16-bit buckets beside the fp32 sums
        gradient += 2
    if config.optim.distributed:
        optimizer /= shards
    return {"parameters": weight, "gradients": gradient, "optimizer": optimizer}


def _deepspeed_state_bytes(stage: int, weight: float, dp: int, *, low: bool) -> dict[str, float]:
    """The bytes between steps. Stages 1 to 3 keep fp32 masters of fp32 weights too.

    16-bit gradients of stage 2, and fp32 gradients up to stage 2, exist during backward alone.
    """
    if stage == 3:
        return {"parameters": weight / dp, "gradients": 4 / dp, "optimizer": 12 / dp}
    gradient = 4 if low and stage == 1 else 0
    return {"parameters": weight, "gradients": gradient, "optimizer": 12 / dp if stage else 8}
