"""Megatron's parallelism, small enough to read.

The public names:

    training      pretrain, load_config, Config, Section
    custom loop   initialize_megatron, setup_model_and_optimizer, Hooks, build_splits, build_loader,
                  num_microbatches, train_step, evaluate, save_run, finalize_megatron
    custom model  get_model, Mask, declare, ParamMeta, Shard, initialize_parameters; layers are in
                  megatron_lite.parallel: linear, embedding, loss
    custom data   Splits, IndexedDataset, build_tokenizer
    errors        MegatronLiteError and its subclasses ConfigError and StoppedEarly
    ported code   megatron_lite.mpu, with functions and layers of Megatron's names

Everything else is private and may change without notice. Names are resolved on first use, so that importing the package
does not load torch.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from megatron_lite.config.load import load_config
    from megatron_lite.config.schema import Config, Section
    from megatron_lite.data.blended import Splits
    from megatron_lite.data.indexed import IndexedDataset
    from megatron_lite.data.tokenizer import build_tokenizer
    from megatron_lite.errors import ConfigError, MegatronLiteError, StoppedEarly
    from megatron_lite.launch.pretrain import pretrain, save_run
    from megatron_lite.model.build import get_model, initialize_parameters
    from megatron_lite.model.masks import Mask
    from megatron_lite.parallel.shard import ParamMeta, Shard, declare
    from megatron_lite.training.evaluate import build_loader, evaluate
    from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
    from megatron_lite.training.pretrain import build_splits
    from megatron_lite.training.run import Hooks
    from megatron_lite.training.setup import setup_model_and_optimizer
    from megatron_lite.training.state import num_microbatches
    from megatron_lite.training.step import train_step

__version__ = "0.2.0"

__all__ = [
    "Config",
    "ConfigError",
    "Hooks",
    "IndexedDataset",
    "Mask",
    "MegatronLiteError",
    "ParamMeta",
    "Section",
    "Shard",
    "Splits",
    "StoppedEarly",
    "build_loader",
    "build_splits",
    "build_tokenizer",
    "declare",
    "evaluate",
    "finalize_megatron",
    "get_model",
    "initialize_megatron",
    "initialize_parameters",
    "load_config",
    "num_microbatches",
    "pretrain",
    "save_run",
    "setup_model_and_optimizer",
    "train_step",
]

_NAMES = {
    "config.load": "load_config",
    "config.schema": "Config Section",
    "data.blended": "Splits",
    "data.indexed": "IndexedDataset",
    "data.tokenizer": "build_tokenizer",
    "errors": "ConfigError MegatronLiteError StoppedEarly",
    "launch.pretrain": "pretrain save_run",
    "model.build": "get_model initialize_parameters",
    "model.masks": "Mask",
    "parallel.shard": "ParamMeta Shard declare",
    "training.evaluate": "build_loader evaluate",
    "training.initialize": "finalize_megatron initialize_megatron",
    "training.pretrain": "build_splits",
    "training.run": "Hooks",
    "training.setup": "setup_model_and_optimizer",
    "training.state": "num_microbatches",
    "training.step": "train_step",
}
_HOMES = {name: f"megatron_lite.{module}" for module, names in _NAMES.items() for name in names.split()}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if not _typing.TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name):
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
