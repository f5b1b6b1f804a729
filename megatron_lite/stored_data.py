"""Paths in the config of a checkpoint, which somebody else may have written: none is believed by its name."""

import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.compatible import CORPORA
from megatron_lite.checkpoint.layout import USE_ANOTHER, Layout, StoredSlice, Value
from megatron_lite.checkpoint.store import Opened
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
    if found := differing_copies(folder, layout):
        raise CheckpointError(f"{folder}: {found}; each layout would be another model. {USE_ANOTHER}")


def differing_copies(folder: Path, layout: Layout, end: int | None = None) -> str:
    """Two files whose copies of a value differ: of a tensor that ranks of tp replicate, or of a tied embedding.

    Their checksums are compared, so no tensor is read; those of version 3 are in the headers of the files. Empty where
    all copies are equal. `end` is that of the elements of each shard that are compared: a file of each rank of tp has
    the first ones, however many data-parallel ranks share the rest.
    """
    with Opened(folder, layout) as opened:
        for name, tensor in layout.tensors.items():
            original = layout.tensors[tensor.copy_of].values if tensor.copy_of else {}
            for kind, value in tensor.values.items():
                others = (tensor.copy_of,) if kind in original else ()
                if not _has_copies(value, tensor.shard.is_split) and not others:
                    continue
                first: dict[tuple, StoredSlice] = {}
                for stored in chain(
                    *(layout.slices(each, kind, end and (lambda _: (0, end))) for each in (*others, name))
                ):
                    of_rank = (stored.start, stored.end, stored.dp, stored.tp if tensor.shard.is_split else None)
                    copy = first.setdefault(of_rank, stored)
                    if copy is not stored and opened.checksums(stored) != opened.checksums(copy):
                        return f"{kind} of {name} differs in {copy.file} and {stored.file}, which have copies of it"
    return ""


def _has_copies(value: Value, is_split: bool) -> bool:
    """Whether several ranks of tp, or several stages, may have saved one range of a value."""
    stages = {each.pp for each in (*value.rules, *value.slices)}
    return bool(value.slices) or len(stages) > 1 or (not is_split and any(rule.tp[1] > 1 for rule in value.rules))
