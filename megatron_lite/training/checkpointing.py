"""What of a run goes into a checkpoint, and how a run finds its way back from one."""

import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.directory import find_latest
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.random import seed_everything
from megatron_lite.training.run import Run
from megatron_lite.training.state import TrainState


def checkpoints_of(run_dir: str) -> Path:
    """Folder of a run's checkpoints."""
    return Path(run_dir) / "checkpoints"


def save_run(run: Run, say: Callable[[str], None]) -> None:
    """Writes a checkpoint of everything that the run needs to go on exactly. Collective over the world."""
    root, iteration = checkpoints_of(run.config.run.dir), run.state.iteration
    say(f" saving checkpoint at iteration {iteration:7d} to {root}")
    started = time.perf_counter()
    store.save(
        root,
        iteration,
        ctx=run.ctx,
        table=run.table,
        params=detached(run.params),
        optimizer_state=run.optimizer.state_tensors(),
        rng=run.rng.state_dict(),
        state={
            "train": run.state.to_dict(),
            "loss_scaler": run.optimizer.scaler.state_dict(),
            "adam_steps": run.optimizer.step_count,
        },
        config=run.config.model_dump(mode="json"),
        keep=run.config.checkpoint.keep,
    )
    seconds = time.perf_counter() - started
    say(f"  successfully saved checkpoint from iteration {iteration:7d} to {root} ({seconds:.1f} s)")


def load_newest(run: Run) -> None:
    """Continues from the newest checkpoint of run.dir, or of `checkpoint.load`, where there is one.

    Collective over the world. `checkpoint.load` without a checkpoint in it is an error.
    """
    for folder, wanted in ((run.config.run.dir, False), (run.config.checkpoint.load, True)):
        if not folder:
            continue
        root = checkpoints_of(folder)
        iteration = find_latest(root, world=run.ctx.world)
        if iteration is not None:
            load_run(run, root, iteration)
            return
        if wanted:
            raise CheckpointError(f"checkpoint.load is {folder}, but there is no checkpoint in {root}")


def load_run(run: Run, root: Path, iteration: int) -> None:
    """Fills the run from one checkpoint: weights, optimizer, scaler, counters and random streams.

    Collective over the world.
    """
    optimizer_state = run.optimizer.state_tensors()
    loaded = store.load(
        root,
        iteration,
        ctx=run.ctx,
        table=run.table,
        params=detached(run.params),
        optimizer_state=optimizer_state,
        config=run.config.model_dump(mode="json"),
    )
    run.optimizer.load_state_tensors(optimizer_state, loaded.state["adam_steps"])
    run.state = TrainState.from_dict(loaded.state["train"])
    run.optimizer.scaler.load_state_dict(loaded.state["loss_scaler"])
    if loaded.rng is not None:
        run.rng.load_state_dict(loaded.rng)
    else:  # another data-parallel size: fresh streams, which must not repeat those of the start
        fresh = seed_everything(run.config.run.seed + run.state.iteration, run.ctx)
        run.rng.load_state_dict(fresh.state_dict())


def detached(params: dict) -> dict[str, Tensor]:
    """The parameters' values, out of autograd's sight."""
    return {name: parameter.detach() for name, parameter in params.items()}
