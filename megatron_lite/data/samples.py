"""The kind of samples that a model is trained on, by its architecture."""

from megatron_lite.config.schema import Config
from megatron_lite.data.corrupted import CorruptedSamples
from megatron_lite.data.masked import MaskedSamples
from megatron_lite.data.text_dataset import SampleMaker
from megatron_lite.data.tokenizer import Tokenizer


def sample_maker(config: Config, tokenizer: Tokenizer | None) -> SampleMaker | None:
    """The function that makes samples from texts; None for a decoder, whose samples are ranges of a token stream.

    Raises ConfigError for a tokenizer without the special tokens.
    """
    if config.model.architecture == "decoder":
        return None
    return (MaskedSamples if config.model.architecture == "encoder" else CorruptedSamples)(config, tokenizer)
