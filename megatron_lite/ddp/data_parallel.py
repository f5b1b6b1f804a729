"""The interface that every data-parallel engine offers to the training step and the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.engine import Forward, PipelineEngine, Value
from megatron_lite.pipeline.p2p import Message

Chunks = Sequence[nn.Module]  # this rank's chunks of the model
Params = dict[str, nn.Parameter]  # by global name


@dataclass(frozen=True)
class ToWrap:
    """This rank's chunks and what an engine needs to wrap them; the argument of `wrap` in `config.engines.ENGINES`."""

    config: Config
    chunks: Chunks
    params: Params
    table: ParamTable
    ctx: ParallelContext
    dp: Group  # the ranks whose gradients are summed
    grad_dtype: torch.dtype  # of the sums


class DataParallel:
    """This rank's gradients, summed over micro-batches and over dp.

    One step: `zero_grad`, `forward_backward`, `finish_grad_sync`. The optimizer then reads `main_grads`, changes
    `owned` in place and calls `gather_params`. The defaults suit an engine with a full replica on every rank.
    """

    owned: dict[str, LocalShard]
    """By parameter name, the live memory that this rank's optimizer updates; other ranks own the missing names."""

    main_grads: dict[str, Tensor]
    """The gradient of each of `owned`, of the same shape, in fp32 (fp64 for fp64 parameters). It is a sum over
    micro-batches and over dp, not a mean: the loss is already divided by the target tokens of the global batch. Valid
    from `finish_grad_sync` until `zero_grad`."""

    weight_dtype: torch.dtype
    """The dtype in which the model computes; `owned` may be wider."""

    has_grads = True
    """False in a step without gradients to apply: the first steps of `sync.mode: delayed`."""

    num_copies = 0
    """The ranks of dp that own the same range of a sharded parameter; 0 where every rank owns all parameters."""

    can_skip = True
    """False where the gradients of a step cannot be dropped once they are computed."""

    can_rescale = True
    """False where `main_grads` are not the gradients of the current step, or not available."""

    copies_at_save = False
    """True where a checkpoint must be copied before the save returns: the next step or a collective may change the
    saved tensors, or saved weights are rounded copies that would take memory from the next forward."""

    _chunks: Chunks

    def module(self, chunk: int) -> nn.Module:
        """The callable through which this chunk's forward must go."""
        return self._chunks[chunk]

    def zero_grad(self) -> None:
        """Start a step."""

    def forward_backward(
        self, engine: PipelineEngine, schedule: Schedule, forward: Forward, message: Message, loss_grad: Value, progress
    ) -> list[Tensor]:
        """Run the micro-batches of a step and return the last stage's losses.

        Communicates: hidden states and their gradients between stages; gradients over dp, which may still be in flight
        at return.
        """
        return engine.run(
            schedule, forward, message, begin_backward=self.begin_backward, loss_grad=loss_grad, recorder=progress
        )

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        """Prepare for a chunk's backward, or for one half of it. `is_last`: this backward brings the last gradient of
        each parameter, which may then be summed over dp."""

    def finish_grad_sync(self) -> None:
        """Return once `main_grads` hold all gradients, summed over dp. Collective over dp."""

    def gather_params(self) -> None:
        """Start to send the updated `owned` to all ranks. Collective over dp."""

    def wait_for_params(self) -> None:
        """Return once all parameters are up to date. A parameter that is read as an attribute of its module needs no
        call."""

    def release_params(self) -> None:
        """Free the other ranks' weights, which a forward without a backward has gathered."""

    def weights(self) -> dict[str, LocalShard]:
        """This rank's part of the weights by parameter name, up to date, in `weight_dtype`; live memory if possible."""
        return self.owned

    def weight_memory(self) -> list[Tensor]:
        """The tensors that hold the parameters."""
        return [shard.values for shard in self.weights().values()]

    def grad_memory(self) -> list[Tensor]:
        """The tensors that hold gradients after a step."""
        return list(self.main_grads.values())

    def pending_grads(self) -> list[dict[str, Tensor]]:
        """Live gradients of earlier steps that a later step will apply, oldest first (`sync.mode: delayed`)."""
        return []

    def resume_pending_grads(self, iteration: int) -> None:
        """Resume from `pending_grads`, whose tensors a load has filled with those of a run after `iteration` steps."""


def only_dtype(params: Params, key: str) -> torch.dtype:
    """The dtype of all parameters. Raises TrainingError, with the config `key`, where there are several."""
    dtypes = {parameter.dtype for parameter in params.values()}
    if len(dtypes) > 1:
        raise TrainingError(
            f"{key}: got parameters of {sorted(map(str, dtypes))}; needs one dtype; use parallel.ddp: local without "
            "optim.distributed"
        )
    return dtypes.pop()


def names_by_chunk(chunks: Chunks, params: Params) -> list[list[str]]:
    """The names in `params` of each chunk's parameters, in order of registration."""
    names = {parameter: name for name, parameter in params.items()}
    return [[names[parameter] for parameter in chunk.parameters()] for chunk in chunks]
