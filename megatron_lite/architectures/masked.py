"""Masked samples for an encoder such as BERT: `[CLS] text [SEP]`, with some tokens to predict.

Of the tokens to predict, most become `[MASK]`, some a random token, and some stay, because no `[MASK]` occurs at
fine-tuning. With a binary head the text is two segments, `[CLS] a [SEP] b [SEP]`, in half of the samples exchanged.
Sources: Devlin et al., BERT, arXiv 1810.04805, section 3.1 and appendix A.1; for exchanged segments Lan et al., ALBERT,
arXiv 1909.11942, section 3.1, and Megatron-LM, megatron/legacy/data/bert_dataset.py.
"""

import numpy as np

from megatron_lite.architectures.special_tokens import CLS, MASK, PAD, SEP, SpecialTokens
from megatron_lite.config.schema import Config
from megatron_lite.data.text_dataset import Sample
from megatron_lite.data.tokenizer import Tokenizer

MASKED, RANDOM = 0.8, 0.1  # shares of the tokens to predict; the others stay


class MaskedSamples:
    """Makes the samples of `model.architecture: encoder`."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None):
        special = SpecialTokens(config, tokenizer)
        self.mask, self.cls = special.required(MASK, CLS)
        self.sep, self.pad = special.get_or_eod(SEP), special.get_or_eod(PAD)
        self.eod, self._num_random = special.eod, special.vocab_size
        self._length, self._prob = config.data.seq_length, config.data.mask_prob
        self._has_types, self._has_order = config.model.num_tokentypes > 1, config.model.binary_head
        self.text_length = self._length - (3 if self._has_order else 2)

    def __call__(self, tokens: np.ndarray, random: np.random.RandomState) -> Sample:
        """The fields of a batch, each int64 [s] but for `loss_mask`, float32 [s], and two scalars."""
        segments, exchanged = [tokens], False
        if self._has_order:
            border = random.randint(1, max(2, len(tokens)))
            exchanged = random.random_sample() < 0.5
            segments = [tokens[:border], tokens[border:]][:: -1 if exchanged else 1]
        parts, types = [np.array([self.cls])], [0]
        for number, segment in enumerate(segments):
            parts += [segment, np.array([self.sep])]
            types += [number] * (len(segment) + 1)
        labels = np.concatenate(parts)
        inputs = labels.copy()
        # All but [CLS], and the [SEP] after each segment.
        ends = np.cumsum([len(segment) + 1 for segment in segments])
        places = np.setdiff1d(np.arange(1, len(labels)), ends)
        # Rounded up or down at random: for texts of one length, rounding to the nearest number would change the share.
        count = max(1, int(self._prob * len(places) + random.random_sample()))
        chosen = random.permutation(places)[:count]
        draw = random.random_sample(len(chosen))
        replaced = random.randint(self._num_random, size=len(chosen))
        inputs[chosen] = np.where(draw < MASKED, self.mask, np.where(draw < MASKED + RANDOM, replaced, labels[chosen]))
        loss_mask = np.zeros(self._length, dtype=np.float32)
        loss_mask[chosen] = 1.0
        sample = {
            "tokens": padded(inputs, self._length, self.pad),
            "labels": padded(labels, self._length, self.pad),
            "loss_mask": loss_mask,
            "lengths": np.array(len(labels), dtype=np.int32),
        }
        if self._has_types:
            sample["token_types"] = padded(np.array(types), self._length, 0)
        if self._has_order:
            sample["exchanged"] = np.array(exchanged, dtype=np.int64)
        return sample


def padded(tokens: np.ndarray, length: int, value: int) -> np.ndarray:
    """The tokens, int64 [length], with `value` at the end."""
    result = np.full(length, value, dtype=np.int64)
    result[: len(tokens)] = tokens
    return result


samples = MaskedSamples
