"""Drawings of an all-reduce of messages: which values each rank has of each chunk after each step."""

from typing import TYPE_CHECKING

from megatron_lite.cli.picture import write_picture
from megatron_lite.engines.moves import Steps, num_chunks
from megatron_lite.targets import Targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY, _SKY, _BLUE, _ARROW = "#e9e9e9", "#bcdcf0", "#56b4e9", "#d55e00"
_COLUMNS = 4  # panels in a row of the picture

State = list[list[int]]
"""For each rank and chunk the number of ranks whose values are in the rank's copy."""


def states(steps: Steps, num_ranks: int) -> list[State]:
    """The copies at the start and after each step."""
    found = [[[1] * num_chunks(steps) for _ in range(num_ranks)]]
    for moves in steps:
        before = found[-1]
        after = [list(row) for row in before]
        for move in moves:
            sent = before[move.source][move.chunk]
            after[move.target][move.chunk] = sent + (after[move.target][move.chunk] if move.adds else 0)
        found.append(after)
    return found


def draw(steps: Steps, num_ranks: int) -> str:
    """A line for each step: the messages, then each rank's copies; a copy that has just changed has a star."""
    lines = []
    for number, (moves, state) in enumerate(zip([[], *steps], states(steps, num_ranks), strict=True)):
        changed = {(move.target, move.chunk) for move in moves}
        copies = " | ".join(
            " ".join(f"{count}{'*' if (rank, chunk) in changed else ' '}" for chunk, count in enumerate(row))
            for rank, row in enumerate(state)
        )
        kinds = {True: "add", False: "copy"}
        lines.append(f"step {number:<3}{kinds[moves[0].adds] if moves else 'start':6}| {copies} |")
    ranks = "rank 0 to the last; a number for each chunk: how many ranks' values the copy has; * has just arrived"
    return "\n".join([*lines, ranks])


def save_picture(target: Targets, steps: Steps, num_ranks: int, *, title: str) -> None:
    """Write a panel for each step, with an arrow for each message."""
    from matplotlib.figure import Figure

    found, rows = states(steps, num_ranks), -(-(len(steps) + 1) // _COLUMNS)
    width = max(2.6, 0.55 * num_chunks(steps) + 1.2)
    figure = Figure(figsize=(width * _COLUMNS, rows * (0.5 * num_ranks + 0.9)), dpi=100, layout="constrained")
    figure.suptitle(title, size=12)
    panels = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for number, axes in enumerate(panels):
        axes.set_axis_off()
        if number < len(found):
            moves = steps[number - 1] if number else []
            _draw_panel(axes, found[number], "start" if not number else f"step {number}: {_verb(moves)}")
            for move in moves:
                _draw_arrow(axes, move.chunk, move.source, move.target, num_ranks)
    write_picture(figure, target)


def _verb(moves: list) -> str:
    return "add" if moves[0].adds else "copy"


def _draw_panel(axes: "Axes", state: State, title: str) -> None:
    """A square for each rank and chunk with its number."""
    num_ranks, chunks = len(state), len(state[0])
    for rank, row in enumerate(state):
        axes.text(-0.15, rank + 0.5, f"rank {rank}", ha="right", va="center", size=9)
        for chunk, count in enumerate(row):
            colour = _GREY if count == 1 else _BLUE if count == num_ranks else _SKY
            axes.broken_barh([(chunk, 1)], (rank, 1), facecolor=colour, edgecolor="white", linewidth=1.5)
            axes.text(chunk + 0.5, rank + 0.5, str(count), ha="center", va="center", size=10)
    axes.set(xlim=(-1.1, chunks + 0.1), ylim=(num_ranks + 0.1, -0.1))
    axes.set_title(title, size=10)


def _draw_arrow(axes: "Axes", chunk: int, source: int, target: int, num_ranks: int) -> None:
    """An arrow along the right edge of a column; from the last rank to the first it enters from above."""
    x = chunk + 0.86
    start, end = source + 0.5, target + 0.5
    if source == num_ranks - 1 and target == 0 and num_ranks > 2:
        axes.plot([x, x], [start, num_ranks + 0.05], color=_ARROW, linewidth=1.2, clip_on=False)
        start = -0.1
    arrow = {"arrowstyle": "->", "color": _ARROW, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x, end), (x, start), arrowprops=arrow, annotation_clip=False)
