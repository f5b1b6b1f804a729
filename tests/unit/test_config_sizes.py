"""The published 145.6B and 1T models of Narayanan et al. have the counts that its formula gives."""

import pytest

from megatron_lite.config.schema import ModelConfig
from megatron_lite.config.sizes import block_parameters, num_parameters


@pytest.mark.parametrize(
    "layers, hidden, heads, billions", [(24, 2304, 24, 1.65), (80, 12288, 96, 145.62), (128, 25600, 160, 1008.04)]
)
def test_counts_of_table_1(layers, hidden, heads, billions):
    """P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)) leaves out only the final norm. arXiv 2104.04473, equation 2."""
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=51200, max_position_embeddings=2048
    )
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (51200 + 2048) * hidden
    assert num_parameters(model) == formula + 2 * hidden
    assert round(num_parameters(model) / 1e9, 2) == billions


def test_a_codegeex_block_has_the_published_count():
    assert block_parameters(ModelConfig(preset="codegeex-13b")) == 314_639_360


def test_padding_counts_only_when_it_is_given():
    model = ModelConfig(num_layers=1, hidden_size=64, num_heads=4, vocab_size=1000)
    padded = ModelConfig(num_layers=1, hidden_size=64, num_heads=4, vocab_size=1000, padded_vocab_size=1024)
    assert num_parameters(padded) - num_parameters(model) == 24 * 64
