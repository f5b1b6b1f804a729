"""Lines about a resumed run: what differs from the run that saved its checkpoint."""

from collections.abc import Iterator

from megatron_lite.checkpoint.compatible import CORPORA
from megatron_lite.checkpoint.store import Loaded
from megatron_lite.config.schema import Config
from megatron_lite.parallel.grid import Grid
from megatron_lite.stored_data import differing_copies
from megatron_lite.training.checkpointing import FORWARD_STEP, restarts_streams
from megatron_lite.training.run import Run

# Fields of `optim` that shape the learning rate.
CURVE = ("lr", "min_lr", "schedule", "warmup_iterations", "decay_iterations", "wsd_decay_iterations")


def resume_lines(run: Run, loaded: Loaded, saved: Config, changed: list[str]) -> Iterator[str]:
    """The lines, some of which may be empty. `changed` are the changes of the samples or their order."""
    if copies := differing_copies(loaded.folder, loaded.layout, end=1):  # this rank reads the headers of few files
        yield f"WARNING: {copies}"
    yield changes_line(saved, run.config)
    yield compared_line(loaded, run)
    yield new_order_line(changed, run)
    yield moved_line(loaded, saved, run)
    yield learning_rate_line(saved, run)
    yield forward_step_line(loaded, run)


def changes_line(saved: Config, now: Config) -> str:
    """`section.field old -> new` for every setting that differs, except run.dir; empty without changes."""
    before, after = saved.model_dump(mode="json"), now.model_dump(mode="json")
    changes = [
        f"{section}.{key} {before[section][key]} -> {value}"
        for section, fields in after.items()
        for key, value in fields.items()
        if (section, key) != ("run", "dir") and before[section][key] != value
    ]
    return f"changed since that checkpoint: {', '.join(changes)}" if changes else ""


def compared_line(loaded: Loaded, run: Run) -> str:
    """A note where a checkpoint of an earlier version has no checksums of its corpora; otherwise empty."""
    if CORPORA in loaded.layout.origin or CORPORA not in run.origin:
        return ""
    return "corpora: only their names and weights were compared, for that checkpoint has no checksums of them"


def new_order_line(changed: list[str], run: Run) -> str:
    """The start of a branch in other samples than those of its checkpoint; empty without changes."""
    if not changed:
        return ""
    steps, samples = run.state.optimizer_steps, run.state.consumed_samples
    return (
        "other samples, or another order, than in that checkpoint: training reads from the first one; learning rate, "
        f"batch-size ramp and consumed samples continue at {steps} steps and {samples} samples"
    )


def moved_line(loaded: Loaded, saved: Config, run: Run) -> str:
    """The old and the new layout of a resharded run, and whether its random streams restart; empty without changes."""

    def described(grid: Grid, config: Config) -> str:
        chunks = config.parallel.virtual_pipeline
        virtual = f" x {chunks} chunks" if chunks > 1 else ""
        return f"tp={grid.tp} cp={grid.cp} dp={grid.dp} pp={grid.pp}{virtual}, {config.engine}"

    before, after = described(loaded.layout.grid, saved), described(run.ctx.grid, run.config)
    lines = []
    if before != after:
        lines.append(f"moved from {before} to {after}: rank 0 has read {loaded.bytes_read / 1e6:,.1f} MB")
    if restarts_streams(loaded, run):
        lines.append("random streams restart from run.seed, iteration and rank")
    return "; ".join(lines)


def learning_rate_line(saved: Config, run: Run) -> str:
    """The next learning rate under the saved and the new config, and settings that keep the saved curve.

    Empty where both rates are nearly equal.
    """
    before, after = (
        c.optim.model_copy(update={"decay_iterations": c.optim.decay_iterations or c.train.iterations})
        for c in (saved, run.config)
    )
    rate, steps = run.hooks.learning_rate, run.state.optimizer_steps
    old, new = (rate(optim, steps, optim.decay_iterations) for optim in (before, after))
    if abs(new - old) <= max(0.01 * max(old, new), 1e-3 * before.lr):
        return ""
    settings = [f"optim.{key}={getattr(before, key)}" for key in CURVE if getattr(before, key) != getattr(after, key)]
    return (
        f"learning rate at iteration {run.state.iteration + 1}: {old:.1e} -> {new:.1e}; {' '.join(settings)} "
        f"{'keeps' if len(settings) == 1 else 'keep'} the saved curve"
    )


def forward_step_line(loaded: Loaded, run: Run) -> str:
    """The forward steps of the checkpoint and of this run; empty where they have the same name."""
    before, now = (origin.get(FORWARD_STEP) or "the built-in one" for origin in (loaded.layout.origin, run.origin))
    return f"forward step: {now}; the checkpoint was trained with {before}" if before != now else ""
