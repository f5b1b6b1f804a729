"""Paths in the config of a checkpoint count only inside its run's folder: somebody else may have written them."""

import os
from pathlib import Path

from megatron_lite.config.schema import DataConfig
from megatron_lite.data.blended import parse_paths
from megatron_lite.data.tokenizer_files import own_spec
from megatron_lite.errors import ConfigError
from megatron_lite.files import is_inside


def run_folder(folder: Path) -> Path:
    """The run's folder of an iter_... folder; the latter itself where it is alone."""
    folder = Path(os.path.abspath(folder))
    return folder.parents[1] if folder.parent.name == "checkpoints" else folder


def own_data(data: DataConfig, folder: Path, tokenizer: str = "") -> DataConfig:
    """The data section of the checkpoint in `folder`, without corpora and caches outside of its run's folder.

    Raises ConfigError for a tokenizer outside of it, unless the user gives one, `tokenizer`.
    """
    home = run_folder(folder)
    tokenizer = tokenizer or own_spec(data.tokenizer, home)
    if data.tokenizer and not tokenizer:
        raise ConfigError(
            f"{folder}: data.tokenizer of its config is {data.tokenizer}, which is not in {home}, and a path in a "
            "checkpoint counts only inside of its run's folder; give data.tokenizer=SPEC on the command line"
        )
    prefixes = parse_paths(data.paths).prefixes if data.paths else ()
    are_own = all(is_inside(Path(f"{prefix}.{end}"), home) for prefix in prefixes for end in ("idx", "bin"))
    return data.model_copy(update={"tokenizer": tokenizer, "cache_dir": "", "paths": data.paths if are_own else ()})
