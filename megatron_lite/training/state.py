"""The counters that change while training, and the number of samples in an iteration.

The global batch may ramp up with the number of consumed samples, so a resumed run, also with another batch, ramp or
data-parallel size, needs no other position. What remains of a run follows from its counters and the current settings;
what it has consumed stays as it was.
Source of the ramp: Megatron-LM's --rampup-batch-size, "start increment samples".
"""

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_lite.config.schema import FaultsConfig, TrainConfig
from megatron_lite.errors import CheckpointError

RECENT_LOSSES, ENOUGH_LOSSES = 50, 10


@dataclass(frozen=True)
class StepReport:
    """The results of one iteration; equal on every rank."""

    loss: float  # mean over the target tokens of the global batch, nats
    grad_norm: float  # before clipping
    lr: float
    loss_scale: float
    skipped: bool  # no weight changed
    bad: str = ""  # nan: not finite, and a smaller loss scale cannot help; spike: a loss that is too high
    bad_ranks: str = ""  # the ranks whose own loss is not finite, for a message
    losses: dict[str, float] = field(default_factory=dict)  # the loss by its name in logs, and a forward step's scalars
    tokens: int = 0  # that the model has read, padding included; of the encoder in an encoder_decoder
    seconds: float = 0.0  # of the iteration, without evaluations and checkpoints after it


@dataclass
class TrainState:
    """Counters of a run; saved in every checkpoint, except `evaluated_at`."""

    iteration: int = 0  # finished iterations, skipped ones included
    consumed_samples: int = 0  # samples of the training split, those of skipped iterations included
    optimizer_steps: int = 0  # optimizer steps taken; the learning rate depends on these
    skipped: int = 0  # iterations that changed no weight: overflow, bad loss, or no delayed gradient yet
    train_samples: int = 0  # planned length of the sample order, which fixes it; a longer run appends epochs
    eval_samples: int = 0  # the same, of the validation and test splits
    order_start: int = 0  # consumed samples before the first one of this order: those of a run with other data
    loss_mean: float = 0.0  # mean of recent losses of iterations that were not skipped
    losses: int = 0  # number of losses in that mean, at most RECENT_LOSSES
    bad_in_a_row: int = 0  # bad iterations since the last one that changed weights
    rolled_back_to: int = 0  # iteration of the checkpoint that the last rollback loaded
    rollbacks: int = 0  # rollbacks in a row to that checkpoint
    evaluated_at: dict[str, int] = field(default_factory=dict)  # by split, iteration of the last loss in metrics.jsonl

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "evaluated_at"}

    def start_order(self) -> None:
        """Continue with the first sample of other data."""
        self.order_start, self.train_samples, self.eval_samples = self.consumed_samples, 0, 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainState":
        """Raise CheckpointError for unknown counters and impossible numbers."""
        counters = {counter.name: counter for counter in fields(cls) if counter.name != "evaluated_at"}
        if unknown := sorted(set(values) - set(counters)):
            raise CheckpointError(
                f"the checkpoint has unknown counters ({', '.join(unknown)}) of a newer megatron_lite; use that version"
            )
        for name, counter in counters.items():
            value = values.get(name, counter.default)
            is_count = isinstance(value, int) and 0 <= value <= 1 << 53
            if not (is_count or (counter.type is float and isinstance(value, float))):
                raise CheckpointError(f"the checkpoint's counter {name} is {value!r}; load another checkpoint")
        if values.get("order_start", 0) > values.get("consumed_samples", 0):
            raise CheckpointError("the checkpoint's order_start is above consumed_samples; load another checkpoint")
        return cls(**values)

    def remember(self, loss: float) -> None:
        """Add a loss to the running mean, in which older losses decay."""
        self.losses = min(self.losses + 1, RECENT_LOSSES)
        self.loss_mean += (loss - self.loss_mean) / self.losses

    def is_spike(self, loss: float, faults: FaultsConfig) -> bool:
        """True for a finite loss far above the mean of enough losses."""
        has_mean = faults.spike_factor > 0 and self.losses >= ENOUGH_LOSSES
        return has_mean and math.isfinite(loss) and loss > faults.spike_factor * self.loss_mean


def due(iteration: int, interval: int) -> bool:
    """True after every `interval`-th iteration; never for an interval of 0."""
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


def samples_for(train: TrainConfig, data_parallel_size: int, state: TrainState) -> int:
    """Samples that a run has consumed after `train.iterations` iterations, if it continues from `state`."""
    full = train.global_batch(data_parallel_size)
    consumed, left = state.consumed_samples, max(0, train.iterations - state.iteration)
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
