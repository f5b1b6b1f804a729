"""Functions of a user's script, named as the command line accepts them: FILE.py:NAME or module:NAME."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.training.provider import LOADING

WANTED = {  # by option
    "--model": "a function like get_model",
    "--forward-step": "a function of a micro-batch and the model",
    "--data": "a function of the run, which returns Splits",
}


@dataclass(frozen=True)
class NamedFunction:
    """A function known by its name, so it can be pickled; its module is imported at the first call."""

    name_of_script: str
    option: str = "--model"

    def __post_init__(self) -> None:
        place, _, attribute = self.name_of_script.rpartition(":")
        if not (place and attribute):
            raise ConfigError(f"{self.option} is {self.name_of_script!r}; give FILE.py:NAME or module:NAME")
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"{self.option} is {self.name_of_script}, but {place} does not exist")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.load()(*args, **options)

    def load(self) -> Callable[..., Any]:
        """Import the function. Raise ConfigError if a module or attribute is missing; other errors propagate."""
        place, _, attribute = self.name_of_script.rpartition(":")
        LOADING.append(f"{self.option} is {self.name_of_script}")
        try:
            found: Any = _module_of(place)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (AttributeError, ModuleNotFoundError) as error:
            raise ConfigError(f"{self.option} is {self.name_of_script}: {error}") from error
        finally:
            LOADING.pop()
        if not callable(found):
            kind = type(found).__name__
            raise ConfigError(f"{self.option} is {self.name_of_script}, of type {kind}; give {WANTED[self.option]}")
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
