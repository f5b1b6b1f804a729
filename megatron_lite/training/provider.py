"""A script's functions, named as the command line accepts them, FILE.py:NAME or module:NAME; and its model.

A custom model may use tensors of the same names for another computation. So a checkpoint records its provider, and the
built-in model does not load a custom model's checkpoint. Custom providers are not compared with each other.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from megatron_lite.checkpoint.match import BUILT_IN
from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.mpu import groups as mpu
from megatron_lite.mpu.tied import tie_stages
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import ParamMeta, Shard, declare

ModelProvider = Callable[..., Sequence[nn.Module]]
WANTED = {  # by option
    "--model": "a function like get_model",
    "--forward-step": "a function of a micro-batch and the model",
    "--data": "a function of the run, which returns Splits",
}
_loading: list[str] = []  # options and names of the functions whose modules are being imported


@dataclass(frozen=True)
class NamedFunction:
    """A function known by its name, so it can be pickled; its module is imported at the first call."""

    name: str
    option: str = "--model"

    def __post_init__(self) -> None:
        place, _, attribute = self.name.rpartition(":")
        if not (place and attribute):
            raise ConfigError(f"{self.option} is {self.name!r}; give FILE.py:NAME or module:NAME")
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"{self.option} is {self.name}, but {place} does not exist")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.load()(*args, **options)

    def load(self) -> Callable[..., Any]:
        """Import the function. Raise ConfigError if a module or attribute is missing; other errors propagate."""
        place, _, attribute = self.name.rpartition(":")
        _loading.append(f"{self.option} is {self.name}")
        try:
            found: Any = _module_of(place)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (AttributeError, ModuleNotFoundError) as error:
            raise ConfigError(f"{self.option} is {self.name}: {error}") from error
        finally:
            _loading.pop()
        if not callable(found):
            kind = type(found).__name__
            raise ConfigError(f"{self.option} is {self.name}, of type {kind}; give {WANTED[self.option]}")
        return found


def _module_of(place: str) -> ModuleType:
    """Import a file or a dotted module name. Its folder is put on sys.path, so it can import modules next to it."""
    is_file = place.endswith(".py")
    folder = str(Path(place).resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not is_file:
        return import_module(place)
    name = str(Path(place).resolve())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, place)
        assert spec is not None and spec.loader is not None, place
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def build_chunks(
    provider: ModelProvider, config: Config, ctx: ParallelContext, rng: RngTracker, dtype: torch.dtype
) -> Sequence[nn.Module]:
    """This rank's chunks of the model, from a provider like `get_model`, or from Megatron's.

    Megatron's is known by the names of its parameters, `pre_process` and `post_process`. It is called once for each
    chunk, with mpu's virtual rank set, and its parameters are converted to `dtype`. They keep their values.
    """
    function = provider.load() if isinstance(provider, NamedFunction) else provider
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
    if isinstance(provider, NamedFunction):
        return provider.name
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
    if _loading:
        raise ConfigError(
            f'{_loading[-1]}: its file starts a run while it is imported; put that under if __name__ == "__main__":'
        )
