"""Names of model providers, as `--model` accepts them: FILE.py:NAME or module:NAME.

A custom model may use tensors of the same names for another computation. So a checkpoint records its provider, and the
built-in model does not load a custom model's checkpoint. Custom providers are not compared with each other.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_lite.checkpoint.match import BUILT_IN
from megatron_lite.errors import ConfigError

_loading: list[str] = []  # names of the providers whose modules are being imported


@dataclass(frozen=True)
class NamedProvider:
    """A model provider known by its name, so it can be pickled; its module is imported at the first call."""

    name: str

    def __post_init__(self) -> None:
        place, _, attribute = self.name.rpartition(":")
        if not (place and attribute):
            raise ConfigError(f"--model is {self.name!r}; give FILE.py:NAME or module:NAME")
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"--model is {self.name}, but {place} does not exist")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.load()(*args, **options)

    def load(self) -> Callable[..., Any]:
        """Import the function. Raise ConfigError if a module or attribute is missing; other errors propagate."""
        place, _, attribute = self.name.rpartition(":")
        _loading.append(self.name)
        try:
            found: Any = _module_of(place)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (AttributeError, ModuleNotFoundError) as error:
            raise ConfigError(f"--model is {self.name}: {error}") from error
        finally:
            _loading.pop()
        if not callable(found):
            raise ConfigError(f"--model is {self.name}, of type {type(found).__name__}; give a function like get_model")
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


def provider_name(provider: Callable[..., Any]) -> str:
    """The name of a provider, of a top-level function as `--model` accepts it; empty for the built-in `get_model`."""
    if isinstance(provider, NamedProvider):
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
            f"--model is {_loading[-1]}: its file starts a run while it is imported; put that under "
            'if __name__ == "__main__":'
        )
