"""Our own checkpoints as source and target, in any layout, weights alone or with all state that a run resumes from.

Each shard of the target is read from the rectangles of the source that overlap it. The states of random generators are
left out: they belong to ranks, and a run that finds none starts new ones.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite import tokenizer_files
from megatron_lite.checkpoint import directory
from megatron_lite.checkpoint.compatible import (
    CORPORA,
    ORDER,
    OTHER_SUMS,
    changed_corpora,
    changed_model,
    differing,
    pending,
    raise_where,
)
from megatron_lite.checkpoint.layout import LAYOUT_FILE, USE_ANOTHER, WEIGHT, parse_config, read_layout
from megatron_lite.checkpoint.match import MODEL_PROVIDER, MODEL_TYPE, STARTS_TEXTS
from megatron_lite.checkpoint.reshard import find_moves, rectangles, tile
from megatron_lite.checkpoint.store import Opened
from megatron_lite.checkpoint.tensor_file import Spec
from megatron_lite.config.load import SETTINGS, WRITTEN, dump_settings
from megatron_lite.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from megatron_lite.config.validate import failures, raise_any
from megatron_lite.convert.grid_files import Progress, Values, write_grid
from megatron_lite.convert.recipe import Checkpoint, full_table, stage_tables
from megatron_lite.data.identity import recorded_identities
from megatron_lite.data.tokenizer import tokenizer_hash
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.dtypes import PRECISION_NAMES, SAFETENSORS_DTYPES
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard
from megatron_lite.plan.sizes import check_layout
from megatron_lite.stored_data import check_copies, own_config, run_folder
from megatron_lite.text import listed
from megatron_lite.tokenizer_files import FOLDER, files_of, own_spec, spec_of_copies

Settings = Mapping[str, Mapping[str, Any]]
"""Section -> field -> value, as the user gave them."""


def recognise(path: Path) -> bool:
    """Whether `path` is a run's folder, its checkpoints/ folder or an iter_... folder."""
    try:
        return (path / LAYOUT_FILE).exists() or any(directory.iterations(root) for root in (path, path / "checkpoints"))
    except OSError:
        return False


class Stored:
    """A checkpoint of ours on the disk, whose values can be read in shards of another layout."""

    def __init__(self, path: Path):
        self.folder = directory.resolve(path)
        self.layout = read_layout(self.folder)
        check_copies(self.folder, self.layout)
        self._opened = Opened(self.folder, self.layout)

    def config(self, settings: Settings) -> Config:
        """The config that it was saved with, with the user's settings."""
        fields = dict(self.layout.config)
        for section, values in settings.items():
            fields[section] = {**fields.get(section, {}), **values}
        return parse_config(fields, self.folder)

    def tokenizer(self) -> tuple[str, dict[str, Path]]:
        """The SPEC and the files of its tokenizer in the run's folder; both empty where it is elsewhere."""
        home, spec = run_folder(self.folder), own_spec(self.config({}).data.tokenizer, run_folder(self.folder))
        return spec, files_of(spec) or tokenizer_files.own_files_in(home / FOLDER)

    def custom_table(self, model: ModelConfig) -> ParamTable | None:
        """Every parameter of a custom model; None if names, shapes and shards are those of the built-in model."""
        saved = {name: tensor for name, tensor in self.layout.tensors.items() if not tensor.copy_of}
        is_custom = MODEL_PROVIDER in self.layout.origin
        try:
            check_layout(self.folder, self.layout, model)
            table = full_table(model)
        except CheckpointError:
            if not is_custom:
                raise
            table = {}
        differing = [
            name
            for name in {**saved, **table}
            if name not in table
            or name not in saved
            or (saved[name].shape, saved[name].shard) != (tuple(table[name].shape), table[name].shard)
        ]
        if differing and is_custom:
            return {n: ParamMeta(tensor.shape, tensor.shard, "normal", name=n) for n, tensor in saved.items()}
        if differing:
            raise CheckpointError(
                f"{self.folder}: {listed(differing)} differ from the model section of the config; leave out settings "
                "that change sizes"
            )
        return None

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        """Kind -> dtype of each value of a parameter, the weight first."""
        return {kind: SAFETENSORS_DTYPES[value.dtype] for kind, value in self.layout.tensors[name].values.items()}

    def shard_of(self, name: str, kind: str, shard: Shard, rank: int, size: int) -> Tensor:
        """The shard of one value that belongs to tensor-parallel rank `rank` of `size`."""
        tensor = self.layout.tensors[name]
        value = tensor.values[kind]
        if self.layout.grid.dp > 1 and any(each.dp is not None for each in (*value.rules, *value.slices)):
            raise CheckpointError(
                f"{self.folder}: {kind} differs on {self.layout.grid.dp} data-parallel ranks (sync.mode); convert the "
                "common weights alone, with --weights-only"
            )
        wanted = rectangles(tensor.shape, shard, rank, size)
        moved = find_moves(self.layout, name, kind, wanted, tp=rank, pp=0, dp=0)
        full, count = sum(each.numel for each in wanted), sum(move.target.numel for move in moved)
        if count != full:
            raise CheckpointError(f"{self.folder}: {kind} of {name} has {count:,} of its {full:,} elements")
        if not tile((move.target.box for move in moved), (each.box for each in wanted)):
            raise CheckpointError(f"{self.folder}: slices of {kind} of {name} overlap; {USE_ANOTHER}")
        for move in moved:
            stored = move.stored  # raises where a file is smaller than the memory for it would be
            self._opened.file(stored.file).entry(stored.key, stored.end - stored.start)
        local = torch.empty(shard.local_shape(tensor.shape, size), dtype=SAFETENSORS_DTYPES[value.dtype])
        for move in moved:
            self._opened.fill([(local.view(-1), [move])])
        return local


