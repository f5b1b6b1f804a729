"""Micro-batches as tensors, read one step ahead in the background.

`consumed_samples` determines a batch, so a wrong prefetch (as at a batch ramp-up step) is discarded and the batches
are the same as without prefetching.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from megatron_lite.data.blended import Dataset
from megatron_lite.data.samplers import microbatch_indices
from megatron_lite.errors import DataError


class Batch(NamedTuple):
    """One micro-batch: tokens int64 [b, s], labels int64 [b, s], loss_mask float32 [b, s] (1 where a target counts)."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor


def _to_device(batches: list[Batch], device: torch.device) -> list[Batch]:
    if device.type == "cpu":
        return batches
    return [Batch(*(tensor.to(device, non_blocking=True) for tensor in batch)) for batch in batches]


def _read(dataset: Dataset, rows: Sequence[int], masked_token: int | None, *, pin: bool) -> Batch:
    if rows[-1] >= len(dataset):
        raise DataError(f"the dataset has {len(dataset):,} samples, not sample {rows[-1]:,}; build it for the full run")
    text = torch.from_numpy(np.stack([dataset[row] for row in rows]))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    if masked_token is not None:
        loss_mask[tokens == masked_token] = 0.0
    batch = Batch(tokens, labels, loss_mask)
    return Batch(*(tensor.pin_memory() for tensor in batch)) if pin else batch


class PrefetchingLoader:
    """Micro-batches of data-parallel rank `dp_rank`; a thread reads the next step while the caller computes.

    The loss mask is 0 where the input token is `masked_token` (None: nowhere). After the end of a document, the start
    of the next one is not predictable. The thread expects as many micro-batches in the next step. It reads and pins;
    the caller's stream copies to the device. `get` raises an error of the thread for the step that it concerns.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        *,
        dp_rank: int,
        dp_size: int,
        masked_token: int | None,
        device: torch.device,
    ) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.masked_token = masked_token
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
        return _to_device(batches, self.device)

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
            consumed_samples, num_microbatches, self.micro_batch_size, self.dp_rank, self.dp_size
        )
        return [_read(self.dataset, rows, self.masked_token, pin=self.device.type == "cuda") for rows in indices]
