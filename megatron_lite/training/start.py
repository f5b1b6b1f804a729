"""The checkpoint that a run starts from: its own newest one, or one that the config names; and its counters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.checkpoint import directory
from megatron_lite.checkpoint.compatible import CORPORA, changed_order, check_order, check_resumable
from megatron_lite.checkpoint.layout import Layout, parse_config
from megatron_lite.config.load import fields_of
from megatron_lite.config.schema import Config
from megatron_lite.data.blended import parse_paths
from megatron_lite.data.identity import Identity
from megatron_lite.errors import CheckpointError, NoCheckpoint
from megatron_lite.optim.scaler import build_scaler
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.context import Group
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
    return directory.root_of(Path(getattr(config.checkpoint, key)))


def find_start(config: Config) -> Start | None:
    """The newest checkpoint of run.dir, otherwise that of `checkpoint.load` or `checkpoint.load_weights`, or None.

    So the command that starts a run from another one also resumes it.
    Raise NoCheckpoint where the folder to load from holds no checkpoint.
    """
    own, wanted = checkpoints_of(config.run.dir), config.checkpoint.load_iteration or None
    given = {"checkpoint.load": config.checkpoint.load, "checkpoint.load_weights": config.checkpoint.load_weights}
    key, folder = next(((key, folder) for key, folder in given.items() if folder), ("", ""))
    is_chosen = bool(key) and (wanted is not None or directory.is_checkpoint(Path(folder)))
    newest = directory.read_latest(own)
    if newest is not None:
        path = Path(folder).resolve()
        if is_chosen and own.resolve() in (path / "checkpoints", path, path.parent):
            raise CheckpointError(
                f"{key} chooses an iteration of {config.run.dir}, which is run.dir: it resumes from its newest. Give "
                f"another run.dir to branch off, or write the iteration into {own / directory.TRACKER_FILE} to go back"
            )
        unused = f"{key} is not used: run.dir has checkpoints" if key else ""
        notice = "; ".join(filter(None, (unused, _older_than_newest(own, newest))))
        return Start("run.dir", own, newest, notice=notice)
    if not key:
        return None
    try:
        root, iteration = directory.place_of(directory.resolve(Path(folder), wanted))
    except CheckpointError as error:
        raise NoCheckpoint(f"{key}: {error}") from error
    return Start(key, root, iteration, is_chosen, "" if is_chosen else _older_than_newest(root, iteration))


def stored_config(stored: Mapping[str, Mapping[str, Any]], folder: Path, config_type: type[Config]) -> Config:
    """The config of layout.json, with the fields of this version and the sections of a script."""
    known = fields_of(config_type)
    fields = {
        section: {key: value for key, value in values.items() if f"{section}.{key}" in known}
        for section, values in stored.items()
        if section in config_type.model_fields
    }
    return parse_config(fields, folder, config_type)


Resumed = tuple[Config, TrainState, Config, list[str]]


def resumed(config: Config, layout: Layout, folder: Path, found: Sequence[Identity], world: Group) -> Resumed:
    """The parts of a run that continues with `config` and the corpora `found` from the checkpoint in `folder`: config,
    with the checkpoint's weights of a blend; counters; the checkpoint's config; changes of the data.

    Raise ConfigError for settings that pending sums need and for other data within a run, and CheckpointError where
    state or config are not those of a run, for example after an edit by hand. Collective over the world.
    """
    state, scaler = layout.state, build_scaler(config.optim, config.train.precision).state_dict()
    has_all = {"train", "adam_steps", "loss_scaler"} <= state.keys() and scaler.keys() <= state["loss_scaler"].keys()
    if not has_all or state["train"].get("iteration") != layout.iteration:
        raise CheckpointError(f"{folder}: its state {str(state)[:80]} is not that of a run. Load another checkpoint")
    saved = stored_config(layout.config, folder, type(config))
    before, paths = saved.model_dump(mode="json"), config.data.paths
    check_resumable(before, config)
    changed = on_first(lambda: changed_order(before, config, layout.origin.get(CORPORA, []), found), world)
    counters = TrainState.from_dict(state["train"])
    if folder.parent == checkpoints_of(config.run.dir):
        check_order(changed, config)
    elif changed:
        counters.start_order()
    if found and not changed and parse_paths(paths).weights is not None:
        # Other weights of the same proportions may be rounded to another order.
        pairs = zip(saved.data.paths[::2], paths[1::2], strict=True)
        data = config.data.model_copy(update={"paths": tuple(word for pair in pairs for word in pair)})
        config = config.model_copy(update={"data": data})
    return config, counters, saved, changed


def _older_than_newest(root: Path, iteration: int) -> str:
    """A notice where the tracker does not name the newest iteration: a user has reset it, or a digit is damaged."""
    newest = max(directory.iterations(root), default=iteration)
    if newest <= iteration:
        return ""
    tracker = root / directory.TRACKER_FILE
    return f"{tracker} names iteration {iteration}; the newest is {newest}. Write {newest} into it to load that"
