"""What of a run goes into a checkpoint, and how a run finds its way back from one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.directory import iterations, locate, set_aside
from megatron_lite.checkpoint.layout import parse_config, read_layout
from megatron_lite.checkpoint.match import MODEL_PROVIDER
from megatron_lite.config.load import FIELDS
from megatron_lite.config.schema import Config, OptimConfig
from megatron_lite.errors import CheckpointError, ConfigError, DamagedCheckpoint, TrainingError
from megatron_lite.optim.lr import learning_rate
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from megatron_lite.training.replicas import check_replicas_equal
from megatron_lite.training.run import Run
from megatron_lite.training.start import checkpoints_of, find_start, local_root
from megatron_lite.training.state import TrainState

# Fields of `optim` that shape the learning rate.
CURVE = ("lr", "min_lr", "schedule", "warmup_iterations", "decay_iterations", "wsd_decay_iterations")


def save_run(run: Run, say: Callable[[str], None], *, must_be_done: bool = True) -> None:
    """Writes a checkpoint of everything that the run needs to go on exactly. Collective over the world.

    With `checkpoint.async_save` it goes on in the background, unless it must be done: `train_step` waits for the copy
    before it changes what is saved. Where collectives or DeepSpeed may change it sooner, or where weights are rounded
    for the checkpoint, which takes memory that the next forward needs, all is copied at return.
    """
    check_pending_grads(run)
    if run.config.faults.check_replicas:
        check_replicas_equal(run)
    settings = run.config.checkpoint
    run.saver.save(
        checkpoints_of(run.config.run.dir),
        run.state.iteration,
        say,
        must_be_done=must_be_done,
        copy_at_once=run.optimizer.copies_at_save,
        table=run.table,
        weights=run.optimizer.weights(),
        optimizer_state=run.optimizer.state(),
        rng=run.rng.state_dict(),
        state={
            "train": run.state.to_dict(),
            "loss_scaler": run.optimizer.scaler.state_dict(),
            "adam_steps": run.optimizer.step_count,
        },
        config=run.config.model_dump(mode="json"),
        origin=run.origin,
        keep=settings.keep,
        keep_every=settings.keep_every,
    )


def check_pending_grads(run: Run) -> None:
    """Raises TrainingError on every rank where a gradient that waits to be applied is not finite: a checkpoint with it
    could never go on. Communicates: a number over the world, with `sync.mode: delayed`."""
    if waiting := run.ddp.pending_grads():
        finite = all(grad.isfinite().all() for grads in waiting for grad in grads.values())
        if all_reduce(torch.tensor(float(not finite), device=run.ctx.device), run.ctx.world, "max").item():
            raise TrainingError(
                f"iteration {run.state.iteration}: a gradient of the last {len(waiting)} iterations, which sync.delay "
                "holds back, is not finite; training stops, and nothing is saved: the newest checkpoint is from before "
                "it. Lower optim.lr, lengthen optim.warmup_iterations or look at the data of these iterations"
            )


def load_newest(run: Run) -> None:
    """Continues from the checkpoint where `find_start` finds one. Collective over the world."""
    start = on_first(lambda: find_start(run.config), run.ctx.world)
    if start is None:
        return
    if run.ctx.rank == 0 and start.notice:
        print(f" {start.notice}", flush=True)
    load = load_weights if start.key == "checkpoint.load_weights" else load_run
    root = local_root(run.config, start)
    if start.is_chosen:  # the user wants this one, so no other takes its place
        load(run, root, start.iteration)
    else:
        load_or_fall_back(run, load, root, start.iteration, is_own=start.key == "run.dir")


def load_or_fall_back(
    run: Run, load: Callable[[Run, Path, int], None], root: Path, iteration: int, *, is_own: bool
) -> None:
    """Loads this checkpoint; one that is damaged is set aside, if the folder is the run's own, and the one before it
    loaded, as long as there is one and `checkpoint.fallback` allows it. Collective over the world."""
    try:
        load(run, root, iteration)
    except DamagedCheckpoint as damage:
        before = on_first(lambda: max((n for n in iterations(root) if n < iteration), default=None), run.ctx.world)
        if before is None:
            raise DamagedCheckpoint(f"{damage}. There is no checkpoint before it in {root}") from damage
        if not run.config.checkpoint.fallback:
            raise DamagedCheckpoint(f"{damage}. checkpoint.fallback would go on from iteration {before}") from damage
        if problem := on_first(lambda: _whole_after_all(root, iteration), run.ctx.world):
            raise CheckpointError(f"{damage}. But {problem}") from damage
        where = ""
        if is_own:
            where = f"; it is now {on_first(lambda: set_aside(root, iteration, before), run.ctx.world).name}"
        if run.ctx.rank == 0:
            print(f" DAMAGED checkpoint: {damage}{where}. Falling back to iteration {before}", flush=True)
    else:
        return
    load_or_fall_back(run, load, root, before, is_own=is_own)


def _whole_after_all(root: Path, iteration: int) -> str:
    """Text where this rank does not find the damage to a checkpoint that another one found."""
    folder = locate(root, iteration)
    try:
        problems = store.verify(folder, read_layout(folder))
    except CheckpointError as error:
        problems = [error]
    if any(isinstance(problem, DamagedCheckpoint) for problem in problems):
        return ""
    if problems:
        return f"the first rank cannot confirm it: {problems[0]}"
    return f"the first rank reads {folder} whole: do all machines see the same files?"


def load_weights(run: Run, root: Path, iteration: int) -> None:
    """A warm start: the model of a checkpoint, in any precision, at iteration 0 with a fresh optimizer.

    Collective over the world.
    """
    if run.ctx.rank == 0:
        print(f" loading weights from {root} at iteration {iteration}; training starts at iteration 0", flush=True)
    weights = run.optimizer.weights()
    config = run.config.model_dump(mode="json")
    loaded = store.load(
        root,
        iteration,
        ctx=run.ctx,
        table=run.table,
        weights=weights,
        optimizer_state={},
        config=config,
        provider=run.origin.get(MODEL_PROVIDER, ""),
    )
    check_tokenizer(locate(root, iteration), loaded, run)
    run.optimizer.load(weights, {}, 0, 0)


def load_run(run: Run, root: Path, iteration: int) -> None:
    """Fills the run from one checkpoint: weights, optimizer, scaler, counters and random streams.

    Rank 0 prints where from, and what has changed in the config since.
    Collective over the world.
    """
    if run.ctx.rank == 0:
        print(f" loading checkpoint from {root} at iteration {iteration}", flush=True)
    weights, optimizer_state = run.optimizer.weights(), run.optimizer.state()
    loaded = store.load(
        root,
        iteration,
        ctx=run.ctx,
        table=run.table,
        weights=weights,
        optimizer_state=optimizer_state,
        config=run.config.model_dump(mode="json"),
        provider=run.origin.get(MODEL_PROVIDER, ""),
    )
    check_tokenizer(locate(root, iteration), loaded, run)
    loaded = checked(loaded, locate(root, iteration), run)
    check_same_order(loaded.config, run.config)
    check_pending_sums(loaded.config, run)
    if run.ctx.rank == 0 and (changes := changed_fields(loaded.config, run.config.model_dump(mode="json"))):
        print(f" changed since that checkpoint: {', '.join(changes)}", flush=True)
    if run.ctx.rank == 0 and (moved := moved_line(loaded, run)):
        print(f" {moved}", flush=True)
    run.state = TrainState.from_dict(loaded.state["train"])
    run.optimizer.load(weights, optimizer_state, loaded.state["adam_steps"], run.state.iteration)
    run.optimizer.scaler.load_state_dict(loaded.state["loss_scaler"])
    if run.ctx.rank == 0 and (line := learning_rate_line(loaded.config, run)):
        print(f" {line}", flush=True)
    if loaded.rng is not None:
        run.rng.load_state_dict(loaded.rng)
    else:  # another grid: fresh streams, which must not repeat those of the start
        fresh = seed_everything(run.config.run.seed + run.state.iteration, run.ctx)
        run.rng.load_state_dict(fresh.state_dict())


def check_tokenizer(folder: Path, loaded: store.Loaded, run: Run) -> None:
    """Raises ConfigError where the run has another tokenizer than the checkpoint in `folder` was trained with.

    A run without a tokenizer keeps what the checkpoint records; a checkpoint may record none.
    """
    trained = loaded.origin.get("tokenizer")
    if trained is None:
        return
    wanted = run.origin.setdefault("tokenizer", trained)
    if run.config.data.tokenizer_check and trained != wanted:
        raise ConfigError(
            f"{folder}: was trained with another tokenizer (hash {trained[:12]}) than data.tokenizer, "
            f"{run.config.data.tokenizer} (hash {wanted[:12]}); use the tokenizer of the checkpoint, or set "
            "data.tokenizer_check=false if both give the same ids"
        )


def learning_rate_line(saved: dict[str, Any], run: Run) -> str:
    """The learning rate of the next step under the saved config and under this one, and the settings that keep the
    saved curve; empty where both rates are nearly equal."""
    known = {key: value for key, value in saved["optim"].items() if key in OptimConfig.model_fields}
    before, after = OptimConfig(**known), run.config.optim
    totals = saved["train"]["iterations"], run.config.train.iterations
    old, new = (learning_rate(o, run.state.optimizer_steps, n) for o, n in zip((before, after), totals, strict=True))
    if abs(new - old) <= max(0.01 * max(old, new), 1e-3 * before.lr):
        return ""
    before, after = (
        o.model_copy(update={"decay_iterations": o.decay_iterations or n})
        for o, n in zip((before, after), totals, strict=True)
    )
    keeping = [f"optim.{key}={getattr(before, key)}" for key in CURVE if getattr(before, key) != getattr(after, key)]
    return (
        f"learning rate at iteration {run.state.iteration + 1}: {old:.1e} -> {new:.1e}; {' '.join(keeping)} "
        f"keep{'s' * (len(keeping) == 1)} the saved curve"
    )


def checked(loaded: store.Loaded, folder: Path, run: Run) -> store.Loaded:
    """The same with all fields of this version's config. Raises CheckpointError where state or config are not a run's,
    as after an edit by hand."""
    known = {
        section: {key: value for key, value in fields.items() if f"{section}.{key}" in FIELDS}
        for section, fields in loaded.config.items()
        if section in Config.model_fields
    }
    state, scaler = loaded.state, run.optimizer.scaler.state_dict()
    if not (
        isinstance(state.get("train"), dict)
        and isinstance(state.get("adam_steps"), int)
        and isinstance(state.get("loss_scaler"), dict)
        and all(isinstance(state["loss_scaler"].get(key), int | float) for key in scaler)
    ):
        raise CheckpointError(f"{folder}: its state {str(state)[:80]} is not that of a run. Load another checkpoint")
    return replace(loaded, config=parse_config(known, folder).model_dump(mode="json"))


def moved_line(loaded: store.Loaded, run: Run) -> str:
    """From which layout to which a checkpoint was moved, and whether random streams go on; empty where all is as it
    was."""
    now = run.config.model_dump(mode="json")

    def described(grid: Grid, config: dict[str, Any]) -> str:
        parallel = config["parallel"]
        virtual = f" x {parallel['virtual_pipeline']} chunks" if parallel["virtual_pipeline"] > 1 else ""
        stage = f" stage {config['deepspeed']['zero_stage']}" if parallel["ddp"] == "deepspeed" else ""
        shared = " with a distributed optimizer" if config["optim"]["distributed"] else ""
        return f"tp={grid.tp} cp={grid.cp} dp={grid.dp} pp={grid.pp}{virtual}, ddp {parallel['ddp']}{stage}{shared}"

    before, after = described(loaded.grid, loaded.config), described(run.ctx.grid, now)
    again = "random streams restart from run.seed, iteration and rank" if loaded.rng is None else ""
    if before == after:
        return again
    moved = f"moved from {before} to {after}: rank 0 has read {loaded.bytes_read / 1e6:,.1f} MB"
    return f"{moved}; {again}" if again else moved


def check_pending_sums(saved: dict[str, Any], run: Run) -> None:
    """Raises ConfigError where sums that `sync.delay` had under way are not those that this run would wait for."""
    sync = run.config.sync
    if not sync.delay:
        return
    now = {"parallel": run.config.parallel.model_dump(), "sync": sync.model_dump()}
    keys = [("sync", "interval"), ("sync", "fragments")] if sync.is_local else [("parallel", "sequence")]
    if run.config.model.tie_embeddings and not sync.is_local:  # each stage of the embedding holds a part of the sum
        keys.append(("parallel", "pipeline"))
    for section, key in keys:
        before = saved[section].get(key)
        if before != now[section][key]:
            raise ConfigError(
                f"{section}.{key} (checkpoint: {before}, config: {now[section][key]}): sums that sync.delay had in "
                "flight belong to the setting of the checkpoint; set it as it was, or take the weights alone with "
                "checkpoint.load_weights"
            )


def check_same_order(saved: dict[str, Any], config: Config) -> None:
    """Raises ConfigError where the consumed samples would no longer be the first ones of the data.

    Files may move: of `data.paths` only the names count.
    """

    def order(run: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        return {
            "run.seed": run["seed"],
            "data.seq_length": data["seq_length"],
            "data.split": [float(share) for share in data["split"]],
            "data.paths": [Path(path).name for path in data["paths"]],
        }

    wanted = order(config.run.model_dump(), config.data.model_dump())
    before = order(saved["run"], saved["data"])
    if changed := [
        f"{key} (checkpoint: {before[key]}, config: {wanted[key]})" for key in wanted if wanted[key] != before[key]
    ]:
        raise ConfigError(
            f"{', '.join(changed)}: the order of the samples would differ from the checkpoint's, so training would "
            "repeat some and never see others; restore these values, or start a new run.dir"
        )


def changed_fields(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """`section.field old -> new` for every setting that differs, but for where the run lies."""
    return [
        f"{section}.{key} {saved[section][key]} -> {value}"
        for section, fields in wanted.items()
        for key, value in fields.items()
        if (section, key) != ("run", "dir") and key in saved.get(section, {}) and saved[section][key] != value
    ]
