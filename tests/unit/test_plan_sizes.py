"""The published 145.6B and 1T models of Narayanan et al. have the counts that its formula gives."""

from pathlib import Path

import pytest

from megatron_lite.config.load import load_config, resolved
from megatron_lite.config.schema import ModelConfig
from megatron_lite.optim.lr import learning_rate
from megatron_lite.plan.sizes import (
    activation_bytes,
    block_parameters,
    largest_rank_parameters,
    num_parameters,
)

GPT = ["model.num_layers=4", "model.hidden_size=64", "model.num_heads=4", "model.vocab_size=1024"]


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


@pytest.mark.parametrize("more", [[], ["model.tie_embeddings=false"], ["model.top_query_layer=true"]])
def test_one_rank_holds_all_parameters(more):
    config = load_config(None, [*GPT, *more])
    assert largest_rank_parameters(config) == num_parameters(config.model)


def test_the_largest_of_several_ranks_holds_its_layers_and_an_embedding():
    """The first stage has 2 layers, words and positions, the last one 2 layers, a copy of the words and the norm."""
    config = load_config(None, [*GPT, "parallel.pipeline=2", "parallel.tensor=2"])
    assert largest_rank_parameters(config) == (2 * block_parameters(config.model) + 2 * 1024 * 64) / 2


def test_copies_of_a_key_value_group_count_on_every_rank():
    """With one group and two ranks, each has all keys and values of the four heads' group, and half of the rest."""
    config = load_config(None, [*GPT, "model.num_query_groups=1", "parallel.tensor=2"])
    half_of_keys_and_values = 4 * (64 + 1) * 2 * 16 / 2  # in 4 layers, weights and biases of 2 * 16 rows
    assert largest_rank_parameters(config) == num_parameters(config.model) / 2 + half_of_keys_and_values


def test_activations_shrink_by_what_saves_them():
    """The published 34 bytes for each value of the residual stream, arXiv 2205.05198, equation 1, and the logits."""
    half = ["train.precision=bf16", "data.seq_length=128", "train.micro_batch_size=2"]

    def of(*more: str) -> float:
        return activation_bytes(load_config(None, [*GPT, *half, *more]), dp=1)

    logits, stream = 2 * 4 * 2 * 128 * 1024, 2 * 128 * 64
    assert of() == 4 * 34 * stream + logits
    assert of("parallel.tensor=2", "parallel.sequence=true") == (4 * 34 * stream + logits) / 2
    assert of("parallel.context=2") == (4 * 34 * stream + logits) / 2
    scores = 5 * 4 * 128 * 128 * 2
    assert of("parallel.context=2", "model.attention=math") == (4 * 34 * stream + logits) / 2  # in parts, which go
    ulysses = ["parallel.context=2", "model.attention=math", "parallel.context_mode=ulysses"]
    assert of(*ulysses) == (4 * (34 * stream + scores) + logits) / 2
    assert of("train.recompute=full") == 4 * 2 * stream + 34 * stream + logits
    assert of("train.recompute=full:1") == 3 * 34 * stream + 2 * stream + 34 * stream + logits
    assert of("train.recompute=uniform:2") == 2 * 2 * stream + 2 * 34 * stream + logits
    assert of("train.recompute=uniform:3") == 2 * 2 * stream + 3 * 34 * stream + logits
    assert of("train.recompute=stage") == 2 * stream + 4 * 34 * stream + logits
    assert of("model.attention=math") == 4 * (34 * stream + 5 * 4 * 128 * 128 * 2) + logits
    four = ["parallel.pipeline=2", "train.global_batch_size=8"]  # micro-batches, of which 1F1B keeps two at once
    assert of(*four) == 2 * 2 * 34 * stream + logits
    assert of(*four, "parallel.schedule=gpipe") == 4 * 2 * 34 * stream + logits
    assert of(*four, "train.recompute=stage") == 2 * 2 * stream + 2 * 34 * stream + logits


@pytest.mark.parametrize("name", ["gpt", "llama_7b", "codegeex_13b"])
def test_resolved_values_are_those_that_a_run_would_use(name):
    """The dry run prints them: a run from what it printed must train the same."""
    config = load_config(Path(__file__).resolve().parents[2] / "configs" / f"{name}.yaml", ["model.vocab_size=50000"])
    shown = resolved(config, 8)
    model, dp = shown.model, config.parallel.data(8)
    for field, used in [
        ("num_query_groups", "query_groups"),
        ("head_dim", "head_size"),
        ("ffn_hidden_size", "ffn_size"),
        ("padded_vocab_size", "padded_vocab"),
    ]:
        assert getattr(model, field) == getattr(model, used) == getattr(config.model, used) > 0
    assert shown.train.global_batch_size == shown.train.global_batch(dp) == config.train.global_batch(dp)
    for steps in range(0, 2 * config.train.iterations, config.train.iterations // 20):
        rates = [learning_rate(c.optim, steps, c.train.iterations) for c in (config, shown)]
        assert rates[0] == rates[1]
    assert resolved(shown, 8) == shown