class WeightsOf:
    """The weights of a model in any format."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._name, self._full = "", torch.empty(0)

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        """Kind -> dtype of each value of a parameter, the weight first."""
        return {WEIGHT: self._checkpoint.tensors[name].dtype}

    def shard_of(self, name: str, kind: str, shard: Shard, rank: int, size: int) -> Tensor:
        """The shard of one value that belongs to tensor-parallel rank `rank` of `size`."""
        if name != self._name:
            self._full = torch.empty(0)  # frees the last tensor before this one is read
            self._full, self._name = self._checkpoint.read(name), name
        return shard.split(self._full, rank, size)


def read(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """The full weights of a checkpoint in any layout."""
    stored = Stored(path)
    config = stored.config({"model": overrides})
    custom = stored.custom_table(config.model)
    table = full_table(config.model) if custom is None else custom
    (spec, files), origin, notes = stored.tokenizer(), stored.layout.origin, []
    if config.data.tokenizer and not spec:
        notes.append(
            f"data.tokenizer of its config, {config.data.tokenizer}, is not in {run_folder(stored.folder)} and is not "
            "copied; give data.tokenizer=SPEC to copy it"
        )
    tokenizer = tokenizer_files.readable(spec, config.model.vocab_size)
    if tokenizer and tokenizer.bos not in (None, tokenizer.eod) and not {MODEL_TYPE, STARTS_TEXTS} & origin.keys():
        notes.append(f"its documents start without token {tokenizer.bos}, which other programs may add to prompts")
    return Checkpoint(
        model=config.model,
        tensors={name: Spec(stored.kinds(name)[WEIGHT], meta.shape) for name, meta in table.items()},
        read=lambda name: stored.shard_of(name, WEIGHT, table[name].shard, 0, 1),
        iteration=stored.layout.iteration,
        tokenizer=files,
        tokenizer_spec=spec,
        notes=notes,
        origin=origin,
        custom=custom,
    )


def write(
    path: Path,
    checkpoint: Checkpoint,
    *,
    tensor: int,
    pipeline: int,
    progress: Progress,
    home: Path,
    settings: Settings,
) -> None:
    """Write a run's folder with the weights of a model in any format, to start training from.

    `home` is the final path of the folder; `settings` are for its config.
    """
    weights = WeightsOf(checkpoint)
    origin = {key: value for key, value in checkpoint.origin.items() if key != CORPORA}  # a new run, on any data
    precision = PRECISION_NAMES[next(iter(checkpoint.tensors.values())).dtype]
    iterations = settings.get("train", {}).get("iterations", TrainConfig().iterations)
    seq_length = min(DataConfig().seq_length, checkpoint.model.max_position_embeddings)
    fields: dict[str, dict[str, Any]] = {
        "run": {"dir": f"runs/{home.name}_trained"},  # not the folder itself, which only has the start
        "model": checkpoint.model.model_dump(),
        "data": {"seq_length": seq_length},
        "train": {"precision": precision},
        "optim": {"warmup_iterations": iterations // 10},  # the first moments of a new optimizer are noise
        "checkpoint": {"load_weights": str(home)},
    }
    if checkpoint.tokenizer:
        tokenizer_files.carry(checkpoint.tokenizer, path / FOLDER)
        given, copies = checkpoint.tokenizer_spec, path / FOLDER
        spec = spec_of_copies(given, str(copies)) if given else tokenizer_files.spec_in(copies)
        if given or tokenizer_files.readable(spec, checkpoint.model.vocab_size):
            own = {"tokenizer": spec.replace(str(path), str(home))}
            settings = {**settings, "data": {**settings.get("data", {}), **own}}
            origin["tokenizer"] = tokenizer_hash(spec)
    config = _config(fields, settings, tensor, pipeline)
    tables = stage_tables(config.model, checkpoint.custom, tensor=tensor, pipeline=pipeline)
    _write_run(path, checkpoint.iteration, weights, tables, config, state={}, origin=origin, progress=progress)


def with_copied_tokenizer(stored: Stored, settings: Settings, path: Path, home: Path) -> Settings:
    """The settings of another layout of a run, with copies of its tokenizer's files or of those that the user gave."""
    given = settings.get("data", {}).get("tokenizer", "")
    spec, files = (given, files_of(given)) if given else stored.tokenizer()
    if files:
        tokenizer_files.carry(files, path / FOLDER)
        spec = spec_of_copies(spec, str(home / FOLDER)) if spec else ""
    return {**settings, "data": {**settings.get("data", {}), "tokenizer": spec}}


