"""What changes while training, and how many samples an iteration takes.

The global batch may ramp up with the number of consumed samples, so everything here is a function of
`consumed_samples` alone: a resumed run, or one with another data-parallel size, needs nothing else.
Source of the ramp: Megatron-LM's --rampup-batch-size, "start increment samples".
"""

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_lite.config.schema import FaultsConfig, TrainConfig
from megatron_lite.errors import CheckpointError

RECENT_LOSSES, ENOUGH_LOSSES = 50, 10


@dataclass
class TrainState:
    """Counters of a run; saved in every checkpoint."""

    iteration: int = 0  # finished, skipped ones too
    consumed_samples: int = 0  # of the training split, skipped ones too
    optimizer_steps: int = 0  # taken; the learning rate follows these
    skipped: int = 0  # iterations that moved no weight: an overflow, a bad loss, or no delayed gradient yet
    train_samples: int = 0  # for how many the sample order was made
    loss_mean: float = 0.0  # of recent iterations that were not skipped
    losses: int = 0  # in that mean, as long as there are few
    bad_in_a_row: int = 0  # iterations whose loss was bad, up to now, without one between that moved weights
    rolled_back_to: int = 0  # iteration of the checkpoint from which weights were taken last, when the loss was bad
    rollbacks: int = 0  # to that one

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainState":
        """Raises CheckpointError for counters that this version does not know."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise CheckpointError(
                f"the checkpoint has counters that this version does not know ({', '.join(unknown)}): a newer "
                "megatron_lite has written it; go on with that one"
            )
        for field in fields(cls):
            value = values.get(field.name, field.default)
            if not isinstance(value, int | float if field.type is float else int):
                raise CheckpointError(f"the checkpoint's counter {field.name} is {value!r}; load another checkpoint")
        return cls(**values)

    def remember(self, loss: float) -> None:
        """Takes a loss into the mean, in which older ones fade."""
        self.losses = min(self.losses + 1, RECENT_LOSSES)
        self.loss_mean += (loss - self.loss_mean) / self.losses

    def is_spike(self, loss: float, faults: FaultsConfig) -> bool:
        """Whether a finite loss is far above the mean; never as long as that is of few."""
        known = faults.spike_factor > 0 and self.losses >= ENOUGH_LOSSES
        return known and math.isfinite(loss) and loss > faults.spike_factor * self.loss_mean


def due(iteration: int, interval: int) -> bool:
    """Whether something that happens every `interval` iterations (0: never) happens after this one."""
    return interval > 0 and iteration % interval == 0


def global_batch_size(train: TrainConfig, data_parallel_size: int, consumed_samples: int) -> int:
    """Samples in the iteration that starts after `consumed_samples`."""
    full = train.global_batch(data_parallel_size)
    if train.ramp_up is None:
        return full
    start, increment, samples = train.ramp_up
    steps = (full - start) // increment
    if steps == 0 or consumed_samples > samples:
        return full
    return min(full, start + int(consumed_samples / (samples / steps)) * increment) if samples else full


def num_microbatches(train: TrainConfig, data_parallel_size: int, consumed_samples: int) -> int:
    """Micro-batches that each data-parallel rank runs in the iteration that starts after `consumed_samples`."""
    return global_batch_size(train, data_parallel_size, consumed_samples) // (
        train.micro_batch_size * data_parallel_size
    )


def samples_for(train: TrainConfig, data_parallel_size: int) -> int:
    """Samples that `train.iterations` iterations consume from the start."""
    full = train.global_batch(data_parallel_size)
    consumed, left = 0, train.iterations
    while (size := global_batch_size(train, data_parallel_size, consumed)) < full and left:
        # A bisection for each batch size of the ramp: a loop over iterations could take hours.
        count = 1 + bisect_left(
            range(1, left),
            True,
            key=lambda n, consumed=consumed, size=size: (
                global_batch_size(train, data_parallel_size, consumed + n * size) > size
            ),
        )
        consumed, left = consumed + count * size, left - count
    return consumed + full * left
