"""Micro-batches, with and without prefetching."""

import threading
import time

import numpy as np
import pytest
import torch

from megatron_lite.data.loader import PrefetchingLoader
from megatron_lite.errors import DataError
from tests.helpers.limits import PATIENCE

CPU = torch.device("cpu")
EOD = 3


class Counting:
    """Sample k is k, k + 1, ..., k + 4 modulo 7. `asked` records the requested samples and their threads."""

    def __init__(self, size=100, fails_at=None):
        self.size, self.fails_at = size, fails_at
        self.asked = []

    def __len__(self):
        return self.size

    def __getitem__(self, k):
        if k == self.fails_at:
            raise DataError(f"sample {k} is bad")
        self.asked.append((k, threading.current_thread().name))
        return (np.arange(5) + k) % 7


def options(**overrides):
    return {"dp_rank": 0, "dp_size": 1, "masked_token": None, "device": CPU, **overrides}


def step(dataset, consumed_samples, num_microbatches, micro_batch_size, **kwargs):
    """The micro-batches of one step, read by a new loader without prefetched batches."""
    with PrefetchingLoader(dataset, micro_batch_size, **kwargs) as loader:
        return loader.get(consumed_samples, num_microbatches)


def test_labels_are_the_tokens_shifted_by_one():
    """Without the shift the model would learn to copy."""
    (batch,) = step(Counting(), 2, 1, 3, **options())
    assert batch.tokens.tolist() == [[2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 0]]
    assert batch.labels.tolist() == [[3, 4, 5, 6], [4, 5, 6, 0], [5, 6, 0, 1]]
    assert batch.loss_mask.tolist() == [[1.0] * 4] * 3
    assert (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)
    assert all(tensor.is_contiguous() for tensor in batch)


def test_the_prediction_after_a_masked_token_has_no_loss():
    (batch,) = step(Counting(), 2, 1, 2, **options(masked_token=EOD))
    assert batch.tokens.tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_global_batch_is_the_same_for_every_data_parallel_size(dp_size):
    per_rank = [step(Counting(), 8, 4 // dp_size, 2, **options(dp_rank=r, dp_size=dp_size)) for r in range(dp_size)]
    rows = sorted(row for batches in per_rank for batch in batches for row in batch.tokens.tolist())
    assert rows == sorted(((np.arange(4) + k) % 7).tolist() for k in range(8, 16))


def equal(left, right):
    return all(
        torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_reading_ahead_gives_the_same_batches():
    """Consecutive steps, a repeated step, a jump (resume) and another number of micro-batches (ramp-up)."""
    kwargs = options(dp_rank=1, dp_size=2, masked_token=EOD)
    with PrefetchingLoader(Counting(), 3, **kwargs) as loader:
        for consumed, count in [(0, 2), (12, 2), (24, 2), (24, 2), (60, 2), (72, 3), (0, 1)]:
            assert equal(loader.get(consumed, count), step(Counting(), consumed, count, 3, **kwargs))


def test_the_next_step_is_read_before_it_is_requested():
    """Otherwise the step would wait while the loader reads."""
    dataset = Counting()
    with PrefetchingLoader(dataset, 2, **options()) as loader:
        loader.get(0, 2)
        deadline = time.monotonic() + PATIENCE
        while len(dataset.asked) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [k for k, _ in dataset.asked] == list(range(8))
        loader.get(4, 2)
    assert all(name.startswith("prefetch") for _, name in dataset.asked)


def test_an_error_is_raised_when_its_step_is_requested_and_not_before():
    with PrefetchingLoader(Counting(fails_at=5), 2, **options()) as loader:
        loader.get(0, 2)
        with pytest.raises(DataError, match="sample 5 is bad"):
            loader.get(4, 2)
        assert loader.get(8, 1)[0].tokens.shape == (2, 4)


def test_a_step_past_the_end_of_the_data_is_an_error_and_prefetching_past_it_is_not():
    """On the last step of every run, the loader prefetches past the end."""
    with PrefetchingLoader(Counting(size=4), 2, **options()) as loader:
        loader.get(0, 2)
        with pytest.raises(DataError, match=r"the dataset has 4 samples, not sample 5; build it for"):
            loader.get(4, 1)


def test_closing_ends_the_thread():
    before = threading.active_count()
    with PrefetchingLoader(Counting(), 2, **options()) as loader:
        loader.get(0, 1)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
