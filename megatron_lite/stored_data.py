"""Paths in the config of a checkpoint, which somebody else may have written: none is believed by its name."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.compatible import CORPORA
from megatron_lite.checkpoint.layout import USE_ANOTHER, Layout
from megatron_lite.config.schema import Config, DataConfig
from megatron_lite.data.blended import parse_paths
from megatron_lite.data.identity import recorded_identities
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.files import is_inside
from megatron_lite.tokenizer_files import own_spec

# Fields of a config with paths, beside run.dir and data.tokenizer.
PATHS = (
    "data.paths",
    "data.cache_dir",
    "train.tasks",
    "deepspeed.nvme_path",
    "checkpoint.load",
    "checkpoint.load_weights",
)


def run_folder(folder: Path) -> Path:
    """The run's folder of an iter_... folder; the latter itself where it is alone."""
    folder = Path(os.path.abspath(folder))
    return folder.parents[1] if folder.parent.name == "checkpoints" else folder


def own_data(data: DataConfig, folder: Path, origin: Mapping[str, Any], tokenizer: str = "") -> DataConfig:
    """The data section of the checkpoint in `folder`, for other uses than the run itself.

    Its tokenizer lies in the run's folder, else ConfigError is raised, or the user gives `tokenizer`. Corpora lie there
    too, or have the contents that `origin` records; else there are none. Index files are beside them.
    """
    home = run_folder(folder)
    tokenizer = tokenizer or own_spec(data.tokenizer, home)
    if data.tokenizer and not tokenizer:
        raise ConfigError(
            f"{folder}: data.tokenizer of its config is {data.tokenizer}, which is not in {home}, and a path in a "
            "checkpoint counts only inside of its run's folder; give data.tokenizer=SPEC on the command line"
        )
    prefixes = parse_paths(data.paths).prefixes if data.paths else ()
    are_inside = all(is_inside(Path(f"{prefix}.{end}"), home) for prefix in prefixes for end in ("idx", "bin"))
    are_own = are_inside or (bool(origin.get(CORPORA)) and recorded_identities(data.paths) == origin[CORPORA])
    return data.model_copy(update={"tokenizer": tokenizer, "cache_dir": "", "paths": data.paths if are_own else ()})


def own_config(
    config: Config, folder: Path, origin: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Config, list[str]]:
    """The config of the checkpoint in `folder` without paths that its run's folder or the user did not give; the fields
    that are left out. `given` has the user's fields by section. Corpora of the recorded contents stay.
    """
    fields, left = config.model_dump(), []
    data = own_data(config.data, folder, origin, config.data.tokenizer)
    for name in PATHS:
        section, _, field = name.partition(".")
        if field in given.get(section, {}) or not fields[section][field] or (field == "paths" and data.paths):
            continue
        fields[section][field] = type(config)().model_dump()[section][field]
        left.append(name)
    return type(config).model_validate(fields), left


def check_copies(folder: Path, layout: Layout) -> None:
    """Raise CheckpointError with `differing_copies`."""
    if found := differing_copies(layout):
        raise CheckpointError(f"{folder}: {found}; each layout would be another model. {USE_ANOTHER}")


def differing_copies(layout: Layout) -> str:
    """Two files whose copies of a value differ: of a tensor that ranks of tp replicate, or of a tied embedding.

    Their checksums are compared, so no tensor is read. Empty where all copies are equal.
    """
    for name, tensor in layout.tensors.items():
        original = layout.tensors[tensor.copy_of].values if tensor.copy_of else {}
        for kind, value in tensor.values.items():
            first: dict[tuple, tuple[str, str]] = {}
            others = original[kind].slices if kind in original else ()
            for stored in (*others, *value.slices):
                of_rank = (stored.start, stored.end, stored.dp, stored.tp if tensor.shard.is_split else None)
                file, key = first.setdefault(of_rank, (stored.file, stored.key))
                if layout.files[stored.file].crc32[stored.key] != layout.files[file].crc32[key]:
                    return f"{kind} of {name} differs in {file} and {stored.file}, which have copies of it"
    return ""
