"""The parts of a run that a checkpoint saves, and how a run resumes from one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.compatible import CORPORA
from megatron_lite.checkpoint.contents import Contents
from megatron_lite.checkpoint.directory import iterations, locate, read_latest, set_aside
from megatron_lite.checkpoint.layout import Layout, read_layout
from megatron_lite.checkpoint.match import ADDED_AT_FINE_TUNING, MODEL_PROVIDER, MODEL_TYPE, STARTS_TEXTS, TOKEN_IDS
from megatron_lite.config.schema import Config
from megatron_lite.errors import CheckpointError, ConfigError, DamagedCheckpoint, TrainingError
from megatron_lite.files import MARKER, remove_own
from megatron_lite.model.init import INIT
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.random import seed_everything
from megatron_lite.training.console import say
from megatron_lite.training.replicas import check_replicas_equal
from megatron_lite.training.run import Run
from megatron_lite.training.start import checkpoints_of, find_start, local_root, resumed

FORWARD_STEP = "forward_step"  # key of `origin`: the name of a custom one


def save_run(run: Run, say: Callable[[str], None], *, must_be_done: bool = True) -> None:
    """Write a checkpoint from which the run resumes exactly. Collective over the world.

    With `checkpoint.async_save` it is written in the background, unless it must be done at return: `train_step` waits
    for the copy before it changes saved tensors.
    """
    check_pending_grads(run)
    if run.config.faults.check_replicas:
        check_replicas_equal(run)
    settings, config, home = run.config.checkpoint, run.config.model_dump(mode="json"), run.config.run.dir
    spec = config["data"]["tokenizer"]
    config["data"]["tokenizer"] = on_first(lambda: run.hooks.keep_tokenizer(spec, home), run.ctx.world)
    run.saver.save(
        checkpoints_of(run.config.run.dir),
        run.state.iteration,
        say,
        must_be_done=must_be_done,
        copy_at_once=run.optimizer.copies_at_save,
        table=run.table,
        contents=Contents(run.optimizer.weights(), run.optimizer.state(), run.rng.state_dict()),
        state={
            "train": run.state.to_dict(),
            "loss_scaler": run.optimizer.scaler.state_dict(),
            "adam_steps": run.optimizer.step_count,
        },
        config=config,
        origin=run.origin,
        keep=settings.keep,
        keep_every=settings.keep_every,
    )


def check_pending_grads(run: Run) -> None:
    """Raise TrainingError on every rank where a pending gradient is not finite: no run could resume from it.

    Communicates: a number over the world, with `sync.mode: delayed`.
    """
    if pending := run.ddp.pending_grads():
        finite = all(grad.isfinite().all() for grads in pending for grad in grads.values())
        if all_reduce(torch.tensor(float(not finite), device=run.ctx.device), run.ctx.world, "max").item():
            raise TrainingError(
                f"iteration {run.state.iteration}: a pending gradient of the last {len(pending)} iterations "
                "(sync.delay) is not finite, so nothing is saved; lower optim.lr, lengthen optim.warmup_iterations or "
                "look at the data of these iterations"
            )


def load_newest(run: Run) -> None:
    """Continue from the checkpoint of `find_start`, if there is one. Collective over the world."""
    config, converted = run.config, ""
    if config.checkpoint.load_weights and run.hooks.convert_weights is not None:
        converted = on_first(lambda: _converted(run), run.ctx.world)
    if converted:
        _report(run, f"converted {config.checkpoint.load_weights} to {converted}, which is removed once it is loaded")
        changed = config.checkpoint.model_copy(update={"load_weights": converted})
        config = config.model_copy(update={"checkpoint": changed})
    start = on_first(lambda: find_start(config), run.ctx.world)
    if start is None:
        return
    _report(run, start.notice)
    load = load_weights if start.key == "checkpoint.load_weights" else load_run
    root = local_root(config, start)
    with run.progress.during("loading a checkpoint"):
        if start.is_chosen:  # no other checkpoint may replace one that the user has chosen
            load(run, root, start.iteration)
        else:
            load_or_fall_back(run, load, root, start.iteration)
    if converted:
        on_first(lambda: remove_own(Path(converted), MARKER), run.ctx.world)


def _converted(run: Run) -> str:
    """The folder of the converted weights; empty where the run has checkpoints, or the weights need no conversion."""
    assert run.hooks.convert_weights is not None
    has_checkpoints = read_latest(checkpoints_of(run.config.run.dir)) is not None
    return "" if has_checkpoints else run.hooks.convert_weights(run.config)


def load_or_fall_back(run: Run, load: Callable[[Run, Path, int], None], root: Path, iteration: int) -> None:
    """Load this checkpoint or, where it is damaged and `checkpoint.fallback` is set, the one before it.

    A damaged checkpoint in the folder of this run is set aside. Collective over the world.
    """
    try:
        load(run, root, iteration)
        return
    except DamagedCheckpoint as damage:
        before = iteration_before(damage, root, iteration, run.config, run.ctx.world)
        file = damage.file
        if problem := on_first(lambda: _unconfirmed(root, iteration, file), run.ctx.world):
            raise CheckpointError(f"{damage}. But {problem}") from damage
        where = ""
        if root == checkpoints_of(run.config.run.dir):
            where = f"; it is now {on_first(lambda: set_aside(root, iteration, before), run.ctx.world).name}"
        _report(run, f"DAMAGED checkpoint: {damage}{where}. Falling back to iteration {before}")
    load_or_fall_back(run, load, root, before)


def iteration_before(damage: DamagedCheckpoint, root: Path, iteration: int, config: Config, world: Group) -> int:
    """The checkpoint in place of a damaged one; raise DamagedCheckpoint where none may be used. Collective."""
    before = on_first(lambda: max((n for n in iterations(root) if n < iteration), default=None), world)
    if before is None:
        raise DamagedCheckpoint(f"{damage}. There is no checkpoint before it in {root}") from damage
    if not config.checkpoint.fallback:
        raise DamagedCheckpoint(f"{damage}. checkpoint.fallback would use iteration {before}") from damage
    return before


def _unconfirmed(root: Path, iteration: int, file: str) -> str:
    """The reason why this rank cannot confirm damage that another rank found in a file; empty where it can."""
    folder = locate(root, iteration)
    try:
        layout = read_layout(folder)
        # Only the damaged file is read again: a full checkpoint of a large model would take many minutes.
        problems = store.verify(folder, layout, [file] if file in layout.files else None)
    except CheckpointError as error:
        problems = [error]
    if any(isinstance(problem, DamagedCheckpoint) for problem in problems):
        return ""
    if problems:
        return f"the first rank cannot confirm it: {problems[0]}"
    return f"the first rank reads {folder / file} without damage: do all machines see the same files?"


def load_weights(run: Run, root: Path, iteration: int) -> None:
    """Start from the weights of a checkpoint, in any precision, at iteration 0 with a fresh optimizer.

    Collective over the world.
    """
    _report(run, f"loading weights from {root} at iteration {iteration}; training starts at iteration 0")
    contents = Contents(run.optimizer.weights())
    loaded = _load(run, root, iteration, contents)
    if added := [name for name in ADDED_AT_FINE_TUNING if name in run.table and name not in loaded.layout.tensors]:
        _report(run, f"the checkpoint has no {', '.join(added)}, which starts from its initial values")
    run.optimizer.load(contents.weights, {}, 0, 0)


def load_run(run: Run, root: Path, iteration: int) -> None:
    """Fill the run from one checkpoint: weights, optimizer, scaler, counters and random streams.

    Rank 0 prints the source and the changes of the config. Collective over the world.
    """
    _report(run, f"loading checkpoint from {root} at iteration {iteration}")
    contents = Contents(run.optimizer.weights(), run.optimizer.state())
    loaded = _load(run, root, iteration, contents)
    run.origin[INIT] = loaded.layout.origin.get(INIT, 1)  # no weight is drawn
    found, folder, state = run.origin.get(CORPORA, []), locate(root, iteration), loaded.layout.state
    run.config, run.state, saved, changed = resumed(run.config, loaded.layout, folder, found, run.ctx.world)
    _report(run, *on_first(lambda: list(run.hooks.resume_lines(run, loaded, saved, changed)), run.ctx.world))
    run.optimizer.load(contents.weights, contents.optimizer_state, state["adam_steps"], run.state.iteration)
    run.optimizer.scaler.load_state_dict(state["loss_scaler"])
    rng = loaded.rng
    if restarts_streams(loaded, run):  # the new streams must differ from those of the run's start
        rng = seed_everything(run.config.run.seed + run.state.iteration, run.ctx).state_dict()
    assert rng is not None
    run.rng.load_state_dict(rng)


def restarts_streams(loaded: store.Loaded, run: Run) -> bool:
    """Whether the random streams of a checkpoint cannot continue: on another grid, or another kind of device."""
    return loaded.rng is None or set(loaded.rng) != set(run.rng.state_dict())


def _report(run: Run, *lines: str) -> None:
    """Print the lines that are not empty, on rank 0."""
    for line in lines:
        if line and run.ctx.rank == 0:
            say(line, run.config.log)


def _load(run: Run, root: Path, iteration: int, contents: Contents) -> store.Loaded:
    loaded = store.load(
        root,
        iteration,
        ctx=run.ctx,
        table=run.table,
        contents=contents,
        config=run.config.model_dump(mode="json"),
        provider=run.origin.get(MODEL_PROVIDER, ""),
    )
    check_tokenizer(locate(root, iteration), loaded.layout, run.config, run.origin)
    for key in {MODEL_TYPE, TOKEN_IDS, STARTS_TEXTS} & loaded.layout.origin.keys():
        run.origin.setdefault(key, loaded.layout.origin[key])
    return loaded


def check_tokenizer(folder: Path, layout: Layout, config: Config, origin: dict[str, Any]) -> None:
    """Raise ConfigError where the run's tokenizer, in `origin`, is not the one that the checkpoint was trained with.

    A run without a tokenizer takes over the checkpoint's record; a checkpoint may have none.
    """
    trained = layout.origin.get("tokenizer")
    if trained is None:
        return
    wanted = origin.setdefault("tokenizer", trained)
    if config.data.tokenizer_check and trained != wanted:
        raise ConfigError(
            f"{folder}: was trained with another tokenizer (hash {trained[:12]}) than data.tokenizer, "
            f"{config.data.tokenizer} (hash {wanted[:12]}); use the tokenizer of the checkpoint, or set "
            "data.tokenizer_check=false if both give the same ids"
        )
