"""Derived values of a config, and errors of its sections."""

import pytest
from pydantic import ValidationError

from megatron_lite.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig


def test_sections_are_frozen_and_unknown_fields_are_an_error():
    with pytest.raises(ValidationError, match="frozen"):
        Config().model.num_layers = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="hidden_sise"):
        ModelConfig(hidden_sise=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="num_layers"):
        ModelConfig(num_layers="3")  # type: ignore[arg-type]


def test_zero_fields_are_derived_from_other_fields():
    model = ModelConfig(hidden_size=4096, num_heads=32, vocab_size=50257)
    assert (model.head_size, model.query_groups, model.ffn_size, model.padded_vocab) == (128, 32, 16384, 50304)
    assert ModelConfig(hidden_size=4096, num_heads=32, activation="swiglu").ffn_size == 10880  # Megatron's formula
    given = ModelConfig(head_dim=64, num_query_groups=4, ffn_hidden_size=100, padded_vocab_size=52224)
    assert (given.head_size, given.query_groups, given.ffn_size, given.padded_vocab) == (64, 4, 100, 52224)
    assert ParallelConfig(tensor=4, pipeline=2).data(world_size=24) == 3
    assert TrainConfig(micro_batch_size=3).global_batch(data_parallel_size=4) == 12
    assert TrainConfig(micro_batch_size=3, global_batch_size=24).global_batch(data_parallel_size=4) == 24


def test_the_error_of_an_unknown_preset_lists_the_presets():
    with pytest.raises(ValidationError, match=r"preset\n  Input should be '', 'gpt-125m', 'gpt-345m'"):
        ModelConfig(preset="gpt-9")


def test_lists_and_megatron_spellings_become_tuples():
    data = DataConfig(paths="one", split="98,1,1")  # type: ignore[arg-type]
    assert (data.paths, data.split) == (("one",), (98.0, 1.0, 1.0))
    assert DataConfig(paths=["a", "b"]).paths == ("a", "b")  # type: ignore[arg-type]
