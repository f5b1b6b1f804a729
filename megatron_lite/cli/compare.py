"""`megatron-lite compare`: the differences of the configs of training runs, and their results."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from megatron_lite.cli.runs import TrainedRun

LAST = 10  # iterations in the mean of the final training loss
NO_VALUE = "-"


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The run.dir of two or more runs.")],
) -> None:
    """Print the config fields in which runs differ, and beside them losses, lengths and speeds.

    run.dir is the name of a run and not a difference. Hours are the summed durations of the iterations.
    """
    from megatron_lite.cli.inspect import aligned
    from megatron_lite.cli.runs import read_runs
    from megatron_lite.errors import ConfigError

    if len(runs) < 2:
        raise ConfigError(f"{runs[0]}: one run alone has no differences; give two or more: compare RUN RUN")
    trained = read_runs(runs)
    differing = config_rows(trained)
    lines = aligned([("", *(run.name for run in trained)), *differing, *result_rows(trained)])
    separator = [""] if differing else ["all config fields are equal (run.dir is not compared)", ""]
    typer.echo("\n".join([*lines[: len(differing) + 1], *separator, *lines[len(differing) + 1 :]]))


def config_rows(runs: "Sequence[TrainedRun]") -> list[tuple[str, ...]]:
    """Each field whose values differ, with the value of each run."""
    fields = [field for field in dict.fromkeys(name for run in runs for name in run.config) if field != "run.dir"]
    rows = [(field, *(_shown(run.config, field) for run in runs)) for field in fields]
    return [row for row in rows if len(set(row[1:])) > 1]


def result_rows(runs: "Sequence[TrainedRun]") -> list[tuple[str, ...]]:
    """Final losses, lengths and speeds of all runs."""
    return [
        (f"training loss, mean of the last {LAST} iterations", *map(_training_loss, runs)),
        ("validation loss, last evaluation", *map(_validation_loss, runs)),
        ("iterations", *(f"{_last(run, 'iteration'):,}" for run in runs)),
        ("tokens", *(f"{_last(run, 'consumed_samples') * run.seq_length:,}" for run in runs)),
        ("tokens per second, median", *map(_speed, runs)),
        ("hours", *(f"{math.fsum(run.columns['seconds']) / 3600:.3g}" for run in runs)),
    ]


def _shown(config: dict[str, Any], field: str) -> str:
    """A value in YAML. Another version of megatron_lite may lack the field."""
    from megatron_lite.config.yaml_file import show_value

    if field not in config:
        return "absent"
    return "null" if config[field] is None else show_value(config[field])


def _training_loss(run: "TrainedRun") -> str:
    """The mean of finite losses; it names their number where that is not LAST."""
    from megatron_lite.cli.runs import finite

    last = run.columns["loss"][-LAST:]
    if not last:
        return NO_VALUE
    losses = finite(last)
    if not losses:
        return "nan"
    number = "" if len(losses) == LAST else f" (mean of {len(losses)})"
    return f"{math.fsum(losses) / len(losses):.4f}{number}"


def _validation_loss(run: "TrainedRun") -> str:
    """The loss; it names the iteration where that is not the last one."""
    if not run.evaluations:
        return NO_VALUE
    iteration, loss = run.evaluations[-1]
    place = "" if iteration == _last(run, "iteration") else f" (iteration {iteration:,.0f})"
    return f"{loss:.4f}{place}"


def _speed(run: "TrainedRun") -> str:
    return f"{median(run.columns['tokens_per_second']):,.0f}" if run.num_iterations else NO_VALUE


def _last(run: "TrainedRun", column: str) -> int:
    """The value of a counter at the end of the run."""
    return int(run.columns[column][-1]) if run.num_iterations else 0
