"""The unigram entropy and the bits per byte, which put a validation loss into perspective."""

import math

import numpy as np
import pytest

from megatron_lite.config.schema import DataConfig
from megatron_lite.data.tokenizer import BytesTokenizer
from megatron_lite.evaluation.statistics import bits_per_byte, unigram_entropy

EOD = BytesTokenizer.eod
ALL, MASKED = DataConfig(), DataConfig(eod_mask_loss=True)


def entropy(samples, num_samples: int, data: DataConfig = ALL) -> float:
    return unigram_entropy(samples, num_samples, data, EOD)


def bytes_per_token(samples, data: DataConfig = ALL, tokenizer=None) -> float:
    return math.log2(math.e) / bits_per_byte(1.0, samples, len(samples), data, tokenizer or BytesTokenizer())


class Spaced:
    """A word for each id, with a space before it; like sentencepiece, `decode` drops the first space of a text."""

    eod, bos = 9, None

    def decode(self, ids) -> str:
        return "".join(f" {'abcdefgh'[id] * (id + 1)}" for id in ids).removeprefix(" ")


def test_entropy_of_equally_frequent_targets_is_the_log_of_their_number():
    samples = [np.array([9, 0, 1, 2, 3]), np.array([9, 3, 2, 1, 0])]  # the first input is not a target
    assert entropy(samples, 2) == pytest.approx(math.log(4), abs=1e-12)


def test_entropy_of_one_target_is_zero():
    assert entropy([np.array([1, 5, 5, 5])], 1) == 0.0


def test_entropy_is_the_loss_of_predicting_by_frequency():
    """-mean(ln p(target)), computed token by token, where p is the frequency among the targets."""
    random = np.random.default_rng(0)
    samples = [random.zipf(1.5, 50) % 300 for _ in range(20)]
    targets = np.concatenate([sample[1:] for sample in samples[:15]])
    share = {token: (targets == token).mean() for token in set(targets.tolist())}
    expected = -np.mean([math.log(share[token]) for token in targets.tolist()])
    assert entropy(samples, 15) == pytest.approx(expected, abs=1e-12)


def test_bytes_per_token_counts_the_ends_of_documents_as_tokens_without_text():
    samples = [np.array([65, *"né".encode(), EOD, 66]), np.array([65, 66, 67, 68, 69])]
    assert bytes_per_token(samples) == pytest.approx((4 + 4) / (5 - 0 + 4))


def test_labels_without_a_loss_count_in_neither_statistic():
    """The loss is a mean over the targets alone: with all labels the last line of a run was 6% too low."""
    samples = [np.array([65, EOD, 66, 67, EOD, 68, -1, -1])]
    assert bytes_per_token(samples) == pytest.approx(3 / 5)  # EOD B C EOD D
    assert bytes_per_token(samples, MASKED) == pytest.approx(1 / 3)  # EOD C EOD
    assert entropy(samples, 1, MASKED) == pytest.approx(-(2 / 3 * math.log(2 / 3) + math.log(1 / 3) / 3))
    dictionary = {name: np.array([1, 2, 3]) for name in ("tokens", "labels")}
    assert entropy([dictionary | {"loss_mask": np.float32([0, 1, 0])}], 1) == 0.0


def test_a_character_on_the_border_of_a_sample_counts_with_its_bytes_as_tokens():
    """Decoded, each half of it would be a replacement character, of three bytes."""
    half = "é".encode()
    assert bytes_per_token([np.array([65, half[1], 66, half[0]])]) == pytest.approx(1.0)


def test_the_first_target_of_a_sample_keeps_the_space_before_its_word():
    """Decoders drop the space at the start of a text, and a target is at the start of a document at most."""
    tokenizer = Spaced()
    assert bytes_per_token([np.array([0, 1, 2])], tokenizer=tokenizer) == (len(" bb") + len(" ccc")) / 2
    assert bytes_per_token([np.array([9, 1, 2])], tokenizer=tokenizer) == (len("bb") + len(" ccc")) / 2
    assert bytes_per_token([np.array([9, 1, 2])], MASKED, tokenizer) == len(" ccc")


def test_targets_without_text_have_no_bits_per_byte():
    assert math.isnan(bits_per_byte(1.0, [np.array([65, EOD])], 1, ALL, BytesTokenizer()))
