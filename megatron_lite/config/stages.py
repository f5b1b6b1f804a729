"""The layers of each pipeline stage, by arithmetic.

Stages are numbered along the model. With virtual stages, rank r of p holds stages r, p + r, 2p + r and so on.
"""

from typing import Literal

from megatron_lite.config.schema import ModelConfig, ParallelConfig


def num_stages(parallel: ParallelConfig) -> int:
    """Stages of one pipeline, over all its ranks and their model chunks."""
    return parallel.pipeline * parallel.virtual_pipeline


def layer_counts(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """The number of layers of each stage by `parallel.pipeline_layout`.

    `even` gives the first stages one layer more where layers do not divide. `balanced` counts the embedding, the head
    and a top-query block as a layer each, so their stages get fewer others. `validate` reports negative numbers.
    """
    layout, stages = parallel.pipeline_layout, num_stages(parallel)
    if isinstance(layout, tuple):
        return list(layout)
    ends = _ends(model, layout)
    each, left = divmod(model.num_layers + sum(ends), stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts


def _ends(model: ModelConfig, layout: Literal["even", "balanced"]) -> tuple[int, int]:
    """The other modules of the first and the last stage, counted as layers."""
    return (0, 0) if layout == "even" else (1, 1 + int(model.top_query_layer))


def stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[range]:
    """The global numbers of the layers of each stage."""
    starts, end = [], 0
    for count in layer_counts(model, parallel):
        starts.append(range(end, end + count))
        end += count
    return starts
