"""Megatron's parallelism, small enough to read.

A script calls `pretrain`, or `initialize_megatron`, `get_model` or `setup_model_and_optimizer`, and its loop over
`train_step`. Names are resolved on first use, so that importing the package does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lite.config.schema import Config as Config
    from megatron_lite.model.build import get_model as get_model
    from megatron_lite.training.initialize import initialize_megatron as initialize_megatron
    from megatron_lite.training.pretrain import pretrain as pretrain
    from megatron_lite.training.setup import setup_model_and_optimizer as setup_model_and_optimizer

__version__ = "0.1.0"

_HOMES = {
    "Config": "megatron_lite.config.schema",
    "get_model": "megatron_lite.model.build",
    "initialize_megatron": "megatron_lite.training.initialize",
    "pretrain": "megatron_lite.launch.pretrain",  # the same arguments as training.pretrain.pretrain
    "setup_model_and_optimizer": "megatron_lite.training.setup",
}
__all__ = ["Config", "get_model", "initialize_megatron", "pretrain", "setup_model_and_optimizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
