"""Drawings of schedules in text, and pictures of simulated or measured timelines.

Each has one row per pipeline rank and one time axis, so that empty space is the bubble.
"""

from math import floor
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.simulate import Cost, Span, timeline
from megatron_lite.targets import Targets, target_errors, target_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEANINGS = {"F": "forward", "B": "backward", "I": "backward to the inputs", "W": "backward to the weights"}
_MAX_COLUMNS = 4000  # of the text drawing; longer schedules get narrower labels without numbers

# The palette of Okabe and Ito, which colour-blind people can distinguish.
_SKY, _GREEN, _ORANGE, _PURPLE = "#56a0d3", "#2a9d78", "#e69f00", "#cc79a7"
_COLOURS = {"F": _SKY, "B": _GREEN, "I": _ORANGE, "W": _PURPLE}
LINE_COLOURS = ("#0072b2", "#d55e00", _GREEN, _PURPLE, _ORANGE, _SKY, "#000000")  # strong ones first
_IDLE = "#e9e9e9"
_ROW = 0.86  # height of a rank's row, of the 1 between two ranks
_SUFFIXES = (".png", ".svg")


def draw(schedule: Schedule, cost: Cost) -> str:
    """A line of text for each rank, and a legend. Actions without duration are left out."""
    spans = [span for span in timeline(schedule, cost) if span.end > span.start]
    num_chunks, length = _num_chunks(spans), max((span.end for span in spans), default=0.0)
    shortest = min((span.end - span.start for span in spans), default=1.0)
    longest_label = max((len(_label(span.action, num_chunks)) for span in spans), default=0)
    room = _MAX_COLUMNS * shortest / length if length else 0.0
    # The shortest action gets an integer number of columns, so that equal actions have equal widths.
    columns = min(longest_label, floor(room) or room) / shortest

    def column(time: float) -> int:
        return int(time * columns + 0.5)

    rows = [[" "] * column(length) for _ in schedule]
    for rank, action, start, end in spans:
        width = column(end) - column(start)
        label = _label(action, num_chunks)
        # A truncated number would name another micro-batch.
        shown = label if len(label) <= width else action.op[:width]
        rows[rank][column(start) : column(end)] = shown.ljust(width, "-")
    digits = len(str(len(rows) - 1))
    lines = [f"rank {rank:{digits}} |{''.join(row)}|" for rank, row in enumerate(rows)]
    example = "F3.1 forward of micro-batch 3 in model chunk 1" if num_chunks > 1 else "F3 forward of micro-batch 3"
    other_ops = [f"{op} {_MEANINGS[op]}" for op in _ops(spans) if op != "F"]
    return "\n".join([*lines, "; ".join([example, *other_ops, "blank idle"])])


def save_picture(target: Targets, spans: list[Span], *, num_ranks: int, title: str) -> None:
    """Write a timeline as .png or .svg: a row per rank, a colour per op, a shade per model chunk."""
    from matplotlib.figure import Figure

    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    inches = _width_inches(spans, end - begin)
    letters = min(max(inches * 0.6, 10), 22)  # wide pictures need larger letters
    height = max(0.36 * num_ranks, inches / 6) + letters * 0.12
    figure = Figure(figsize=(inches, height), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(num_ranks), end - begin, _ROW, begin, color=_IDLE)
    _add_boxes(axes, spans)
    # One inch is for the rank names.
    _add_numbers(axes, spans, points=72 * (inches - 1) / (end - begin))
    axes.set(xlim=(begin, end), ylim=(num_ranks - 0.5, -0.5))
    axes.set_title(title, size=letters * 1.2)
    axes.set_xlabel("time (grey: idle)", size=letters)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(left=False, labelsize=letters)
    axes.spines[:].set_visible(False)
    columns = _num_chunks(spans) if _num_chunks(spans) > 1 else len(_ops(spans))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=letters)
    write_picture(figure, target)


def picture_at(path: Path) -> Targets:
    """The file of a picture, when its command starts; raises ConfigError for one that does not end in .png or .svg."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: unknown picture format; use a name that ends in {' or '.join(_SUFFIXES)}")
    return target_of(path)


def write_picture(figure: "Figure", target: Targets) -> None:
    """Write a figure in the format of the file's suffix, and create its folder."""
    with target_errors(target.path), target.replaced() as (name,):
        figure.savefig(name, format=target.path.suffix[1:])


def _add_boxes(axes: "Axes", spans: list[Span]) -> None:
    """Draw one shape per rank and colour, for speed; each colour has one legend entry."""
    num_chunks = _num_chunks(spans)
    boxes: dict[tuple[str, int], dict[int, list[tuple[float, float]]]] = {}
    for rank, action, start, end in spans:
        boxes.setdefault((action.op, action.chunk), {}).setdefault(rank, []).append((start, end - start))
    for chunk in range(num_chunks):
        for op in _ops(spans):
            name = f"{_MEANINGS[op]}, chunk {chunk}" if num_chunks > 1 else _MEANINGS[op]
            style = {"color": _shade(op, chunk, num_chunks), "edgecolor": "white", "linewidth": 0.4}
            for number, (rank, ranges) in enumerate(boxes.get((op, chunk), {}).items()):
                label = name if number == 0 else "_"  # matplotlib leaves labels with _ out of the legend
                axes.broken_barh(ranges, (rank - _ROW / 2, _ROW), label=label, **style)


def _add_numbers(axes: "Axes", spans: list[Span], points: float) -> None:
    """Draw micro-batch numbers of one size where they fit; a unit of time is `points` wide."""
    longest = max(len(str(span.action.microbatch)) for span in spans)
    fitting = [(span.end - span.start) * points / (0.65 * longest + 0.2) for span in spans]
    smallest_readable = 4
    size = min([size for size in fitting if size >= smallest_readable] + [8])
    for span, largest in zip(spans, fitting, strict=True):
        if largest >= size:
            middle = (span.start + span.end) / 2
            axes.text(middle, span.rank, str(span.action.microbatch), size=size, ha="center", va="center")


def _label(action: Action, num_chunks: int) -> str:
    return str(action) if num_chunks > 1 else f"{action.op}{action.microbatch}"


def _num_chunks(spans: list[Span]) -> int:
    return 1 + max((span.action.chunk for span in spans), default=0)


def _ops(spans: list[Span]) -> list[str]:
    return [op for op in _MEANINGS if any(span.action.op == op for span in spans)]


def _width_inches(spans: list[Span], length: float) -> float:
    """A width with room for two digits in the box of the first quartile, between 9 and 40 inches."""
    durations = sorted(span.end - span.start for span in spans)
    quartile = durations[len(durations) // 4]
    return min(max(0.2 * length / quartile, 9.0), 40.0) if quartile else 40.0


def _shade(op: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """The colour of an op; later chunks are lighter."""
    from matplotlib.colors import to_rgb

    white = 0.65 * chunk / max(num_chunks - 1, 1)
    red, green, blue = (part + (1 - part) * white for part in to_rgb(_COLOURS[op]))
    return red, green, blue
