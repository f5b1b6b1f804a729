"""The layers of each stage in every layout, compared with lists written by hand."""

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.config.stages import layer_counts, stage_layers
from megatron_lite.errors import ConfigError


def counts(*overrides: str) -> list[int]:
    config = load_config(None, overrides)
    return layer_counts(config.model, config.parallel)


@pytest.mark.parametrize(
    "layers, stages, layout, wanted",
    [
        (12, 4, "even", [3, 3, 3, 3]),
        (7, 3, "even", [3, 2, 2]),  # the first stages have one more
        (2, 3, "even", [1, 1, 0]),  # the last one has the head
        (14, 4, "balanced", [3, 4, 4, 3]),  # 16 with embedding and head
        (15, 4, "balanced", [4, 4, 4, 3]),
        (3, 1, "balanced", [3]),
        (4, 3, "[1,3,0]", [1, 3, 0]),
    ],
)
def test_layers_of_each_stage(layers, stages, layout, wanted):
    options = [f"model.num_layers={layers}", f"parallel.pipeline={stages}", f"parallel.pipeline_layout={layout}"]
    assert counts(*options) == wanted


@pytest.mark.parametrize(
    "encoder, decoder, stages, layout, split, wanted",
    [
        (4, 4, 2, "even", 0, [4, 4]),
        (6, 2, 4, "even", 0, [2, 2, 2, 2]),
        (2, 6, 4, "even", 0, [2, 2, 2, 2]),
        (1, 9, 2, "even", 0, [1, 9]),  # each has one stage at least
        (4, 4, 4, "even", 1, [4, 2, 1, 1]),
        (4, 4, 4, "balanced", 2, [2, 2, 3, 1]),  # 5 with the embedding, and 5 with the head
        (5, 5, 4, "balanced", 2, [2, 3, 3, 2]),
        (4, 4, 1, "even", 0, [8]),
        (4, 4, 3, "[3,1,4]", 2, [3, 1, 4]),
    ],
)
def test_no_stage_has_layers_of_encoder_and_decoder(encoder, decoder, stages, layout, split, wanted):
    given = ["model.architecture=encoder_decoder", f"model.num_encoder_layers={encoder}", f"model.num_layers={decoder}"]
    given += [f"parallel.pipeline={stages}", f"parallel.pipeline_layout={layout}", f"parallel.encoder_stages={split}"]
    assert counts(*given) == wanted


def test_balanced_counts_a_top_query_block_with_the_head():
    assert counts("model.preset=codegeex-13b", "parallel.pipeline=3", "parallel.pipeline_layout=balanced") == [
        13,
        14,
        12,
    ]


def test_stages_are_consecutive_over_ranks_and_chunks():
    config = load_config(None, ["model.num_layers=6", "parallel.pipeline=2", "parallel.virtual_pipeline=2"])
    assert stage_layers(config.model, config.parallel) == [range(2), range(2, 4), range(4, 5), range(5, 6)]


def test_the_error_of_an_unknown_layout_names_the_valid_ones():
    with pytest.raises(ConfigError, match=r"pipeline_layout is 'evn'; it must be even, balanced, or a list with the"):
        load_config(None, ["parallel.pipeline_layout=evn"])
