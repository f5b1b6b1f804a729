"""The unigram entropy and the bytes per token, which put a validation loss into perspective."""

import math

import numpy as np
import pytest

from megatron_lite.data.statistics import bytes_per_token, unigram_entropy
from megatron_lite.data.tokenizer import BytesTokenizer


def test_entropy_of_equally_frequent_targets_is_the_log_of_their_number():
    samples = [np.array([9, 0, 1, 2, 3]), np.array([9, 3, 2, 1, 0])]  # the first input is not a target
    assert unigram_entropy(samples, 2) == pytest.approx(math.log(4), abs=1e-12)


def test_entropy_of_one_target_is_zero():
    assert unigram_entropy([np.array([1, 5, 5, 5])], 1) == 0.0


def test_entropy_is_the_loss_of_predicting_by_frequency():
    """-mean(ln p(target)), computed token by token, where p is the frequency among the targets."""
    random = np.random.default_rng(0)
    samples = [random.zipf(1.5, 50) % 300 for _ in range(20)]
    targets = np.concatenate([sample[1:] for sample in samples[:15]])
    share = {token: (targets == token).mean() for token in set(targets.tolist())}
    expected = -np.mean([math.log(share[token]) for token in targets.tolist()])
    assert unigram_entropy(samples, 15) == pytest.approx(expected, abs=1e-12)


def test_bytes_per_token_counts_the_ends_of_documents_as_tokens_without_text():
    tokenizer = BytesTokenizer()
    samples = [np.array([65, *"né".encode(), 256, 66]), np.array([65, 66, 67, 68, 69])]
    assert bytes_per_token(samples, 2, tokenizer) == (4 + 4) / (5 - 0 + 4)
