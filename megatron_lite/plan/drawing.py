"""Drawings of a plan's page as SVG: stacked bars, the timeline of a pipeline, and rooflines.

Places along bars and timelines are in percent. So a drawing is as wide as its column, and its letters keep their size.
Colours are those of CSS classes, which the page defines for light and dark screens.
"""

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_lite.pipeline.simulate import Span
from megatron_lite.plan.units import scaled

MAX_SPANS = 4200  # of a timeline; more are drawn as their first and last KEPT_SPANS
KEPT_SPANS = 2000
WIDTH, MAX_WIDTH = 980, 16000  # of a timeline in pixels: on a wide screen, and enlarged
GAP = 3.0  # percent between the two windows of a shortened timeline
AXIS = 24  # height of a time axis in pixels


def time_text(seconds: float) -> str:
    return f"{seconds:.5g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


class Part(NamedTuple):
    """A part of a stacked bar."""

    style: str  # its CSS class
    title: str
    value: float


def bar(parts: Iterable[Part], *, scale: float, mark: float | None, height: int) -> str:
    """A stacked bar, as wide as its column at the value `scale`, with a line at `mark`."""
    drawn, left = [], 0.0
    for style, title, value in parts:
        width = 100 * value / scale
        place = f'x="{left:.3f}%" y="3" width="{width:.3f}%" height="{height - 6}"'
        drawn.append(f'<rect class="{style}" {place}><title>{html.escape(title)}</title></rect>')
        left += width
    if mark is not None:
        drawn.append(
            f'<line class="limit" x1="{100 * mark / scale:.3f}%" x2="{100 * mark / scale:.3f}%" y2="{height}"/>'
        )
    return f'<svg class="bar" width="100%" height="{height}">{"".join(drawn)}</svg>'


def scale_of_bars(scale: float, *, mark: float, mark_label: str, unit: str) -> str:
    """The axis above stacked bars, from 0 to `scale`, with the label of the line at `mark`."""
    drawn, place, room = [], 100 * mark / scale, 22  # percent, for the label
    anchor, covered = ("end", (place - room, place + 4)) if place > 50 else ("start", (place - 4, place + room))
    for tick in ticks(0.0, scale, 5):
        at = 100 * tick / scale
        if not covered[0] < at < covered[1]:
            drawn.append(_letters(at, 13, scaled(tick, unit) if tick else "0"))
    drawn.append(f'<text class="limit" x="{place:.3f}%" y="13" text-anchor="{anchor}">{html.escape(mark_label)}</text>')
    return f'<svg class="bar axis" width="100%" height="18">{"".join(drawn)}</svg>'


class Window(NamedTuple):
    """A range of time and its place in a drawing, in percent."""

    start: float
    end: float
    left: float
    width: float

    def at(self, time: float) -> float:
        return self.left + self.width * (time - self.start) / (self.end - self.start)


class Timeline(NamedTuple):
    """The drawing of a pipeline's passes."""

    names: str  # of the rows
    rows: str
    windows: list[Window]
    left_out: int  # spans that are in no window
    enlarged_width: int  # pixels in which most numbers of micro-batches have room


