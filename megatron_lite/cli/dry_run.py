"""The mistakes that a run would report after its ranks have started, found by reading corpora and checkpoint alone.

The checks are those of the run. Its checkpoint is compared with a rank of each pipeline stage that has no memory. No
index of samples is built, and no tensor is read: that can take minutes.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError, DamagedCheckpoint, MegatronLiteError, NoCheckpoint
from megatron_lite.training.state import TrainState

if TYPE_CHECKING:
    from megatron_lite.checkpoint.layout import Layout
    from megatron_lite.training.run import Run


def problems_of_data(config: Config, state: TrainState, data_parallel_size: int) -> list[MegatronLiteError]:
    """An error for each mistake in the corpora of a run that continues from `state`."""
    import numpy as np

    from megatron_lite.data.blended import SPLIT_NAMES, check_one_epoch, parse_paths, split_bounds
    from megatron_lite.data.corpus_info import check_tokenizers
    from megatron_lite.data.gpt_dataset import count_tokens
    from megatron_lite.data.indexed import IndexedDataset
    from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
    from megatron_lite.training.corpora import NO_TRAINING_DATA, check_corpora_end, wanted_samples

    data, is_decoder = config.data, config.model.architecture == "decoder"
    problems: list[MegatronLiteError] = []
    if state.iteration < config.train.iterations and data.split[0] == 0:
        problems.append(ConfigError(NO_TRAINING_DATA))
    blend = parse_paths(data.paths)
    try:
        corpora = [IndexedDataset(prefix) for prefix in blend.prefixes]
        if data.tokenizer_check:
            wanted_hash = tokenizer_hash(data.tokenizer) if data.tokenizer else ""
            check_tokenizers([(corpus.prefix, corpus.info) for corpus in corpora], wanted_hash)
        if data.tokenizer and is_decoder:
            check_corpora_end(config, corpora, build_tokenizer(data.tokenizer).eod)
    except MegatronLiteError as error:
        return [*problems, error]
    if not is_decoder:
        return problems  # samples are of documents, whose tokens the run counts
    is_one_epoch = blend.weights is None and len(corpora) > 1
    for which, (name, wanted) in enumerate(
        zip(SPLIT_NAMES, wanted_samples(config.train, data_parallel_size, state), strict=True)
    ):
        bounds = [split_bounds(data.split, len(corpus))[which] for corpus in corpora]
        read = [(c, b) for c, b in zip(corpora, bounds, strict=True) if b and (name == "train" or b[0] < b[1])]
        if not wanted or not read:
            continue
        try:
            least = data.seq_length + 1 if is_one_epoch else 1
            tokens = [count_tokens(corpus, np.arange(*pair), name, least) for corpus, pair in read]
            if is_one_epoch and len(read) > 1:
                check_one_epoch(name, sum((count - 1) // data.seq_length for count in tokens), wanted)
        except MegatronLiteError as error:
            problems.append(error)
    return problems


class Start(NamedTuple):
    """The start of a run, and the error with which it would fail."""

    config: Config
    state: TrainState
    notices: list[str]
    error: MegatronLiteError | None


def start_of(config: Config, world_size: int, model: str) -> Start:
    """The start of a run on `world_size` ranks. `model` is the name of a custom one; empty: the built-in model."""
    from megatron_lite.training.metrics import check_run_dir

    notices: list[str] = []
    try:
        check_run_dir(config)
        return Start(*_start(config, world_size, model, notices), notices, None)
    except MegatronLiteError as error:
        return Start(config, TrainState(), notices, error)


def may_have_checkpoint(config: Config) -> bool:
    """Whether a run may start from a checkpoint, which alone is read by code that loads torch."""
    own = Path(config.run.dir) / "checkpoints"
    return bool(config.checkpoint.load or config.checkpoint.load_weights) or own.exists()


def _start(config: Config, world_size: int, model: str, notices: list[str]) -> tuple[Config, TrainState]:
    """The config and counters from which training starts; raise the error of the run where it cannot. Notices are
    added to the list."""
    if not may_have_checkpoint(config):
        return config, TrainState()
    from megatron_lite.checkpoint.directory import locate, read_latest
    from megatron_lite.convert.driver import convert_hint
    from megatron_lite.parallel.context import solo
    from megatron_lite.training.checkpointing import iteration_before
    from megatron_lite.training.start import checkpoints_of, find_start, local_root

    own = checkpoints_of(config.run.dir)
    if config.checkpoint.load_weights and read_latest(own) is None and _has_foreign_weights(config, world_size, model):
        return config, TrainState()
    try:
        start = find_start(config)
    except NoCheckpoint as error:
        raise NoCheckpoint(f"{error}{convert_hint(config)}") from error
    if start is None:
        return config, TrainState()
    notices += filter(None, [start.notice])
    root, iteration = local_root(config, start), start.iteration
    while True:
        try:
            return _checked(config, locate(root, iteration), start.key, world_size, model)
        except DamagedCheckpoint as damage:
            if start.is_chosen:
                raise
            iteration = iteration_before(damage, root, iteration, config, solo())
            notices.append(f"DAMAGED checkpoint: {damage}. Falling back to iteration {iteration}")


def _has_foreign_weights(config: Config, world_size: int, model: str) -> bool:
    """Whether `checkpoint.load_weights` names a folder that the run converts; raise where its model does not fit."""
    from megatron_lite import tokenizer_files
    from megatron_lite.checkpoint.layout import WEIGHT, Layout, TensorLayout, Value
    from megatron_lite.convert.driver import foreign_weights
    from megatron_lite.convert.recipe import full_table
    from megatron_lite.data.tokenizer import tokenizer_hash
    from megatron_lite.parallel.grid import Grid
    from megatron_lite.training.checkpointing import check_tokenizer

    found = foreign_weights(config)
    if found is None:
        return False
    origin, value = dict(found.origin), Value(dtype="F32")
    with TemporaryDirectory() as folder:
        if found.tokenizer:
            tokenizer_files.carry(found.tokenizer, Path(folder))
            spec = tokenizer_files.spec_in(Path(folder))
            if tokenizer_files.readable(spec, found.model.vocab_size):
                origin["tokenizer"] = tokenizer_hash(spec)
    layout = Layout(
        iteration=0,
        saved_at="",
        grid=Grid(),
        state={},
        config={"model": found.model.model_dump(mode="json")},
        origin=origin,
        tensors={
            name: TensorLayout(shape=meta.shape, shard=meta.shard, values={WEIGHT: value})
            for name, meta in full_table(found.model).items()
        },
        files={},
    )
    folder = Path(config.checkpoint.load_weights)
    for stage in _stages(config, world_size, model):
        _check_model(layout, folder, stage, config, model, only_weights=True)
    check_tokenizer(folder, layout, config, _origin(config))
    return True


def _checked(config: Config, folder: Path, key: str, world_size: int, model: str) -> tuple[Config, TrainState]:
    """The config and counters of a run that starts from the checkpoint in `folder`, which the config names by `key`."""
    from megatron_lite.checkpoint import match
    from megatron_lite.checkpoint.contents import Contents
    from megatron_lite.checkpoint.layout import read_layout
    from megatron_lite.checkpoint.store import Opened
    from megatron_lite.data.identity import recorded_identities
    from megatron_lite.parallel.context import solo
    from megatron_lite.training.checkpointing import check_tokenizer
    from megatron_lite.training.start import resumed

    layout, only_weights = read_layout(folder), key == "checkpoint.load_weights"
    for stage in _stages(config, world_size, model):
        _check_model(layout, folder, stage, config, model, only_weights=only_weights)
        if stage is not None:
            contents = Contents(stage.optimizer.weights(), {} if only_weights else stage.optimizer.state())
            fields = config.model_dump(mode="json")
            match.plan(layout, folder, ctx=stage.ctx, table=stage.table, contents=contents, config=fields)
    with Opened(folder, layout) as opened:
        for name in layout.files:
            if "/model" in name or not only_weights:
                opened.file(name)
    check_tokenizer(folder, layout, config, _origin(config))
    if only_weights:
        return config, TrainState()
    return resumed(config, layout, folder, recorded_identities(config.data.paths), solo())[:2]


def _stages(config: Config, world_size: int, model: str) -> "Iterator[Run | None]":
    """The run of a rank of each pipeline stage, without memory; None for a custom model, which may need memory."""
    from megatron_lite.plan.fake_world import fake_rank, grid_of
    from megatron_lite.plan.stage import traceable

    if model:
        yield None
        return
    grid = grid_of(config, world_size)
    for stage in range(grid.pp):
        with fake_rank(traceable(config), grid.rank(pp=stage), world_size) as run:
            yield run


def _check_model(
    layout: "Layout", folder: Path, stage: "Run | None", config: Config, model: str, *, only_weights: bool
) -> None:
    """Raise CheckpointError if the checkpoint belongs to another model than that of the stage."""
    from megatron_lite.checkpoint import match
    from megatron_lite.convert.recipe import full_table

    match.check_provider(layout, folder, model)
    table = {} if stage is None else stage.table
    names = layout.tensors.keys() if stage is None else {*table, *full_table(config.model)}
    fields = config.model_dump(mode="json")
    match.check_model(layout, folder, table=table, names=names, config=fields, only_weights=only_weights)


def _origin(config: Config) -> dict[str, str]:
    """The record of the run's tokenizer, which its checkpoints would have."""
    from megatron_lite.data.tokenizer import tokenizer_hash

    return {"tokenizer": tokenizer_hash(config.data.tokenizer)} if config.data.tokenizer else {}
