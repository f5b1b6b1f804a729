"""Presets have the published sizes."""

from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Config, DataConfig, ModelConfig
from megatron_lite.config.validate import validate
from megatron_lite.plan.sizes import num_parameters
from tests.helpers.cases import all_cases

PUBLISHED = {
    "gpt-125m": 124_439_808,  # gpt2 on the Hugging Face hub
    "gpt-345m": 354_823_168,  # gpt2-medium there
    "gpt-1.3b": 1_315_723_264,  # cerebras/Cerebras-GPT-1.3B there: the same shape
    "gpt-175b": 174_604_259_328,  # 174.6B in Narayanan et al., arXiv 2104.04473, table 2
    "gpt3-175b": 174_604_259_328,  # 174.6B in Brown et al., arXiv 2005.14165, table 2.1
    "codegeex-13b": 12_873_943_040,  # the released checkpoint, 25.75 GB in fp16
    "codegeex-mini": 4_080_384,  # of this package, without a vocabulary
    "bert-base": 110_106_428,  # BertForPreTraining of google-bert/bert-base-uncased on the Hugging Face hub
    "bert-large": 336_226_108,  # likewise of bert-large-uncased
    "t5-small": 60_506_624,  # google-t5/t5-small there
    "t5-base": 222_903_552,  # google-t5/t5-base there
    "llama-160m": 162_417_408,  # JackFram/llama-160m on the Hugging Face hub
    "llama-7b": 6_738_415_616,  # meta-llama/Llama-2-7b-hf there
    "llama-70b": 68_976_648_192,  # meta-llama/Llama-2-70b-hf there
    "llama-3.1-8b": 8_030_261_248,  # meta-llama/Llama-3.1-8B
    "llama-3.1-70b": 70_553_706_496,  # meta-llama/Llama-3.1-70B
    "llama-3.1-405b": 405_853_388_800,  # meta-llama/Llama-3.1-405B
    "llama-3.2-1b": 1_235_814_400,  # meta-llama/Llama-3.2-1B
    "llama-3.2-3b": 3_212_749_824,  # meta-llama/Llama-3.2-3B
    "qwen2.5-0.5b": 494_032_768,  # Qwen/Qwen2.5-0.5B
    "qwen2.5-1.5b": 1_543_714_304,  # Qwen/Qwen2.5-1.5B
    "qwen2.5-3b": 3_085_938_688,  # Qwen/Qwen2.5-3B
    "qwen2.5-7b": 7_615_616_512,  # Qwen/Qwen2.5-7B
    "qwen2.5-14b": 14_770_033_664,  # Qwen/Qwen2.5-14B
    "qwen2.5-32b": 32_763_876_352,  # Qwen/Qwen2.5-32B
    "qwen2.5-72b": 72_706_203_648,  # Qwen/Qwen2.5-72B
    "qwen3-0.6b": 596_049_920,  # Qwen/Qwen3-0.6B
    "qwen3-1.7b": 1_720_574_976,  # Qwen/Qwen3-1.7B
    "qwen3-4b": 4_022_468_096,  # Qwen/Qwen3-4B
    "qwen3-8b": 8_190_735_360,  # Qwen/Qwen3-8B
    "qwen3-14b": 14_768_307_200,  # Qwen/Qwen3-14B
    "qwen3-32b": 32_762_123_264,  # Qwen/Qwen3-32B
    "smollm2-135m": 134_515_008,  # HuggingFaceTB/SmolLM2-135M
    "smollm2-360m": 361_821_120,  # HuggingFaceTB/SmolLM2-360M
    "smollm2-1.7b": 1_711_376_384,  # HuggingFaceTB/SmolLM2-1.7B
    "olmo2-7b": 7_298_617_344,  # allenai/OLMo-2-1124-7B
    "olmo2-13b": 13_716_198_400,  # allenai/OLMo-2-1124-13B
    "pythia-70m": 70_426_624,  # EleutherAI/pythia-70m
    "pythia-160m": 162_322_944,  # EleutherAI/pythia-160m
    "pythia-410m": 405_334_016,  # EleutherAI/pythia-410m
    "pythia-1b": 1_011_781_632,  # EleutherAI/pythia-1b
    "pythia-1.4b": 1_414_647_808,  # EleutherAI/pythia-1.4b
    "pythia-2.8b": 2_775_208_960,  # EleutherAI/pythia-2.8b
    "pythia-6.9b": 6_857_302_016,  # EleutherAI/pythia-6.9b
    "pythia-12b": 11_846_072_320,  # EleutherAI/pythia-12b
    "gemma2-2b": 2_614_341_888,  # google/gemma-2-2b
    "gemma2-9b": 9_241_705_984,  # google/gemma-2-9b
    "mistral-7b": 7_241_732_096,  # mistralai/Mistral-7B-v0.1
    "starcoder2-3b": 3_030_371_328,  # bigcode/starcoder2-3b
    "starcoder2-7b": 7_173_923_840,  # bigcode/starcoder2-7b
    "starcoder2-15b": 15_957_889_024,  # bigcode/starcoder2-15b
}


def test_every_preset_has_the_published_number_of_parameters():
    """Its checkpoints could not be those of the published model."""
    assert {name: num_parameters(ModelConfig(preset=name)) for name in PRESETS} == PUBLISHED


def test_every_preset_is_valid_on_one_process():
    """The first command with a preset would be an error."""
    with all_cases() as case:
        for name in PRESETS:
            with case(name):
                validate(Config(model=ModelConfig(preset=name), data=DataConfig(seq_length=256)), world_size=1)


def test_mini_codegeex_has_about_5m_parameters_with_the_quickstart_vocabulary():
    assert num_parameters(ModelConfig(preset="codegeex-mini", vocab_size=4096)) == 5_128_960
