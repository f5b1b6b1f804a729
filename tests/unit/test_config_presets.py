"""Presets have the published sizes."""

import pytest

from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.config.validate import validate
from megatron_lite.plan.sizes import num_parameters

PUBLISHED = {
    "gpt-125m": 124_439_808,  # gpt2 on the Hugging Face hub
    "gpt-345m": 354_823_168,  # gpt2-medium there
    "gpt-1.3b": 1_315_723_264,  # cerebras/Cerebras-GPT-1.3B there: the same shape
    "gpt-175b": 174_604_259_328,  # 174.6B in Narayanan et al., arXiv 2104.04473, table 2
    "codegeex-13b": 12_873_943_040,  # the released checkpoint, 25.75 GB in fp16
    "codegeex-mini": 4_080_384,  # of this package, without a vocabulary
    "bert-base": 110_106_428,  # BertForPreTraining of google-bert/bert-base-uncased on the Hugging Face hub
    "bert-large": 336_226_108,  # likewise of bert-large-uncased
    "t5-small": 60_506_624,  # google-t5/t5-small there
    "t5-base": 222_903_552,  # google-t5/t5-base there
    "llama-160m": 162_417_408,  # JackFram/llama-160m on the Hugging Face hub
    "llama-7b": 6_738_415_616,  # meta-llama/Llama-2-7b-hf there
    "llama-70b": 68_976_648_192,  # meta-llama/Llama-2-70b-hf there
}


def test_every_preset_has_a_published_count():
    assert set(PUBLISHED) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_number_of_parameters(name):
    assert num_parameters(ModelConfig(preset=name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_valid_on_one_process(name):
    model = ModelConfig(preset=name)
    config = Config(model=model)
    validate(config.model_copy(update={"data": config.data.model_copy(update={"seq_length": 256})}), world_size=1)


def test_mini_codegeex_has_about_5m_parameters_with_the_quickstart_vocabulary():
    assert num_parameters(ModelConfig(preset="codegeex-mini", vocab_size=4096)) == 5_128_960