def timeline(spans: Sequence[Span], tails: Sequence[float]) -> Timeline:
    """A row for each pipeline rank: its passes, and after the last one its tail. Times are in seconds."""
    ends = [0.0] * len(tails)
    for span in spans:
        ends[span.rank] = max(ends[span.rank], span.end)
    windows = windows_of(spans, max(end + tail for end, tail in zip(ends, tails, strict=True)))
    height = max(4, min(22, 640 // len(tails)))
    rows = _Rows(windows, height, num_chunks=1 + max(span.action.chunk for span in spans))
    drawn: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if rows.window_of(span):
            drawn[span.rank].append(span)
    wide = rows.enlarged_width([span for found in drawn.values() for span in found])
    pitch = height + (4 if height > 11 else 1)
    bottom, every = pitch * len(tails), -(-13 // pitch)
    shapes = [_grid(windows, bottom, 8, "small"), _grid(windows, bottom, 8 * wide // WIDTH, "large")]
    for rank, (end, tail) in enumerate(zip(ends, tails, strict=True)):
        boxes = rows.idle() + rows.boxes(drawn[rank], wide) + rows.tail(end, tail)
        shapes.append(f'<g transform="translate(0 {rank * pitch})">{boxes}</g>')
    names = "".join(
        f'<text x="24" y="{rank * pitch + height / 2 + 4:g}" text-anchor="end">{rank}</text>'
        for rank in range(0, len(tails), every)
    )
    return Timeline(
        names=f'<svg class="names" width="30" height="{bottom + AXIS}">{names}</svg>',
        rows=f'<svg class="track" width="100%" height="{bottom + AXIS}">{"".join(shapes)}</svg>',
        windows=windows,
        left_out=len(spans) - sum(map(len, drawn.values())),
        enlarged_width=wide,
    )


def windows_of(spans: Sequence[Span], length: float) -> list[Window]:
    """The parts of a timeline that are drawn: all of it, or its start and its end at one scale."""
    if len(spans) <= MAX_SPANS:
        return [Window(0.0, length, 0.0, 100.0)]
    first = sorted(span.start for span in spans)[KEPT_SPANS]
    second = sorted(span.end for span in spans)[-KEPT_SPANS - 1]
    scale = (100.0 - GAP) / (first + length - second)
    return [
        Window(0.0, first, 0.0, first * scale),
        Window(second, length, first * scale + GAP, (length - second) * scale),
    ]


class _Rows(NamedTuple):
    """The rows of a timeline, each `height` pixels high."""

    windows: list[Window]
    height: int
    num_chunks: int

    def window_of(self, span: Span) -> Window | None:
        """The window in which a span is drawn."""
        return next((each for each in self.windows if span.start < each.end and span.end > each.start), None)

    def sides(self, span: Span) -> tuple[float, float]:
        """Left and right of a span in percent, within its window."""
        window = self.window_of(span) or self.windows[-1]
        return window.at(max(span.start, window.start)), window.at(min(span.end, window.end))

    @property
    def letters(self) -> int:
        """The size of the letters; below 6 pixels there are none."""
        size = min(11, self.height - 3)
        return size if size >= 6 else 0

    def room(self, span: Span) -> float:
        """The pixels that the number of a span's micro-batch needs."""
        return 0.6 * self.letters * len(str(span.action.microbatch)) + 3

    def enlarged_width(self, spans: Sequence[Span]) -> int:
        """A width in pixels with room for three of four numbers."""
        if not self.letters:
            return WIDTH
        sides = ((span, *self.sides(span)) for span in spans)
        needed = sorted(100 * self.room(span) / (right - left) for span, left, right in sides if right > left)
        return math.ceil(min(max(needed[len(needed) * 3 // 4], WIDTH), MAX_WIDTH))

    def boxes(self, spans: Sequence[Span], wide: int) -> str:
        """The passes of a rank. Numbers that have room only in a drawing of `wide` pixels have the class large."""
        boxes: dict[tuple[str, int], list[str]] = defaultdict(list)
        numbers, middle = [], self.height / 2 + 4
        for span in spans:
            (left, right), (op, microbatch, chunk) = self.sides(span), span.action
            name = str(span.action) if self.num_chunks > 1 else f"{op}{microbatch}"
            title = f"{name}: {time_text(span.end - span.start)} from {time_text(span.start)} on"
            place = f'x="{left:.3f}%" width="{right - left:.3f}%" height="{self.height}"'
            boxes[op, chunk].append(f"<rect {place}><title>{title}</title></rect>")
            room, share = self.room(span), (right - left) / 100
            if self.letters and share * wide >= 0.99 * room:
                style = "" if share * WIDTH >= room else ' class="large"'
                numbers.append(f'<text x="{(left + right) / 2:.3f}%" y="{middle:g}"{style}>{microbatch}</text>')
        groups = []
        for (op, chunk), found in boxes.items():
            opacity = 1 - 0.55 * chunk / max(self.num_chunks - 1, 1)
            groups.append(f'<g class="{op}" fill-opacity="{opacity:.2f}">{"".join(found)}</g>')
        return f'{"".join(groups)}<g class="numbers" font-size="{self.letters}">{"".join(numbers)}</g>'

    def idle(self) -> str:
        """The ground of a row."""
        places = (f'x="{each.left:.3f}%" width="{each.width:.3f}%" height="{self.height}"' for each in self.windows)
        return "".join(f'<rect class="idle" {place}/>' for place in places)

    def tail(self, end: float, seconds: float) -> str:
        """The end of a step on a rank, from its last pass on."""
        window = self.windows[-1]
        left, right = (window.at(max(time, window.start)) for time in (end, end + seconds))
        place = f'x="{left:.3f}%" width="{right - left:.3f}%" height="{self.height}"'
        return f'<rect class="E" {place}><title>end of the step: {time_text(seconds)}</title></rect>'


def _grid(windows: Sequence[Window], bottom: int, count: int, style: str) -> str:
    """The time axis below the rows with about `count` times, and its lines behind them."""
    length = sum(window.end - window.start for window in windows)
    unit, size = ("s", 1.0) if windows[-1].end >= 1 else ("ms", 1e3)
    drawn = []
    for window in windows:
        inside = ticks(window.start, window.end, round(count * (window.end - window.start) / length) or 1)
        for tick in inside:
            place = window.at(tick)
            drawn.append(f'<line class="grid" x1="{place:.3f}%" x2="{place:.3f}%" y2="{bottom + 4}"/>')
            drawn.append(_letters(place, bottom + 17, f"{tick * size:.6g} {unit}" if tick else "0"))
    return f'<g class="{style}">{"".join(drawn)}</g>'


def _letters(place: float, y: float, text: str) -> str:
    anchor = "start" if place < 3 else "end" if place > 97 else "middle"
    return f'<text class="tick" x="{place:.3f}%" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten between two values."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


class Dot(NamedTuple):
    """A point under a roof."""

    x: float
    y: float
    radius: float  # pixels
    style: str
    title: str
    label: str


class Roof(NamedTuple):
    """The bound min(flat, slope * x), and how its drawing is labelled."""

    slope: float
    flat: float
    slope_label: str
    flat_label: str
    x_label: str
    x_unit: str
    y_unit: str
    dotted: float | None  # another flat bound, far from reach
    dotted_label: str


class _Axis(NamedTuple):
    """A logarithmic axis."""

    low: float
    high: float
    first: float  # pixel of low
    last: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.first + (self.last - self.first) * share

    def ticks(self) -> list[float]:
        """Powers of ten, or of a thousand if there are many; also 2 and 5 times a power if there are few."""
        decades = math.log10(self.high / self.low)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [10.0**power for power in powers if decades < 7 or power % 3 == 0]
        if decades < 2.5:
            found = [power * factor for power in found for factor in (1, 2, 5)]
        return [tick for tick in found if self.low <= tick <= self.high]


def under_roof(dots: Sequence[Dot], roof: Roof) -> str:
    """A log-log drawing of dots and their roof."""
    ridge = roof.flat / roof.slope
    lows, highs = [ridge, *(dot.x for dot in dots)], [roof.flat, roof.dotted or 0.0]
    high = max(lows) * 2.5
    # Left of the ridge is room for the label of the flat part: no dot is there.
    x = _Axis(min(min(lows) / 2.5, ridge * (ridge / high) ** 0.5), high, 84, 552)
    y = _Axis(min(x.low * roof.slope, *(dot.y for dot in dots)) / 1.5, max(highs) * 1.9, 336, 12)
    drawn = [_log_grid(x, y, roof)]
    start = max(x.low, y.low / roof.slope)
    corners = [(start, start * roof.slope), (ridge, roof.flat), (x.high, roof.flat)]
    points = " ".join(f"{x.at(across):.1f},{y.at(up):.1f}" for across, up in corners)
    drawn.append(f'<polyline class="roof" points="{points}"/>')
    if roof.dotted:
        high = y.at(roof.dotted)
        drawn.append(f'<line class="dotted" x1="{x.first}" x2="{x.last}" y1="{high:.1f}" y2="{high:.1f}"/>')
        drawn.append(_label(x.last - 4, high - 5, roof.dotted_label, "end"))
    drawn.append(_label(x.at(ridge) - 8, y.at(roof.flat) + 4, roof.flat_label, "end"))
    middle = math.sqrt(start * ridge)
    across, up = x.at(middle), y.at(middle * roof.slope)
    angle = math.degrees(math.atan2(y.at(roof.flat) - up, x.at(ridge) - across))
    drawn.append(
        _label(across, up - 6, roof.slope_label, "middle", f' transform="rotate({angle:.1f} {across:.1f} {up:.1f})"')
    )
    for dot in sorted(dots, key=lambda dot: -dot.radius):
        at = f'cx="{x.at(dot.x):.1f}" cy="{y.at(dot.y):.1f}"'
        drawn.append(
            f'<circle class="{dot.style}" {at} r="{dot.radius:.1f}"><title>{html.escape(dot.title)}</title></circle>'
        )
        if dot.label and dot.radius >= 7:
            drawn.append(_label(x.at(dot.x), y.at(dot.y) + 4, dot.label, "middle", ' class="number"'))
    return f'<svg class="roofline" viewBox="0 0 560 386">{"".join(drawn)}</svg>'


def _log_grid(x: _Axis, y: _Axis, roof: Roof) -> str:
    drawn = []
    for tick in x.ticks():
        place, text = x.at(tick), scaled(tick, roof.x_unit)
        drawn.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{y.last}" y2="{y.first}"/>')
        drawn.append(_label(place, y.first + 17, text, "middle"))
    for tick in y.ticks():
        place, text = y.at(tick), scaled(tick, roof.y_unit)
        drawn.append(f'<line class="grid" x1="{x.first}" x2="{x.last}" y1="{place:.1f}" y2="{place:.1f}"/>')
        drawn.append(_label(x.first - 6, place + 4, text, "end"))
    drawn.append(_label((x.first + x.last) / 2, y.first + 38, roof.x_label, "middle"))
    return "".join(drawn)


def _label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'
