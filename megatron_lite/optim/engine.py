"""The data-parallel engine of a run: gradients and optimizer, built together.

`parallel.ddp`, `optim.distributed` and `sync` choose the engine here. Training uses the contracts DataParallel and
Optimizer, and no engine's name.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

from megatron_lite.config.engines import ENGINES
from megatron_lite.config.schema import Config
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.wrap import start_equal, wrap_ddp
from megatron_lite.model.build import named_params, param_table
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer, Optimizer
from megatron_lite.optim.scaler import build_scaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable


@dataclass(frozen=True)
class Engine:
    """This rank's chunks of the model, the sums of their gradients, and their optimizer."""

    model: Sequence[nn.Module]
    params: dict[str, nn.Parameter]  # by global name
    table: ParamTable
    ddp: DataParallel
    optimizer: Optimizer


def build_data_parallel(
    config: Config, ctx: ParallelContext, make_model: Callable[[], Sequence[nn.Module]], dtype: torch.dtype
) -> Engine:
    """The engine around the chunks that `make_model` returns, whose parameters have `dtype`. Collective over the world.

    Raises TrainingError for parameters that the engine cannot train, and ConfigError where its library is missing.
    """
    if config.parallel.ddp == "deepspeed":
        return import_module(ENGINES["deepspeed"]).build(config, ctx, make_model)
    model = make_model()
    params, table = named_params(model), param_table(model)
    if next(iter(params.values())).device == ctx.device:  # else the engine allocates and draws them
        start_equal(params, table, ctx)
    ddp = wrap_ddp(config, model, params, table, ctx, grad_dtype=torch.promote_types(dtype, torch.float32))
    params = named_params(model)  # parallel.ddp: fsdp has replaced them
    scaler = build_scaler(config.optim, config.train.precision)
    optimizer = MixedPrecisionOptimizer(table, ddp, scaler, config.optim, ctx)
    if config.sync.is_local:
        optimizer = import_module(ENGINES["outer"]).wrap(config, optimizer, params, table, ctx)
    return Engine(model, params, table, ddp, optimizer)


def release_engines() -> None:
    """Free the state that an engine's library keeps in a process."""
    if module := sys.modules.get(ENGINES["deepspeed"]):
        module.release()
