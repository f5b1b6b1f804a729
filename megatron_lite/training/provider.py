"""The model of a script, and its name as the command line accepts it, FILE.py:NAME or module:NAME.

A custom model may use tensors of the same names for another computation. So a checkpoint records its provider, and the
built-in model does not load a custom model's checkpoint. Custom providers are not compared with each other.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from megatron_lite.checkpoint.match import BUILT_IN
from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.mpu import groups as mpu
from megatron_lite.mpu.initialization import draw_by_name
from megatron_lite.mpu.tied import tie_stages
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import ParamMeta, Shard, declare

ModelProvider = Callable[..., Sequence[nn.Module]]
LOADING: list[str] = []  # options and names of the functions whose modules are being imported


def build_chunks(
    provider: ModelProvider, config: Config, ctx: ParallelContext, rng: RngTracker, dtype: torch.dtype
) -> Sequence[nn.Module]:
    """This rank's chunks of the model, from a provider like `get_model`, or from Megatron's.

    Megatron's is known by the names of its parameters, `pre_process` and `post_process`. It is called once for each
    chunk, with mpu's virtual rank set, and its parameters are converted to `dtype`. Weights of mpu layers are drawn by
    seed and name, unless the provider has changed them; other parameters keep their values.
    """
    function = cast(Any, provider).load() if hasattr(provider, "name_of_script") else provider
    if not {"pre_process", "post_process"} <= set(inspect.signature(function).parameters):
        chunks = function(config, ctx, rng, dtype=dtype)
        check_num_chunks(chunks, config)
        if function_name(provider):
            tie_stages(chunks, ctx)
        return chunks
    function = cast(Callable[..., nn.Module], function)
    chunks = []
    for chunk in range(config.parallel.virtual_pipeline):
        mpu.set_virtual_pipeline_model_parallel_rank(chunk)
        first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        chunks.append(function(pre_process=first, post_process=last).to(dtype))
        _declare_parameters(chunks[-1], ctx, has_sequence_parallelism=config.parallel.sequence)
    mpu.set_virtual_pipeline_model_parallel_rank(0)
    tie_stages(chunks, ctx)
    draw_by_name(chunks, config.run.seed, ctx.tp)
    return chunks


def check_num_chunks(model: Sequence[nn.Module], config: Config) -> None:
    """Raise TrainingError for a model with more or fewer chunks than the config has."""
    if len(model) != config.parallel.virtual_pipeline:
        raise TrainingError(
            f"the model provider returned {len(model)} chunks, and parallel.virtual_pipeline is "
            f"{config.parallel.virtual_pipeline}; return that many, for stages pp.rank, pp.rank + pp.size, and so on"
        )


def _declare_parameters(chunk: nn.Module, ctx: ParallelContext, *, has_sequence_parallelism: bool) -> None:
    """Describe the parameters that have no description: by Megatron's attributes `tensor_model_parallel`,
    `partition_dim`, `partition_stride` and `sequence_parallel`, without them as replicated over tp. Weight decay
    applies to matrices."""
    for parameter in chunk.parameters():
        if hasattr(parameter, "meta"):
            continue
        shape, shard = list(parameter.shape), Shard()
        if getattr(parameter, "tensor_model_parallel", False):
            dim, stride = int(parameter.partition_dim), int(getattr(parameter, "partition_stride", 1))  # type: ignore[attr-defined]
            shape[dim] *= ctx.tp.size
            shard = Shard(dim, (shape[dim] // stride,) * stride if stride > 1 else ())
        # Its values are those of the provider; nothing draws them again.
        is_partial = has_sequence_parallelism and bool(getattr(parameter, "sequence_parallel", False))
        meta = ParamMeta(tuple(shape), shard, "normal", decay=parameter.dim() > 1, sequence_parallel=is_partial)
        declare(parameter, meta)


def function_name(provider: Callable[..., Any]) -> str:
    """The name of a function, of a top-level one as the command line accepts it; empty for the built-in `get_model`."""
    if name := getattr(provider, "name_of_script", ""):
        return name
    while isinstance(provider, partial):
        provider = provider.func
    named: Any = provider if hasattr(provider, "__qualname__") else type(provider)
    place = named.__module__
    if place in ("__main__", "__mp_main__"):
        file = Path(inspect.getfile(named)).absolute()
        place = str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
    name = f"{place}:{named.__qualname__}"
    return "" if name == BUILT_IN else name


def check_not_loading() -> None:
    """Raise ConfigError while a provider's module is imported: its top-level code would start a run."""
    if LOADING:
        raise ConfigError(
            f'{LOADING[-1]}: its file starts a run while it is imported; put that under if __name__ == "__main__":'
        )
