"""The contract of a data-parallel engine: what the training step and the optimizer may ask of it."""

import torch
from torch import Tensor, nn

from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import TrainingError
from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.engine import Forward, PipelineEngine
from megatron_lite.pipeline.p2p import Message


class DataParallel:
    """The gradients of one rank, summed over micro-batches and over dp.

    One step: `zero_grad`, `forward_backward`, `finish_grad_sync`. The optimizer then reads `main_grads`, changes
    `owned` in place and calls `gather_params`. The defaults are those of an engine that keeps a full replica on every
    rank.
    """

    owned: dict[str, LocalShard]
    """By parameter name, the live memory that this rank's optimizer updates; other ranks own the names left out."""

    main_grads: dict[str, Tensor]
    """The gradient of each of `owned`, of the same shape, in fp32 (fp64 for fp64 parameters): the sum over
    micro-batches and over dp. A sum, not a mean: the loss is already divided by the target tokens of the global batch.
    Valid from `finish_grad_sync` until `zero_grad`."""

    weight_dtype: torch.dtype
    """The dtype in which the model computes; `owned` may be wider."""

    has_grads = True
    """False in a step without gradients to apply: the first steps of `sync.mode: delayed`."""

    is_sharded = False
    """True where the ranks of dp own different ranges of the parameters."""

    can_skip = True
    """False where the gradients of a step cannot be dropped once they are computed."""

    copies_at_save = False
    """True where a checkpoint must be copied before the save returns: the next step, or a collective, may change what
    is saved, or saved weights are rounded copies that would take memory from the next forward."""

    def module(self, chunk: int) -> nn.Module:
        """The callable through which this chunk's forward must go."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Starts a step."""

    def forward_backward(
        self, engine: PipelineEngine, schedule: Schedule, forward: Forward, message: Message, loss_grad: float, progress
    ) -> list[Tensor]:
        """Runs the micro-batches of a step, whose gradients are summed in `main_grads`; returns the last stage's
        losses.

        Communicates: hidden states and their gradients between stages; gradients over dp, which may still be in flight
        at return.
        """
        return engine.run(
            schedule, forward, message, begin_backward=self.begin_backward, loss_grad=loss_grad, recorder=progress
        )

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        """Called before a chunk's backward, or before each half of it. `is_last`: this backward brings the last
        gradient of each parameter, which may then be summed over dp."""

    def finish_grad_sync(self) -> None:
        """Returns once all gradients are summed over dp. Collective over dp."""

    def gather_params(self) -> None:
        """Starts to send the updated `owned` to all ranks. Collective over dp."""

    def wait_for_params(self) -> None:
        """Returns once all parameters are up to date. A parameter that is read as an attribute of its module is up to
        date without this call."""

    def release_params(self) -> None:
        """Frees the other ranks' weights, which a forward without a backward has gathered."""

    def weights(self) -> dict[str, LocalShard]:
        """By parameter name, this rank's part of the weights, up to date, in `weight_dtype`; live memory if
        possible."""
        raise NotImplementedError

    def weight_memory(self) -> list[Tensor]:
        """The tensors that hold the parameters, for a count of their bytes."""
        return [shard.values for shard in self.weights().values()]

    def grad_memory(self) -> list[Tensor]:
        """The tensors that hold gradients after a step, for a count of their bytes."""
        return list(self.main_grads.values())

    def pending_grads(self) -> list[dict[str, Tensor]]:
        """Gradients of earlier steps that a later step will apply, oldest first, live: see `DelayedDDP`."""
        return []

    def resume_pending_grads(self, iteration: int) -> None:
        """Called after a load has filled the tensors of `pending_grads` with those of a run after `iteration` steps."""


def only_dtype(params: dict[str, nn.Parameter], key: str) -> torch.dtype:
    """The dtype of all parameters. Raises TrainingError, which names the config `key`, where there are several."""
    dtypes = {parameter.dtype for parameter in params.values()}
    if len(dtypes) > 1:
        raise TrainingError(
            f"{key}: the model has parameters of {sorted(map(str, dtypes))}, and this engine needs one dtype; use "
            "parallel.ddp: local without optim.distributed"
        )
    return dtypes.pop()
