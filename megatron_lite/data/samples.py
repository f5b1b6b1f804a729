"""The kind of samples that a model is trained on, by its architecture."""

from importlib import import_module

from megatron_lite.config.schema import Config
from megatron_lite.data.text_dataset import SampleMaker
from megatron_lite.data.tokenizer import Tokenizer

# The modules outside of the core that make samples from texts, by `model.architecture`; they have `samples`.
SAMPLES = {
    "encoder": "megatron_lite.architectures.masked",
    "encoder_decoder": "megatron_lite.architectures.corrupted",
}


def sample_maker(config: Config, tokenizer: Tokenizer | None) -> SampleMaker | None:
    """The function that makes samples from texts; None for a decoder, whose samples are ranges of a token stream.

    Raises ConfigError for a tokenizer without the special tokens.
    """
    module = SAMPLES.get(config.model.architecture)
    return import_module(module).samples(config, tokenizer) if module else None
