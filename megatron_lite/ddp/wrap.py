"""The choice of a data-parallel engine."""

from collections.abc import Sequence

import torch
from torch import nn

from megatron_lite.config.schema import Config
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.local import LocalDDP
from megatron_lite.ddp.sharded import ShardedDDP
from megatron_lite.ddp.torch_ddp import TorchDDP
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import ParallelContext, duplicate_group, solo
from megatron_lite.parallel.shard import ParamTable


def wrap_ddp(
    config: Config,
    chunks: Sequence[nn.Module],
    params: dict[str, nn.Parameter],
    table: ParamTable,
    ctx: ParallelContext,
    *,
    grad_dtype: torch.dtype,
) -> DataParallel:
    """The engine that `parallel.ddp`, `optim.distributed` and `sync` name, over this rank's chunks.

    With one data-parallel rank there is nothing to reduce or to share out, and `local`, `torch` and `fsdp`, distributed
    or not, are plain LocalDDP. `fsdp` gives the chunks new parameters. Collective over dp.
    """
    check_every_parameter_is_trained(chunks, params, table)
    parallel, sync = config.parallel, config.sync
    dp = ctx.dp
    if sync.is_local:
        dp = solo("dp")  # between two meetings every rank trains on its own
    elif sync.delay:
        dp = duplicate_group(dp, config.train.comm_timeout)
    common = {"bucket_mb": parallel.bucket_mb, "grad_dtype": grad_dtype}
    if parallel.ddp == "torch" and dp.size > 1:
        return TorchDDP(chunks, params, dp, **common)
    if parallel.ddp == "fsdp" and dp.size > 1:
        from megatron_lite.ddp.fsdp import FullyShardedDDP  # half a second, which other runs need not wait

        return FullyShardedDDP(chunks, params, dp, grad_dtype=grad_dtype)
    if config.optim.distributed and dp.size > 1:
        return ShardedDDP(chunks, params, table, dp, gather=duplicate_group(dp, config.train.comm_timeout), **common)
    return LocalDDP(chunks, params, table, dp, **common, delay=sync.delay if sync.mode == "delayed" else 0)


def check_every_parameter_is_trained(
    chunks: Sequence[nn.Module], params: dict[str, nn.Parameter], table: ParamTable
) -> None:
    """Raises TrainingError where a model of the user's own holds a parameter that is frozen, or not in the table."""
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
