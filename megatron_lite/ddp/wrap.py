"""What the training step asks of a data-parallel engine, and the choice of one."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from megatron_lite.ddp.local import LocalDDP
from megatron_lite.ddp.torch_ddp import TorchDDP
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable


class DataParallel(Protocol):
    """One step: `zero_grad`, then for each micro-batch forward through `module`, `begin_backward` and backward, in
    whatever order the pipeline schedule has them, then `finish_grad_sync`; the optimizer reads `main_grads`."""

    main_grads: dict[str, Tensor]
    """By parameter name, this rank's shape, fp32 (fp64 for fp64 parameters): the sum over micro-batches and over dp.
    A sum, not a mean: the loss is already divided by the target tokens of the global batch.
    Valid from `finish_grad_sync` until `zero_grad`."""

    def module(self, chunk: int) -> nn.Module:
        """The callable through which this chunk's forward must go."""
        ...

    def zero_grad(self) -> None:
        """Starts a step."""
        ...

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        """Before a chunk's backward, or a half of it: what comes now is the last gradient of a parameter if
        `is_last`. Only then is it summed over dp."""
        ...

    def finish_grad_sync(self) -> None:
        """Returns once all gradients are summed over dp. Collective over dp."""
        ...


def wrap_ddp(
    chunks: Sequence[nn.Module],
    params: dict[str, nn.Parameter],
    table: ParamTable,
    ctx: ParallelContext,
    *,
    kind: Literal["local", "torch"],
    bucket_mb: float,
    grad_dtype: torch.dtype,
) -> DataParallel:
    """The engine named by `parallel.ddp` over this rank's chunks. Collective over dp for `torch`.

    With one data-parallel rank there is nothing for torch's DDP to reduce, and both kinds are LocalDDP.
    """
    _check_every_parameter_is_trained(chunks, params, table)
    engine = TorchDDP if kind == "torch" and ctx.dp.size > 1 else LocalDDP
    return engine(chunks, params, ctx.dp, bucket_mb=bucket_mb, grad_dtype=grad_dtype)


def _check_every_parameter_is_trained(
    chunks: Sequence[nn.Module], params: dict[str, nn.Parameter], table: ParamTable
) -> None:
    """A model of the user's own may hold a parameter that the table does not, or one that is frozen."""
    known = {params[name] for name in table}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter not in known:
                raise TrainingError(
                    f"parameter {name} of model chunk {number}, shape {tuple(parameter.shape)}, is not in the "
                    "parameter table, so nobody would reduce its gradient or train it; make it through "
                    "parallel.shard.declare"
                )
            if not parameter.requires_grad:
                raise TrainingError(
                    f"parameter {name} of model chunk {number} has requires_grad off, and every parameter is trained "
                    "here; leave it on, or make the tensor a buffer with persistent=False"
                )
