"""Our own checkpoints as source and target, in any layout, weights alone or with all that a run needs to go on.

Of a source, each cut that the target wants is read from the rectangles where it lies. Random streams are left out: they
belong to ranks, and a run that finds none starts them anew.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import directory
from megatron_lite.checkpoint.layout import LAYOUT_FILE, WEIGHT, parse_config, read_layout
from megatron_lite.checkpoint.match import DERIVED, MODEL_PROVIDER, free_fields
from megatron_lite.checkpoint.reshard import moves, rectangles
from megatron_lite.checkpoint.store import Opened
from megatron_lite.checkpoint.tensor_file import Spec
from megatron_lite.config.load import dump_config
from megatron_lite.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from megatron_lite.config.validate import failures, raise_any
from megatron_lite.convert import tokenizer_files
from megatron_lite.convert.grid_files import Progress, write_grid
from megatron_lite.convert.recipe import Checkpoint, full_table, stage_tables
from megatron_lite.data.tokenizer import tokenizer_hash
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.parallel.dtypes import PRECISION_NAMES, SAFETENSORS_DTYPES
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard
from megatron_lite.text import listed

Settings = Mapping[str, Mapping[str, Any]]
"""Section -> field -> value, as the user gave them."""


def recognise(path: Path) -> bool:
    """A run's folder, its checkpoints/ folder or an iter_... folder of it."""
    try:
        return (path / LAYOUT_FILE).exists() or any(directory.iterations(root) for root in (path, path / "checkpoints"))
    except OSError:
        return False


class Stored:
    """A checkpoint of ours on the disk."""

    def __init__(self, path: Path):
        self.folder = directory.resolve(path)
        self.layout = read_layout(self.folder)
        self._opened = Opened(self.folder, self.layout)

    def config(self, settings: Settings) -> Config:
        """The config that it was written with, changed where the user says so."""
        fields = dict(self.layout.config)
        for section, values in settings.items():
            fields[section] = {**fields.get(section, {}), **values}
        return parse_config(fields, self.folder)

    def custom_table(self, model: ModelConfig) -> ParamTable | None:
        """Every parameter of a custom model; None where they are those of the built-in one, sharded as it says."""
        saved = {name: tensor for name, tensor in self.layout.tensors.items() if not tensor.copy_of}
        table = full_table(model)
        differing = [
            name
            for name in {**saved, **table}
            if name not in table
            or name not in saved
            or (saved[name].shape, saved[name].shard) != (tuple(table[name].shape), table[name].shard)
        ]
        if differing and MODEL_PROVIDER in self.layout.origin:
            return {n: ParamMeta(tensor.shape, tensor.shard, "normal", name=n) for n, tensor in saved.items()}
        if differing:
            raise CheckpointError(
                f"{self.folder}: {listed(differing)} are not as the model section of the config says; leave out "
                "what changes the model's sizes"
            )
        return None

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        return {kind: SAFETENSORS_DTYPES[value.dtype] for kind, value in self.layout.tensors[name].values.items()}

    def cut(self, name: str, kind: str, shard: Shard, rank: int, size: int) -> Tensor:
        tensor, tp = self.layout.tensors[name], self.layout.grid.tp
        value = tensor.values[kind]
        if self.layout.grid.dp > 1 and any(piece.dp is not None for piece in value.pieces):
            raise CheckpointError(
                f"{self.folder}: each of {self.layout.grid.dp} data-parallel ranks had {kind} of its own "
                "(sync.mode), which one cannot stand for. Convert the common weights alone, with --weights-only"
            )
        moved = moves(tensor, value.pieces_for(shard, rank, 0, 0, tp), tp, rectangles(tensor.shape, shard, rank, size))
        cut = torch.empty(shard.local_shape(tensor.shape, size), dtype=SAFETENSORS_DTYPES[value.dtype])
        if (count := sum(move.target.numel for move in moved)) != cut.numel():
            raise CheckpointError(f"{self.folder}: {kind} of {name} has {count:,} of its {cut.numel():,} elements")
        for move in moved:
            self._opened.fill(cut.view(-1), [move])
        return cut