def copy(
    path: Path, stored: Stored, *, tensor: int, pipeline: int, progress: Progress, home: Path, settings: Settings
) -> list[str]:
    """Write a run's folder in another layout that resumes like the stored checkpoint.

    Optimizer state, counters and config are kept. Parameters are those of `write`. Returns the fields with paths that
    settings.yaml does not have, because they may be somebody else's.
    """
    before = stored.config({})
    fields = before.model_dump()
    fields["run"]["dir"] = str(home)
    fields["parallel"] |= {"virtual_pipeline": 1, "pipeline_layout": "even"}
    if before.parallel.schedule == "interleaved":
        fields["parallel"]["schedule"] = "1f1b"
    if before.data.seq_length % tensor:
        fields["parallel"]["sequence"] = False
    fields["train"]["global_batch_size"] = before.train.global_batch(stored.layout.grid.dp)
    if settings.get("parallel", {}).get("ddp", "deepspeed") != "deepspeed":
        del fields["deepspeed"]
    config = _config(fields, settings, tensor, pipeline)
    tables = stage_tables(config.model, stored.custom_table(config.model), tensor=tensor, pipeline=pipeline)
    layout = stored.layout
    state, origin = layout.state, layout.origin
    given = settings.get("data", {}).get("paths")  # others of the stored config are not looked at
    corpora = (origin.get(CORPORA, []), recorded_identities(given) if given else origin.get(CORPORA, []))
    changed = changed_corpora(before.model_dump(mode="json"), config.model_dump(mode="json"), *corpora)
    check_same_run(before, config, changed)
    _write_run(path, layout.iteration, stored, tables, config, state=state, origin=origin, progress=progress)
    own, left = own_config(config, stored.folder, origin, settings)
    directory.write_durably(path / SETTINGS, (WRITTEN + dump_settings(own)).encode())
    return left


def check_same_run(source: Config, target: Config, changed_corpora: list[str]) -> None:
    """Raise ConfigError if the optimizer state of a run `source` would be invalid after a conversion to `target`."""
    before, after = source.model_dump(mode="json"), target.model_dump(mode="json")
    sync = [f"sync.{name}" for name in before["sync"]]
    changed = changed_model(before, after) + differing(before, after, [*ORDER, "train.precision", *sync])
    changed += changed_corpora
    raise_where(changed, "the optimizer state needs the old values; restore them, or convert with --weights-only")
    raise_where(differing(before, after, pending(source)), f"{OTHER_SUMS} convert with --weights-only")


def _config(fields: dict[str, dict[str, Any]], settings: Settings, tensor: int, pipeline: int) -> Config:
    """The config of a target with the user's settings; raises ConfigError if it cannot run."""
    fields.setdefault("parallel", {}).update(tensor=tensor, pipeline=pipeline)
    for section, values in settings.items():
        fields[section] = {**fields.get(section, {}), **values}
    config = Config.model_validate(fields)
    raise_any(failures(config, config.parallel.model_size))
    return config


def _write_run(
    path: Path,
    iteration: int,
    values: Values,
    tables: Sequence[ParamTable],
    config: Config,
    *,
    state: dict[str, Any],
    origin: dict[str, Any],
    progress: Progress,
) -> None:
    root = path / "checkpoints"
    write_grid(root, iteration, values, tables=tables, config=config, state=state, origin=origin, progress=progress)
    directory.write_durably(path / SETTINGS, (WRITTEN + dump_settings(config)).encode())
