"""The layers of each pipeline stage, by arithmetic.

Stages are numbered along the model. With virtual stages, rank r of p holds stages r, p + r, 2p + r and so on. The
layers of an encoder come before those of its decoder, and no stage has both, unless there is one stage.
"""

from itertools import accumulate

from megatron_lite.config.schema import ModelConfig, ParallelConfig


def layer_counts(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """The number of layers of each stage by `parallel.pipeline_layout`.

    `even` gives the first stages one layer more where layers do not divide. `balanced` counts the embedding, the head
    and a top-query block as a layer each, so their stages get fewer others. `validate` reports negative numbers.
    """
    layout, stages = parallel.pipeline_layout, parallel.pipeline * parallel.virtual_pipeline
    if isinstance(layout, tuple):
        return list(layout)
    embedding, head = (0, 0) if layout == "even" else (1, 1 + int(model.top_query_layer))
    of_encoder = encoder_stages(model, parallel)
    if not of_encoder:
        return _divided(model.total_layers, stages, embedding, head)
    encoder = _divided(model.encoder_layers, of_encoder, embedding, 0)
    return encoder + _divided(model.num_layers, stages - of_encoder, 0, head)


def encoder_stages(model: ModelConfig, parallel: ParallelConfig) -> int:
    """The number of stages of the encoder of an `encoder_decoder` on several stages; else 0."""
    stages = parallel.pipeline * parallel.virtual_pipeline
    if not model.encoder_layers or stages == 1:
        return 0
    in_proportion = max(1, round(stages * model.encoder_layers / model.total_layers))
    return min(parallel.encoder_stages or in_proportion, stages - 1)


def _divided(layers: int, stages: int, before: int, after: int) -> list[int]:
    """The layers of each stage. The first one has `before`, and the last one `after`, fewer than it would have."""
    each, left = divmod(before + layers + after, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= before
    counts[-1] -= after
    return counts


def stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[range]:
    """The global numbers of the layers of each stage."""
    counts = layer_counts(model, parallel)
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
