"""The checkpoint that a run starts from: its own newest one, or one that the config names; and its counters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.checkpoint.compatible import CORPORA, changed_order, check_order
from megatron_lite.checkpoint.directory import (
    TRACKER_FILE,
    is_checkpoint,
    iterations,
    locate,
    place_of,
    read_latest,
    resolve,
    root_of,
)
from megatron_lite.checkpoint.layout import parse_config, read_layout
from megatron_lite.config.load import fields_of
from megatron_lite.config.schema import Config
from megatron_lite.data.identity import recorded_identities
from megatron_lite.errors import CheckpointError, NoCheckpoint
from megatron_lite.training.state import TrainState


def checkpoints_of(run_dir: str) -> Path:
    """The folder of a run's checkpoints."""
    return Path(run_dir) / "checkpoints"


class Start(NamedTuple):
    """The checkpoint that a run starts from."""

    key: str  # config key that names its folder
    root: Path  # on the machine that called find_start
    iteration: int
    is_chosen: bool = False  # by the user, not the newest
    notice: str = ""


def local_root(config: Config, start: Start) -> Path:
    """The start's folder of checkpoints on this machine, which may have it under another path."""
    if start.key == "run.dir":
        return checkpoints_of(config.run.dir)
    key = start.key.removeprefix("checkpoint.")
    return root_of(Path(getattr(config.checkpoint, key)))


def find_start(config: Config) -> Start | None:
    """The newest checkpoint of run.dir, otherwise that of `checkpoint.load` or `checkpoint.load_weights`, or None.

    So the command that starts a run from another one also resumes it.
    Raise NoCheckpoint where the folder to load from holds no checkpoint.
    """
    own, wanted = checkpoints_of(config.run.dir), config.checkpoint.load_iteration or None
    given = {"checkpoint.load": config.checkpoint.load, "checkpoint.load_weights": config.checkpoint.load_weights}
    key, folder = next(((key, folder) for key, folder in given.items() if folder), ("", ""))
    is_chosen = bool(key) and (wanted is not None or is_checkpoint(Path(folder)))
    newest = read_latest(own)
    if newest is not None:
        path = Path(folder).resolve()
        if is_chosen and own.resolve() in (path / "checkpoints", path, path.parent):
            raise CheckpointError(
                f"{key} chooses an iteration of {config.run.dir}, which is run.dir: it resumes from its newest. Give "
                f"another run.dir to branch off, or write the iteration into {own / TRACKER_FILE} to go back"
            )
        unused = f"{key} is not used: run.dir has checkpoints" if key else ""
        notice = "; ".join(filter(None, (unused, _older_than_newest(own, newest))))
        return Start("run.dir", own, newest, notice=notice)
    if not key:
        return None
    try:
        root, iteration = place_of(resolve(Path(folder), wanted))
    except CheckpointError as error:
        raise NoCheckpoint(f"{key}: {error}") from error
    return Start(key, root, iteration, is_chosen, "" if is_chosen else _older_than_newest(root, iteration))


def is_resumed(config: Config) -> bool:
    """Whether a checkpoint fills all weights of the run. A folder of weights may lack some."""
    return not config.checkpoint.load_weights and find_start(config) is not None


def stored_config(stored: Mapping[str, Mapping[str, Any]], folder: Path, config_type: type[Config]) -> Config:
    """The config of layout.json, with the fields of this version and the sections of a script."""
    known = fields_of(config_type)
    fields = {
        section: {key: value for key, value in values.items() if f"{section}.{key}" in known}
        for section, values in stored.items()
        if section in config_type.model_fields
    }
    return parse_config(fields, folder, config_type)


def resumed_state(counters: dict[str, Any], changed: list[str], config: Config, root: Path) -> TrainState:
    """The counters of a run that continues with `config` from a checkpoint in `root`.

    `changed` are those of `changed_order`: another run with other data starts at its first sample. Raise ConfigError
    for other data within a run.
    """
    state = TrainState.from_dict(counters)
    if root == checkpoints_of(config.run.dir):
        check_order(changed, config)
    elif changed:
        state.start_order()
    return state


def start_state(config: Config) -> TrainState:
    """The counters with which a run would start now: new ones, or those of the checkpoint of `find_start`."""
    if config.checkpoint.load_weights and read_latest(checkpoints_of(config.run.dir)) is None:
        return TrainState()  # the weights may be in a format that training converts
    start = find_start(config)
    if start is None:
        return TrainState()
    folder = locate(start.root, start.iteration)
    layout = read_layout(folder)
    saved = stored_config(layout.config, folder, type(config))
    corpora = layout.origin.get(CORPORA, []), recorded_identities(config.data.paths)
    changed = changed_order(saved.model_dump(mode="json"), config, *corpora)
    return resumed_state(layout.state.get("train", {}), changed, config, local_root(config, start))


def _older_than_newest(root: Path, iteration: int) -> str:
    """A notice where the tracker does not name the newest iteration: a user has reset it, or a digit is damaged."""
    newest = max(iterations(root), default=iteration)
    if newest <= iteration:
        return ""
    tracker = root / TRACKER_FILE
    return f"{tracker} names iteration {iteration}; the newest is {newest}. Write {newest} into it to load that"
