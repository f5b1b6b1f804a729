"""The roofline of a micro-batch as a picture: the slowest operations as bars, and each one under the roof."""

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from megatron_lite.cli.picture import LINE_COLOURS, write_picture
from megatron_lite.plan.devices import Device
from megatron_lite.plan.kernels import Kernel
from megatron_lite.plan.roofline import Row, by_line
from megatron_lite.targets import Targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("product", "attention forward", "attention backward", "memory")
COLOURS: dict[str, str] = dict(zip(KINDS, LINE_COLOURS, strict=False))
NUM_BARS = 20
# Operations without products are drawn from here on, in FLOPs per byte, each STEP times further right than the last.
LEFT, STEP = 1.0, 1.35


def save_roofline(target: Targets, kernels: Sequence[Kernel], device: Device, *, title: str) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    rows = by_line(kernels, device)
    figure = Figure(figsize=(13, 6), dpi=120, layout="constrained")
    bars, roof = figure.subplots(1, 2, width_ratios=(1, 1.1))
    figure.suptitle(title)
    _draw_bars(bars, rows)
    _draw_roof(roof, rows, device)
    write_picture(figure, target)


def _draw_bars(axes: "Axes", rows: list[Row]) -> None:
    """The slowest operations, numbered from 1, and all others as the last bar."""
    total, shown = sum(row.seconds for row in rows), rows[:NUM_BARS]
    names = [f"{number} {row.op}, {row.line}" for number, row in enumerate(shown, start=1)]
    times = [row.seconds * 1e3 for row in shown]
    axes.barh(range(len(shown)), times, color=[COLOURS[row.kind] for row in shown])
    others = sum(row.seconds for row in rows[NUM_BARS:]) * 1e3
    axes.barh(len(shown), others, color="grey")
    axes.set_yticks(range(len(shown) + 1), [*names, f"{len(rows) - len(shown)} others"], size=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms of {total * 1e3:.3g}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_roof(axes: "Axes", rows: list[Row], device: Device) -> None:
    """FLOP/s against FLOPs per byte; the numbers are those of the bars."""
    from matplotlib.lines import Line2D

    corner = device.product / device.memory
    right = 10 * max(corner, *(row.flops / max(row.bytes, 1) for row in rows))
    ends = [LEFT / 2, corner, right]
    axes.loglog(ends, [min(device.product, device.memory * x) / 1e12 for x in ends], color="black")
    axes.axhline(device.peak / 1e12, color="grey", linestyle=":")
    axes.annotate("peak of the data sheet", (LEFT, device.peak / 1e12), size=8, va="bottom")
    places = (LEFT * STEP**place for place in count())
    for number, row in enumerate(rows[:NUM_BARS], start=1):
        # An operation without products is below the roof if its launches take longer than its bytes.
        x = row.flops / row.bytes if row.flops else next(places)
        y = x * row.bytes / row.seconds / 1e12
        axes.plot(x, y, marker="o", markersize=13, color=COLOURS[row.kind], alpha=0.7, markeredgecolor="white")
        axes.annotate(str(number), (x, y), size=7, ha="center", va="center")
    share = {kind: sum(row.seconds for row in rows if row.kind == kind) for kind in KINDS}
    total = sum(share.values())
    points = [Line2D([], [], marker="o", linestyle="", color=COLOURS[kind]) for kind in KINDS]
    labels = [f"{kind}, {share[kind] / total:.0%} of the time" for kind in KINDS]
    axes.legend(points, labels, loc="lower right", frameon=False)
    axes.set(xlabel=f"FLOPs per byte (operations without products: side by side from {LEFT:g})", ylabel="TFLOP/s")
    axes.set_ylim(bottom=LEFT * device.memory / 4e12)
