"""Micro-batches, with and without prefetching."""

import threading
import time

import numpy as np
import pytest
import torch

from megatron_lite.config.schema import DataConfig
from megatron_lite.data.blended import PADDING
from megatron_lite.data.loader import PrefetchingLoader, make_batch
from megatron_lite.errors import DataError
from megatron_lite.model.masks import Mask
from tests.helpers.limits import PATIENCE

CPU = torch.device("cpu")
EOD = 3
ALL = DataConfig(eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)


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
    return {"dp_rank": 0, "dp_size": 1, "data": DataConfig(), "eod": EOD, "device": CPU, **overrides}


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
    assert all(tensor.is_contiguous() for tensor in batch[:3]) and set(batch[3:-1]) == {None}
    assert batch.num_targets == 12.0  # counted on the host, before a GPU has the batch


def test_the_prediction_after_a_masked_token_has_no_loss():
    (batch,) = step(Counting(), 2, 1, 2, **options(data=DataConfig(eod_mask_loss=True)))
    assert batch.tokens.tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1], [0, 1, 1, 1]]


TEXT = [[1, EOD, 2, 2, EOD, EOD, 1, 2], [EOD, 1, 2, 1, 2, 1, EOD, 1], [1, 2, 1, 2, 1, 2, 1, EOD]]


def test_a_document_ends_with_its_end_of_document_token():
    """Megatron's meaning: the token belongs to the document before it, and two in a row enclose an empty document."""
    batch = make_batch(torch.tensor(TEXT), ALL, EOD)
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1], [0] * 7]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5], list(range(7))]
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0], [1] * 7]
    assert batch.documents.dtype == torch.int32 and batch.position_ids.dtype == torch.int64


@pytest.mark.parametrize("field", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_documents_are_those_of_megatron_core(field):
    """Its function gives the masks that users compare with; it masks the loss at the same tokens."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    tokens = torch.tensor(TEXT)[:, :-1]
    batch = make_batch(torch.tensor(TEXT), DataConfig(**{field: True}), EOD)
    for row, data in enumerate(tokens):
        resets = (field == "reset_position_ids", field == "reset_attention_mask", field == "eod_mask_loss")
        masked, loss_mask, position_ids = _get_ltor_masks_and_position_ids(data, EOD, *resets, True)
        assert torch.equal(batch.loss_mask[row], loss_mask)
        ours = torch.arange(7) if batch.position_ids is None else batch.position_ids[row]
        assert torch.equal(ours, position_ids)
        documents = None if batch.documents is None else batch.documents[row : row + 1]
        assert torch.equal(~Mask(documents=documents).dense(7, 7, CPU)[0, 0], masked[0])


def test_padding_has_no_loss_and_its_tokens_are_hidden():
    """A custom dataset may have short samples; an id of -1 would be no row of the embedding."""
    text = torch.tensor([[1, 2, 1, PADDING, PADDING], [1, 2, 1, 2, 1]])
    batch = make_batch(text, DataConfig(), EOD)
    assert batch.tokens.tolist() == [[1, 2, 1, 0], [1, 2, 1, 2]] and batch.labels.tolist() == [
        [2, 1, 0, 0],
        [2, 1, 2, 1],
    ]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]] and batch.lengths.tolist() == [3, 4]


@pytest.mark.parametrize("text", [[PADDING, 1, 2], [1, PADDING, 2], [1, 2, -100]])
def test_negative_ids_that_are_no_padding_at_the_end_are_an_error(text):
    """They would train as token 0, or end a sample too early."""
    message = rf"a sample has the ids \[{', '.join(map(str, text))}\]; a negative id must be -1, and only at the end"
    with pytest.raises(DataError, match=message):
        make_batch(torch.tensor([[1, 2, 1], text]), DataConfig(), EOD)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_global_batch_is_the_same_for_every_data_parallel_size(dp_size):
    per_rank = [step(Counting(), 8, 4 // dp_size, 2, **options(dp_rank=r, dp_size=dp_size)) for r in range(dp_size)]
    rows = sorted(row for batches in per_rank for batch in batches for row in batch.tokens.tolist())
    assert rows == sorted(((np.arange(4) + k) % 7).tolist() for k in range(8, 16))


def equal(left, right):
    return all(
        a is b or (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_reading_ahead_gives_the_same_batches():
    """Consecutive steps, a repeated step, a jump (resume) and another number of micro-batches (ramp-up)."""
    kwargs = options(dp_rank=1, dp_size=2, data=ALL)
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