class WeightsOf:
    """The weights of a model in any format."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._name, self._whole = "", torch.empty(0)

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        return {WEIGHT: self._checkpoint.tensors[name].dtype}

    def cut(self, name: str, kind: str, shard: Shard, rank: int, size: int) -> Tensor:
        if name != self._name:
            self._whole = torch.empty(0)  # or the last tensor would stay while this one is read
            self._whole, self._name = self._checkpoint.read(name), name
        return shard.split(self._whole, rank, size)


def read(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """The weights of a checkpoint of any layout, joined."""
    stored = Stored(path)
    config = stored.config({"model": overrides})
    custom = stored.custom_table(config.model)
    table = full_table(config.model) if custom is None else custom
    return Checkpoint(
        model=config.model,
        tensors={name: Spec(stored.kinds(name)[WEIGHT], meta.shape) for name, meta in table.items()},
        read=lambda name: stored.cut(name, WEIGHT, table[name].shard, 0, 1),
        iteration=stored.layout.iteration,
        tokenizer=tokenizer_files.files_of(config.data.tokenizer),
        tokenizer_spec=config.data.tokenizer,
        origin=stored.layout.origin,
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
    """Writes a run's folder that holds the weights of a model in any format, to start from.

    `home` is where the folder will be once it is whole.
    """
    numbers, origin = WeightsOf(checkpoint), dict(checkpoint.origin)
    precision = PRECISION_NAMES[next(iter(checkpoint.tensors.values())).dtype]
    iterations = settings.get("train", {}).get("iterations", TrainConfig().iterations)
    seq_length = min(DataConfig().seq_length, checkpoint.model.max_position_embeddings)
    fields: dict[str, dict[str, Any]] = {
        "run": {"dir": f"runs/{home.name}_trained"},  # never the folder itself, whose weights are only a start
        "model": checkpoint.model.model_dump(),
        "data": {"seq_length": seq_length},
        "train": {"precision": precision},
        "optim": {"warmup_iterations": iterations // 10},  # the moments of a fresh optimizer are noise at first
        "checkpoint": {"load_weights": str(home)},
    }
    if checkpoint.tokenizer:
        tokenizer_files.carry(checkpoint.tokenizer, path / "tokenizer")
        spec = tokenizer_files.spec_in(path / "tokenizer")
        if tokenizer_files.readable(spec, checkpoint.model.vocab_size):
            fields["data"]["tokenizer"] = spec.replace(str(path), str(home))
            origin["tokenizer"] = tokenizer_hash(spec)
    config = _config(fields, settings, tensor, pipeline)
    tables = stage_tables(config.model, checkpoint.custom, tensor=tensor, pipeline=pipeline)
    _write_run(path, checkpoint.iteration, numbers, tables, config, state={}, origin=origin, progress=progress)


def copy(
    path: Path, stored: Stored, *, tensor: int, pipeline: int, progress: Progress, home: Path, settings: Settings
) -> None:
    """Writes a run's folder that a run goes on from as from the stored checkpoint: its optimizer state, counters and
    config, in another layout."""
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
    _check_same_run(before, config)
    layout = stored.layout
    state, origin = layout.state, layout.origin
    _write_run(path, layout.iteration, stored, tables, config, state=state, origin=origin, progress=progress)


def _check_same_run(before: Config, after: Config) -> None:
    """Raises ConfigError where the state would not mean the same: in another model, another order of data, another
    precision or other sums."""

    def meaning(config: Config) -> dict[str, Any]:
        data, free = config.data, free_fields({"position": config.model.position})
        names = [name for name in ModelConfig.model_fields if name not in free]
        return {
            **{f"model.{name}": getattr(config.model, DERIVED.get(name, name)) for name in names},
            "run.seed": config.run.seed,
            "data.seq_length": data.seq_length,
            "data.split": data.split,
            "data.paths": [Path(path).name for path in data.paths],  # the files may move
            "train.precision": config.train.precision,
            **{f"sync.{name}": value for name, value in config.sync.model_dump().items()},
        }

    was, now = meaning(before), meaning(after)
    if changed := [f"{name} (source: {was[name]}, target: {now[name]})" for name in was if was[name] != now[name]]:
        raise ConfigError(
            f"{listed(changed)}: with optimizer state the target is the same run in another layout; add "
            "--weights-only for a new start"
        )
    keys = ["sequence", "pipeline"] if before.model.tie_embeddings else ["sequence"]
    pairs = [(key, getattr(before.parallel, key), getattr(after.parallel, key)) for key in keys]
    moved = [f"parallel.{key} (source: {there}, target: {here})" for key, there, here in pairs if there != here]
    if before.sync.mode == "delayed" and before.sync.delay and moved:
        raise ConfigError(
            f"{', '.join(moved)}: the gradients that sync.delay defers belong to the setting of the source; "
            "keep it as it was, or add --weights-only for a new start"
        )


def _config(fields: dict[str, dict[str, Any]], settings: Settings, tensor: int, pipeline: int) -> Config:
    """The config of a target, with what the user gave; raises ConfigError where it could not be run."""
    fields.setdefault("parallel", {}).update(tensor=tensor, pipeline=pipeline)
    for section, values in settings.items():
        fields[section] = {**fields.get(section, {}), **values}
    config = Config.model_validate(fields)
    raise_any(failures(config, config.parallel.model_size))
    return config


def _write_run(
    path: Path,
    iteration: int,
    numbers: Any,
    tables: Sequence[ParamTable],
    config: Config,
    *,
    state: dict[str, Any],
    origin: dict[str, Any],
    progress: Progress,
) -> None:
    root = path / "checkpoints"
    write_grid(root, iteration, numbers, tables=tables, config=config, state=state, origin=origin, progress=progress)
    directory.write_durably(path / "config.yaml", dump_config(config).encode())
