"""The layers of each pipeline stage, by arithmetic.

Stages are numbered along the model. With virtual stages, rank r of p holds stages r, p + r, 2p + r and so on.
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
    each, left = divmod(embedding + model.num_layers + head, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= embedding
    counts[-1] -= head
    return counts


def stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[range]:
    """The global numbers of the layers of each stage."""
    counts = layer_counts(model, parallel)
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
