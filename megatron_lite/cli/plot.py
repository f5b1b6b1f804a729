"""`megatron-lite plot`: the curves of training runs, as lines of text and as a picture."""

import math
import sys
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_lite.cli.runs import TrainedRun

WIDTH = 80  # columns of the output
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
NOT_FINITE = "x"
_LONGEST_NAME = 28
_VALUES = ("first", "last", "lowest")


class Axis(str, Enum):
    """The quantity on the horizontal axis."""

    steps = "steps"
    samples = "samples"
    tokens = "tokens"
    hours = "hours"


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The run.dir of one or more runs.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a .png or .svg picture.")] = None,
    x: Annotated[
        Axis,
        typer.Option(
            "--x",
            metavar="steps|samples|tokens|hours",
            help="Horizontal axis; hours are the summed durations of the iterations.",
        ),
    ] = Axis.steps,
) -> None:
    """Print the loss of each run as a line of blocks, and draw its curves into a picture.

    The picture has training and validation loss, learning rate, gradient norm and tokens per second. Each line of
    blocks has its own scale from its lowest to its highest loss; an x marks losses that are not finite.
    """
    from megatron_lite.cli.picture import picture_at
    from megatron_lite.cli.runs import read_runs
    from megatron_lite.errors import MegatronLiteError

    picture = picture_at(out) if out is not None else None
    trained = read_runs(runs)
    if not any(run.num_iterations for run in trained):
        advice = "metrics.jsonl has no iteration yet; plot the run after its first iteration"
        raise MegatronLiteError("\n".join(f"{run.folder}: {advice}" for run in trained))
    if picture is not None:
        from megatron_lite.cli.curves import save_curves

        save_curves(picture, [run for run in trained if run.num_iterations], x.value)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    typer.echo("\n".join(loss_lines(trained, blocks_for(encoding))))
    if out is not None:
        typer.echo(f"picture in {out}")


def blocks_for(encoding: str) -> str:
    """Eight characters from low to high that a terminal of this encoding can show."""
    try:
        BLOCKS.encode(encoding)
    except UnicodeEncodeError:
        return ASCII_BLOCKS
    return BLOCKS


def loss_lines(runs: "Sequence[TrainedRun]", blocks: str = BLOCKS) -> list[str]:
    """A header and, for each run, a line with its name, its loss over time and three values."""
    from megatron_lite.cli.runs import finite

    names = [_shortened(run.name) for run in runs]
    losses = [run.columns["loss"] for run in runs]
    rows = [
        [f"{value:.4g}" for value in (loss[0], loss[-1], min(finite(loss), default=math.nan))] if loss else []
        for loss in losses
    ]
    widths = [max(len(row[column]) for row in [_VALUES, *rows] if row) for column in range(len(_VALUES))]
    name_width = max(map(len, names))
    room = WIDTH - name_width - 2 - sum(width + 2 for width in widths)
    line_width = min(room, max(len(loss) for loss in [*losses, "loss"]))

    def line(name: str, middle: str, values: Sequence[str]) -> str:
        cells = [f"  {value:>{width}}" for value, width in zip(values, widths, strict=False)]
        return f"{name:<{name_width}}  {middle:<{line_width}}{''.join(cells)}".rstrip()

    lines = [line("", "loss", _VALUES)]
    for name, loss, values in zip(names, losses, rows, strict=True):
        lines.append(line(name, sparkline(loss, line_width, blocks), values) if loss else f"{name}: no iteration yet")
    return lines


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """At most `width` characters, each the mean of as many values as another one, up to rounding."""
    from megatron_lite.cli.runs import finite

    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    groups = [finite(values[start:end]) for start, end in pairwise(edges)]
    means = [math.fsum(value / len(group) for value in group) if group else math.nan for group in groups]
    low, high = min(finite(means), default=0.0), max(finite(means), default=0.0)
    # Halves, so that the range of very large values is finite.
    span = high / 2 - low / 2 or 1.0
    levels = [(mean / 2 - low / 2) / span * (len(blocks) - 1) for mean in means]
    return "".join(blocks[round(level)] if math.isfinite(level) else NOT_FINITE for level in levels)


def _shortened(name: str) -> str:
    """The name, without its middle if it is long: names of runs often differ in their ends."""
    if len(name) <= _LONGEST_NAME:
        return name
    half = (_LONGEST_NAME - 3) // 2
    return f"{name[: _LONGEST_NAME - 3 - half]}...{name[-half:]}"
