"""Span-corrupted samples for an encoder_decoder such as T5.

Random spans of a text become one sentinel token each. The decoder predicts the sentinels, each followed by its span.

    text      Thank you for inviting me to your party last week
    encoder   Thank you <0> me to your party <1> week </s>
    labels    <0> for inviting <1> last </s>

The decoder's input is its labels, one to the right.
Sources: Raffel et al., T5, arXiv 1910.10683, section 3.1.4; for the spans' lengths `random_spans_noise_mask` of its
code.
"""

import numpy as np

from megatron_lite.architectures.masked import padded
from megatron_lite.architectures.special_tokens import PAD, SpecialTokens
from megatron_lite.config.schema import Config
from megatron_lite.config.spans import num_noise_tokens
from megatron_lite.data.text_dataset import Sample
from megatron_lite.data.tokenizer import Tokenizer


class CorruptedSamples:
    """Makes the samples of `model.architecture: encoder_decoder`."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None):
        special, data = SpecialTokens(config, tokenizer), config.data
        self.eod, self.pad = special.eod, special.get_or_eod(PAD)
        self._length, self._decoder_length = data.seq_length, data.decoder_length
        self._density, self._mean_span = data.mask_prob, data.mean_span
        self.text_length = data.text_length
        _, spans = num_noise_tokens(self.text_length, self._density, self._mean_span)
        self.sentinels = np.array(special.sentinels(spans))

    def __call__(self, tokens: np.ndarray, random: np.random.RandomState) -> Sample:
        """The fields of a batch: int64 [s] for the encoder and [t] for the decoder, `loss_mask` float32 [t], and the
        length of the encoder's sequence."""
        if len(tokens) < 2:  # no span leaves a token for the encoder
            tokens = np.concatenate((tokens, [self.eod]))
        noise, spans = num_noise_tokens(len(tokens), self._density, self._mean_span)
        kept_lengths = random_segments(len(tokens) - noise, spans, random)
        noise_lengths = random_segments(noise, spans, random)
        inputs: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        start = 0
        for number, (kept, span) in enumerate(zip(kept_lengths, noise_lengths, strict=True)):
            sentinel = self.sentinels[number : number + 1]
            inputs += [tokens[start : start + kept], sentinel]
            labels += [sentinel, tokens[start + kept : start + kept + span]]
            start += kept + span
        end = np.array([self.eod])
        encoder, target = np.concatenate([*inputs, end]), np.concatenate([*labels, end])
        loss_mask = np.zeros(self._decoder_length, dtype=np.float32)
        loss_mask[: len(target)] = 1.0
        return {
            "tokens": padded(encoder, self._length, self.pad),
            "labels": padded(target, self._decoder_length, self.pad),
            "loss_mask": loss_mask,
            "lengths": np.array(len(encoder), dtype=np.int32),
            "decoder_tokens": padded(np.concatenate(([self.pad], target[:-1])), self._decoder_length, self.pad),
        }


def random_segments(num_items: int, num_segments: int, random: np.random.RandomState) -> list[int]:
    """The lengths of `num_segments` segments, each at least 1, that together have `num_items`; all choices are equally
    likely."""
    borders = np.sort(random.permutation(num_items - 1)[: num_segments - 1]) + 1
    return np.diff(np.concatenate(([0], borders, [num_items]))).tolist()


samples = CorruptedSamples
