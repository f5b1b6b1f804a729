"""The choice of the data-parallel engine, and checks of the model for every engine."""

import math
from importlib import import_module

import torch

from megatron_lite.config.engines import ENGINES
from megatron_lite.config.schema import Config
from megatron_lite.ddp.data_parallel import Chunks, DataParallel, Params, ToWrap
from megatron_lite.ddp.local import LocalDDP
from megatron_lite.ddp.sharded import ShardedDDP
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.collectives import broadcast
from megatron_lite.parallel.context import ParallelContext, duplicate_group, solo, split_group
from megatron_lite.parallel.shard import ParamTable, tied_names


def wrap_ddp(
    config: Config, chunks: Chunks, params: Params, table: ParamTable, ctx: ParallelContext, *, grad_dtype: torch.dtype
) -> DataParallel:
    """The engine of `parallel.ddp`, `optim.distributed` and `sync` for this rank's chunks.

    One data-parallel rank needs LocalDDP only. `fsdp` gives the chunks new parameters. Collective over dp_cp.
    """
    check_every_parameter_is_trained(chunks, params, table)
    parallel, sync, timeout = config.parallel, config.sync, config.train.comm_timeout
    dp = solo("dp") if sync.is_local else ctx.dp_cp  # every rank trains alone between outer steps
    common = {"bucket_mb": bucket_mb(parallel.bucket_mb, dp.size), "grad_dtype": grad_dtype}
    if sync.mode == "delayed":
        dp, kind = duplicate_group(dp, timeout), "delayed"
    else:
        kind = parallel.ddp if dp.size > 1 else "local"
    if kind != "local":
        return import_module(ENGINES[kind]).wrap(ToWrap(config, chunks, params, table, ctx, dp, grad_dtype))
    if config.optim.distributed and dp.size > 1:
        dp, copies = split_group(dp, config.shard_size, timeout)
        return ShardedDDP(chunks, params, table, dp, copies=copies, gather=duplicate_group(dp, timeout), **common)
    return LocalDDP(chunks, params, table, dp, **common)


def bucket_mb(setting: float, num_ranks: int) -> float:
    """The size of a bucket of gradients for `parallel.bucket_mb` on these data-parallel ranks.

    With many ranks a rank's share of a bucket becomes small, and its latency dominates. Megatron-LM also has 4 MB, a
    million fp32 values, for each rank. A single rank has nothing to send early.
    """
    if num_ranks == 1:
        return math.inf
    return setting or max(25.0, 4.0 * num_ranks)


def check_every_parameter_is_trained(chunks: Chunks, params: Params, table: ParamTable) -> None:
    """Raise TrainingError where a custom model has a parameter that is frozen or not in the table."""
    described = {params[name] for name in table}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter not in described:
                problem = "is not in the parameter table and would not be trained; use parallel.shard.declare"
            elif not parameter.requires_grad:
                problem = "has requires_grad off; leave it on, or make the tensor a buffer with persistent=False"
            else:
                continue
            shape = tuple(parameter.shape)
            raise TrainingError(f"parameter {name} of model chunk {number}, shape {shape}, {problem}")


@torch.no_grad()
def start_equal(params: Params, table: ParamTable, ctx: ParallelContext) -> None:
    """Copy the values of a parameter's first replica to all its replicas.

    A custom model may draw different values on each rank, and these would stay different: only gradients are summed.
    Communicates: each parameter over dp_cp, over tp where it is not sharded, and a tied embedding over embd.
    """
    for name, parameter in params.items():
        if not table[name].shard.is_split:
            parameter.copy_(broadcast(parameter.clone(), ctx.tp, src=0))
        parameter.copy_(broadcast(parameter.clone(), ctx.dp_cp, src=0))
    for name in tied_names(table):
        params[name].copy_(broadcast(params[name].clone(), ctx.embd, src=0))
