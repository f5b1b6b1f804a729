"""The dataset of each sample of a blend, so that every prefix of the blend has the requested proportions.

Greedy: sample i goes to the dataset that is furthest behind, the first of the largest `w_d * max(i, 1) - count_d`.
A Python loop over millions of samples is too slow, but from roughly right counts the decisions soon become the same.
So all blocks of samples advance in step, each from guessed counts. A block whose guess differs from the end of the
previous block is computed again, until all agree. The result is exactly greedy for every guess.
Source of the rule: Megatron-LM, megatron/core/datasets/helpers.cpp.
"""

from typing import NamedTuple

import numpy as np


class BlendIndex(NamedTuple):
    """dataset int16 [N]: number of the dataset; sample int64 [N]: number of the sample in it."""

    dataset: np.ndarray
    sample: np.ndarray


def weighted_blend(weights: np.ndarray, num_samples: int) -> BlendIndex:
    """The first `num_samples` of an endless blend; `weights` float64, sum 1."""
    return _greedy(weights, num_samples, np.full(len(weights), np.iinfo(np.int64).max))


def exhaustive_blend(sizes: np.ndarray, num_samples: int) -> BlendIndex:
    """The first `num_samples <= sum(sizes)` of a blend that reads each dataset once, in proportion to its size."""
    return _greedy(sizes / sizes.sum(), num_samples, sizes)


def _greedy(weights: np.ndarray, num_samples: int, sizes: np.ndarray) -> BlendIndex:
    block_length = max(1, int(np.sqrt(num_samples)))
    starts = np.arange(0, num_samples, block_length)
    dataset = np.empty((len(starts), block_length), dtype=np.int16)
    before = _guess_counts(weights, starts)  # [blocks, datasets]
    after = np.empty_like(before)
    stale = np.arange(len(starts))
    while len(stale):
        dataset[stale], after[stale] = _run_blocks(weights, sizes, starts[stale], before[stale], block_length)
        # The first stale block starts from exact counts, so each round completes at least one more.
        stale = 1 + np.flatnonzero((before[1:] != after[:-1]).any(axis=1))
        before[stale] = after[stale - 1]
    chosen = dataset.reshape(-1)[:num_samples]
    sample = np.empty(num_samples, dtype=np.int64)
    for d in range(len(weights)):
        (places,) = np.nonzero(chosen == d)
        sample[places] = np.arange(len(places))
    return BlendIndex(chosen, sample)


def _guess_counts(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Counts near `weights * start` that sum to `start`: rounded down, the rest to the largest remainders."""
    exact = starts[:, None] * weights
    counts = np.floor(exact).astype(np.int64)
    missing = starts - counts.sum(axis=1)
    rank_of_remainder = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    return counts + (rank_of_remainder < missing[:, None])


def _run_blocks(
    weights: np.ndarray, sizes: np.ndarray, starts: np.ndarray, before: np.ndarray, block_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy choices [blocks, block_length] from counts `before` [blocks, datasets], and the counts after them."""
    chosen = np.empty((block_length, len(starts)), dtype=np.int16)
    counts = before.astype(np.float64)  # exact up to 2**53 samples, and Megatron compares in double too
    limits = sizes.astype(np.float64)
    rows = np.arange(len(starts))
    for step in range(block_length):
        behind = np.maximum(starts + step, 1)[:, None] * weights - counts
        behind[counts >= limits] = -np.inf
        pick = behind.argmax(axis=1)
        chosen[step] = pick
        counts[rows, pick] += 1
    return chosen.T, counts.astype(np.int64)
