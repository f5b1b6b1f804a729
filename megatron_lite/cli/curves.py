"""The picture of training runs: a colour per run, and a panel each for losses, learning rate, gradients and speed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_lite.cli.picture import LINE_COLOURS, write_picture
from megatron_lite.cli.runs import TrainedRun, finite
from megatron_lite.targets import Targets
from megatron_lite.text import one_line

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

_PANELS = {
    "loss": "loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}
_X_LABELS = {"steps": "step", "samples": "samples", "tokens": "tokens", "hours": "hours of training"}
_NOISY = ("loss", "grad_norm", "tokens_per_second")
_DASHES = ("-", "--", ":", "-.")  # for more runs than colours
_SMOOTHED_SHARE = 40  # a smoothed value is the mean of 1/40 of all iterations
_SHORTEST_WINDOW = 3
_MOST_POINTS = 2000  # of a smoothed curve, two for each pixel
_WIDE_RANGE = 20.0  # a largest value above this many medians makes the axis logarithmic
_INCHES, _DPI = 9.0, 110
_STEPS = [1, 2, 5, 10]  # of tick labels
_GREY = "#555555"


def save_curves(target: Targets, runs: Sequence[TrainedRun], axis: str) -> None:
    """Write the curves of runs with at least one iteration as .png or .svg."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    longest = max(len(run.name) for run in runs)
    columns = max(1, min(len(runs), int(12 * _INCHES) // (longest + 8)))
    legend_rows = -(-len(runs) // columns)
    figure = Figure(figsize=(_INCHES, 5.9 + 0.22 * legend_rows), dpi=_DPI, layout=ConstrainedLayoutEngine(w_pad=0.1))
    mosaic: list[Any] = [["loss"] * 3, ["lr", "grad_norm", "tokens_per_second"]]
    panels = figure.subplot_mosaic(mosaic, height_ratios=[1.5, 1])
    for name, axes in panels.items():
        for number, run in enumerate(runs):
            style = {
                "color": LINE_COLOURS[number % len(LINE_COLOURS)],
                "linestyle": _DASHES[number // len(LINE_COLOURS) % len(_DASHES)],
            }
            _add_curve(axes, run, name, axis, style)
        values = [value for run in runs for value in run.columns[name]]
        _set_axes(axes, name, axis, values)
    _add_loss_legend(panels["loss"], runs)
    lines, names = panels["lr"].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=10.5)
    write_picture(figure, target)


def _add_curve(axes: "Axes", run: TrainedRun, name: str, axis: str, style: dict[str, Any]) -> None:
    """Draw one column of one run; infinite values become gaps, as matplotlib does with nan."""
    import numpy as np

    x, values = np.asarray(run.x_values(axis)), np.asarray(run.columns[name])
    values = np.where(np.isfinite(values), values, np.nan)
    marker = "o" if len(x) == 1 else ""  # a line through one point is invisible
    window = _window(run)
    if name in _NOISY and window > 1:
        axes.plot(x, values, color=style["color"], linewidth=0.7, alpha=0.3)
        x, values = smoothed(x, values, window)
    axes.plot(x, values, linewidth=1.6, marker=marker, label=one_line(run.name).replace("$", r"\$"), **style)
    if name == "loss":
        points = run.validation(axis)
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.8}
        axes.plot(*points, "o", color=style["color"], markersize=6.5, zorder=3, **edge)


def _window(run: TrainedRun) -> int:
    """Iterations in a smoothed value; 1 for a short run, which is drawn as it is."""
    window = run.num_iterations // _SMOOTHED_SHARE
    return window if window >= _SHORTEST_WINDOW else 1


def smoothed(x: "np.ndarray", values: "np.ndarray", window: int) -> "tuple[np.ndarray, np.ndarray]":
    """Positions and means of `window` neighbouring finite values; nan where the value itself is not finite."""
    import numpy as np

    centres = np.arange(0, len(x), max(1, len(x) // _MOST_POINTS))
    before = window // 2
    means = [
        np.nanmean(values[max(0, centre - before) : centre - before + window])
        if np.isfinite(values[centre])
        else np.nan
        for centre in centres
    ]
    return x[centres], np.asarray(means)


def _set_axes(axes: "Axes", name: str, axis: str, values: list[float]) -> None:
    """Titles, ticks and scales."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(_PANELS[name], loc="left", size=11.5)
    axes.set_xlabel(_X_LABELS[axis], size=10)
    axes.xaxis.set_major_locator(MaxNLocator(9 if name == "loss" else 4, steps=_STEPS, integer=axis != "hours"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    numbers = sorted(finite(values))
    if not numbers:
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center", color=_GREY)
    elif name != "lr" and numbers[0] > 0 and numbers[-1] > _WIDE_RANGE * numbers[len(numbers) // 2]:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6 if name == "loss" else 5, steps=_STEPS))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        if name in ("lr", "tokens_per_second"):
            axes.set_ylim(bottom=0)
    axes.tick_params(which="both", labelsize=10, color="#bbbbbb")
    axes.grid(color="#e9e9e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")


def _add_loss_legend(axes: "Axes", runs: Sequence[TrainedRun]) -> None:
    """What lines and markers mean, for all colours."""
    from matplotlib.lines import Line2D

    entries = [Line2D([], [], color=_GREY, linewidth=1.6, label="training")]
    if any(_window(run) > 1 for run in runs):
        entries[0].set_label(f"training, mean over 1/{_SMOOTHED_SHARE} of the run")
        entries.append(Line2D([], [], color=_GREY, linewidth=0.7, alpha=0.5, label="training, each iteration"))
    if any(run.evaluations for run in runs):
        entries.append(Line2D([], [], color=_GREY, marker="o", markersize=6.5, linewidth=0, label="validation"))
    axes.legend(handles=entries, loc="upper right", frameon=False, fontsize=10)


def short(value: float) -> str:
    """A tick label such as 0.002, 40, 1.5k, 20M or 3B."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
