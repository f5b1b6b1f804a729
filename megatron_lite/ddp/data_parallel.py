"""What the training step and the optimizer ask of a data-parallel engine."""

import torch
from torch import Tensor, nn

from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import TrainingError


class DataParallel:
    """One step: `zero_grad`, then for each micro-batch forward through `module`, `begin_backward` and backward, in
    whatever order the pipeline schedule has them, then `finish_grad_sync`. The optimizer reads `main_grads`, changes
    `owned` in place and calls `gather_params`.

    The engines that keep whole replicas have nothing to gather.
    """

    owned: dict[str, LocalShard]
    """By parameter name, the live memory that this rank's optimizer updates; names it has no part of are left out."""

    main_grads: dict[str, Tensor]
    """The gradient of each of `owned`, of the same shape, in fp32 (fp64 for fp64 parameters): the sum over
    micro-batches and over dp. A sum, not a mean: the loss is already divided by the target tokens of the global batch.
    Valid from `finish_grad_sync` until `zero_grad`."""

    has_grads = True
    """False when a step has no gradients to apply yet: see `LocalDDP`'s `delay`."""

    is_sharded = False
    """Whether the ranks of dp own different runs of the parameters."""

    weight_dtype: torch.dtype
    """In which the model computes; `owned` may be wider."""

    def module(self, chunk: int) -> nn.Module:
        """The callable through which this chunk's forward must go."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Starts a step."""

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        """Before a chunk's backward, or a half of it: what comes now is the last gradient of a parameter if
        `is_last`. Only then is it summed over dp."""

    def finish_grad_sync(self) -> None:
        """Returns once all gradients are summed over dp. Collective over dp."""

    def gather_params(self) -> None:
        """Starts to give every rank what the others changed in their `owned`. Collective over dp."""

    def wait_for_params(self) -> None:
        """Returns once all parameters are up to date. What a module reads of its own or another's parameters, as an
        attribute of the module that holds them, is so without it."""

    def release_params(self) -> None:
        """Lets go of weights of other ranks that forwards without a backward have gathered."""

    def weights(self) -> dict[str, LocalShard]:
        """By parameter name, what this rank has of the weights, up to date, in `weight_dtype`; live where it can be."""
        raise NotImplementedError

    def weight_memory(self) -> list[Tensor]:
        """The tensors that hold the parameters, for a count of their bytes."""
        return [held.values for held in self.weights().values()]

    def grad_memory(self) -> list[Tensor]:
        """The tensors that hold gradients after a step, for a count of their bytes."""
        return list(self.main_grads.values())

    def pending_grads(self) -> list[dict[str, Tensor]]:
        """Gradients of the steps before that are still to be used, oldest first, live: see `LocalDDP`'s `delay`."""
        return []

    def resume_pending_grads(self, iteration: int) -> None:
        """After the tensors of `pending_grads` were filled with those of a run that had finished `iteration` steps."""


def only_dtype(params: dict[str, nn.Parameter], key: str) -> torch.dtype:
    """The number format of all parameters; TrainingError where there are several, with the setting that needs one."""
    dtypes = {parameter.dtype for parameter in params.values()}
    if len(dtypes) > 1:
        raise TrainingError(
            f"{key} needs parameters of one number format, but the model has {sorted(map(str, dtypes))}; make them "
            "one, or use parallel.ddp: local without optim.distributed"
        )
    return dtypes.pop()
