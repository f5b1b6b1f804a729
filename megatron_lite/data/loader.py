"""Micro-batches as tensors, read one step ahead in the background.

`consumed_samples` determines a batch, so a wrong prefetch (as at a batch ramp-up step) is discarded and the batches
are the same as without prefetching.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, cast

import numpy as np
import torch

from megatron_lite.config.schema import DataConfig
from megatron_lite.data.blended import PADDING, Dataset
from megatron_lite.data.samplers import microbatch_indices
from megatron_lite.data.text_dataset import Sample
from megatron_lite.errors import DataError


class Batch(NamedTuple):
    """One micro-batch, with None for what the config and the samples do not ask for."""

    tokens: torch.Tensor  # int64 [b, s]; of the encoder in an encoder_decoder
    labels: torch.Tensor  # int64 [b, s], or [b, t] for a decoder's sequence of t tokens
    loss_mask: torch.Tensor  # float32, as labels; 1 where a target counts
    position_ids: torch.Tensor | None = None  # int64 [b, s]; None: 0..s-1
    documents: torch.Tensor | None = None  # int32 [b, s], a number for each document of a row, which do not decrease
    lengths: torch.Tensor | None = None  # int32 [b], the tokens of each row before its padding; None: all
    token_types: torch.Tensor | None = None  # int64 [b, s]
    exchanged: torch.Tensor | None = None  # int64 [b], 1 where the segments of a row are not in their order
    decoder_tokens: torch.Tensor | None = None  # int64 [b, t]
    num_targets: float | None = None  # the sum of the full loss_mask, where it was counted on the host

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with every tensor changed."""
        return Batch(*(change(field) if isinstance(field, torch.Tensor) else field for field in self))  # type: ignore[arg-type]


def make_batch(text: torch.Tensor, data: DataConfig, eod: int) -> Batch:
    """The batch of samples `text`, int64 [b, s + 1]. PADDING at the end of a row is seen by no token and has no loss.

    A document ends with its end-of-document token, which sees its document and has its last position.
    Source: Megatron-LM, megatron/training/utils.py, get_ltor_masks_and_position_ids.
    """
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    position_ids = documents = lengths = None
    is_end = tokens == eod
    if data.eod_mask_loss:  # the start of the next document is not predictable
        loss_mask[is_end] = 0.0
    is_start = torch.nn.functional.pad(is_end[:, :-1], (1, 0))
    if data.reset_position_ids:
        position = torch.arange(tokens.shape[1])
        position_ids = position - torch.where(is_start, position, 0).cummax(dim=1).values
    if data.reset_attention_mask:
        documents = is_start.cumsum(dim=1, dtype=torch.int32)
    if (text < 0).any():
        check_padding(text)
        loss_mask[labels == PADDING] = 0.0
        lengths = (tokens != PADDING).sum(dim=1, dtype=torch.int32)
        tokens, labels = tokens.clamp(min=0), labels.clamp(min=0)
    return Batch(tokens, labels, loss_mask, position_ids, documents, lengths)


def check_padding(text: torch.Tensor) -> None:
    """Raise DataError unless the negative ids of samples [b, s + 1] are PADDING at their ends."""
    is_real = text >= 0
    wrong = ((text < 0) & (text != PADDING)).any(dim=1) | (~is_real[:, :-1] & is_real[:, 1:]).any(dim=1)
    if wrong.any():
        row = wrong.int().argmax()
        raise DataError(
            f"a sample has the ids {text[row].tolist()[:20]}; a negative id must be {PADDING}, and only at the end as "
            "padding; correct the dataset"
        )


def stacked(samples: Sequence[Sample]) -> Batch:
    """The batch of samples that have its fields. Raises DataError where they have other fields or lengths."""
    try:
        fields = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
        batch = Batch(**fields)  # type: ignore[arg-type]
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"the samples of a batch do not have its fields, equal in all of them: {error}; the fields are "
            f"{', '.join(Batch._fields)}"
        ) from error
    if batch.lengths is not None and bool((batch.lengths == batch.tokens.shape[1]).all()):
        batch = batch._replace(lengths=None)  # a mask without padding is computed faster
    return batch


def batch_of(samples: Sequence[np.ndarray | Sample], data: DataConfig, eod: int) -> Batch:
    """The batch of samples of either kind, with the loss mask that training and evaluations have."""
    if isinstance(samples[0], np.ndarray):
        return make_batch(torch.from_numpy(np.stack(cast(list[np.ndarray], samples))), data, eod)
    return stacked(cast(list[Sample], samples))


def _read(dataset: Dataset, rows: Sequence[int], data: DataConfig, eod: int, *, pin: bool) -> Batch:
    if rows[-1] >= len(dataset):
        raise DataError(f"the dataset has {len(dataset):,} samples, not sample {rows[-1]:,}; build it for the full run")
    batch = batch_of([dataset[row] for row in rows], data, eod)
    batch = batch._replace(num_targets=batch.loss_mask.sum(dtype=torch.float64).item())  # a read from a GPU would wait
    return batch.map(torch.Tensor.pin_memory) if pin else batch


class PrefetchingLoader:
    """Micro-batches of data-parallel rank `dp_rank`; a thread reads the next step while the caller computes.

    `eod` is the end-of-document token for the settings of `data`. Sample 0 of the dataset follows `first`
    consumed ones. The thread expects as many micro-batches in the next step. It reads and pins; the caller's stream
    copies to the device. `get` raises an error of the thread for the step that it concerns.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        *,
        dp_rank: int,
        dp_size: int,
        data: DataConfig,
        eod: int,
        device: torch.device,
        first: int = 0,
    ) -> None:
        self.dataset, self.first = dataset, first
        self.micro_batch_size = micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.data, self.eod = data, eod
        self.device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._prefetched: tuple[tuple[int, int], Future[list[Batch]]] | None = None

    def get(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """The micro-batches of the step that follows `consumed_samples`."""
        step = (consumed_samples, num_microbatches)
        if self._prefetched is None or self._prefetched[0] != step:
            self._start(step)
        assert self._prefetched is not None
        batches = self._prefetched[1].result()
        global_batch = num_microbatches * self.micro_batch_size * self.dp_size
        self._start((consumed_samples + global_batch, num_microbatches))
        if self.device.type == "cpu":
            return batches
        return [batch.map(lambda tensor: tensor.to(self.device, non_blocking=True)) for batch in batches]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "PrefetchingLoader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, step: tuple[int, int]) -> None:
        self._prefetched = (step, self._thread.submit(self._read_step, step))

    def _read_step(self, step: tuple[int, int]) -> list[Batch]:
        consumed_samples, num_microbatches = step
        indices = microbatch_indices(
            consumed_samples - self.first, num_microbatches, self.micro_batch_size, self.dp_rank, self.dp_size
        )
        pin = self.device.type == "cuda"
        return [_read(self.dataset, rows, self.data, self.eod, pin=pin) for rows in indices]
