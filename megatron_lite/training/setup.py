"""The parts of a run, made in Megatron's order: model, gradient reduction, optimizer, then the newest checkpoint."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megatron_lite.config.schema import Config
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer
from megatron_lite.optim.scaler import build_scaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.random import RngTracker
from megatron_lite.training.checkpointing import load_newest
from megatron_lite.training.initialize import DTYPES
from megatron_lite.training.run import Run

ModelProvider = Callable[..., Sequence[nn.Module]]


def setup_model_and_optimizer(
    config: Config, ctx: ParallelContext, rng: RngTracker, model_provider: ModelProvider = get_model
) -> Run:
    """A run at its start, or where its newest checkpoint left it.

    `model_provider` is called like `get_model` and returns this stage's chunks; each is called with
    `(tokens [b, s], labels [b, s])` and returns the loss of every token, `[s, b]`.
    Collective over the world when there is a checkpoint to load.
    """
    dtype = DTYPES[config.train.precision]
    model = model_provider(config, ctx, rng, dtype=dtype)
    params, table = named_params(model), param_table(model)
    grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    ddp = wrap_ddp(
        model,
        params,
        table,
        ctx,
        kind=config.parallel.ddp,
        bucket_mb=config.parallel.bucket_mb,
        grad_dtype=grad_dtype,
    )
    scaler = build_scaler(config.optim, config.train.precision)
    optimizer = MixedPrecisionOptimizer(params, table, ddp, scaler, config.optim, ctx)
    run = Run(config, ctx, rng, model, params, table, ddp, optimizer)
    load_newest(run)
    return run
