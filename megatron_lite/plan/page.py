"""The plan of a job as one page of HTML: memory, the pipeline in time, communication, and kernels under their roofs.

The page needs no other file and no script. It is well-formed XML, so that a test can read it. Values of the plan are
in `data` elements: the exact one is the attribute, the rounded one is what a reader sees.
"""

from collections.abc import Iterable, Sequence
from html import escape

from megatron_lite.plan.drawing import (
    WIDTH,
    Dot,
    Part,
    Roof,
    bar,
    scale_of_bars,
    time_text,
    timeline,
    under_roof,
)
from megatron_lite.plan.estimate import Plan, Traffic
from megatron_lite.plan.fitting import NOTHING_FITS, Option
from megatron_lite.plan.page_style import style_sheet
from megatron_lite.plan.report import Budget, days_text, layout_line, per_rank, ranks_of, step_parts, unit
from megatron_lite.plan.roofline import Row, by_line
from megatron_lite.plan.stage import kernels
from megatron_lite.plan.units import duration, prefix_of, scaled, size_text
from megatron_lite.text import counted, named_ranks, visible

MANY_ROWS = 16  # more bars are thinner, and equal ones are one
SMALL = 1000  # bytes; operations with fewer in a step are one row of their group
SLOWEST = 12  # rows of the table of kernels
DRAWN_SHARE = 2e-4  # of the time of a rank's kernels; operations with less have no dot
NO_LINE = "autograd"  # in place of a source line, for what torch starts in backward
MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "backward to the weights",
    "E": "end of the step: sums, optimizer",
}
STYLES = {
    "product": "product",
    "attention forward": "forward",
    "attention backward": "backward",
    "memory": "elementwise",
}
PARTS = {"kernels": "kernels", "bubble": "idle", "end of the step": "E"}  # other parts of a step are waits


def page(plan: Plan, title: str, budget: Budget, fitting: Sequence[Option] = ()) -> str:
    """The page. `title` is its heading; `fitting` are changes with which a plan fits that does not."""
    sections = [
        _headline(plan, title, budget),
        *([_fitting(fitting)] if plan.peak_memory > plan.device.memory_bytes else []),
        _memory(plan),
        _pipeline(plan),
        _communication(plan),
        _kernels(plan),
        _meaning(plan),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(visible(title))}</title><style>{style_sheet()}</style></head>\n"
        f"<body><main>{visible(''.join(sections))}</main></body></html>\n"
    )


def _data(value: float, text: str) -> str:
    return f'<data value="{value:.12g}">{escape(text)}</data>'


def _cell(value: float, unit: str) -> str:
    """A table cell with value and unit, each aligned in its column."""
    size, letter = prefix_of(value)
    number = f"{value / size:,.2f}" if letter else f"{value:,.4g}"
    return f'<td class="n">{_data(value, number)}<span class="unit">{letter}{unit}</span></td>'


def _table(heads: Sequence[str], rows: Iterable[str]) -> str:
    """A table. Heads that start with > are above numbers, and those with >> above numbers with a unit."""
    styles = {0: "", 1: ' class="n"', 2: ' class="n quantity"'}
    shown = "".join(f"<th{styles[head.count('>')]}>{escape(head.lstrip('>'))}</th>" for head in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="flow"><table><thead><tr>{shown}</tr></thead><tbody>{body}</tbody></table></div>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    """Squares in the colours of CSS classes, with their names."""
    items = (
        f'<li><svg width="12" height="12"><rect class="{style}" width="12" height="12"/></svg>{escape(name)}</li>'
        for style, name in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _section(heading: str, *contents: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{''.join(contents)}</section>"


def _headline(plan: Plan, title: str, budget: Budget) -> str:
    device, needed = plan.device, plan.peak_memory
    room = device.memory_bytes - needed
    style, verdict = ("fits", "Fits") if room >= 0 else ("exceeds", "Does not fit")
    difference = f"{abs(room) / 1e9:,.2f} GB {'free' if room >= 0 else 'too much'}"
    where = f"of {device.memory_bytes / 1e9:,.4g} GB, on {ranks_of(plan, plan.fullest)}"
    speed = plan.tokens_per_second
    days, dollars = budget.days(plan), budget.dollars(plan)
    price = [f"{budget.tokens:,.4g} tokens", *([] if dollars is None else [f"{dollars:,.0f} dollars"])]
    bubble = f"{plan.bubble:.3f} of the pipeline is idle" if plan.grid.pp > 1 else f"{plan.tokens:,} tokens"
    cards = [
        ("peak memory", _data(needed, size_text(needed)), where),
        ("step", _data(plan.step_seconds, duration(plan.step_seconds)), bubble),
        ("tokens/s", _data(speed, f"{speed:,.0f}"), f"{speed / plan.grid.world_size:,.0f} on each {unit(plan)}"),
        ("MFU", _data(plan.mfu, f"{plan.mfu:.3f}"), f"{plan.hfu:.3f} with recomputed FLOPs"),
        ("training", _data(days, days_text(days)), ", ".join(price)),
    ]
    shown = "".join(
        f'<div class="card"><div class="name">{name}</div><div class="value">{value}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for name, value, more in cards
    )
    parameters = _data(plan.parameters, f"{plan.parameters:,}")
    return (
        f'<header><h1>{escape(title)}</h1><p class="verdict {style}">{verdict}: {difference}</p>'
        f'<div class="cards">{shown}</div><p class="layout">{escape(layout_line(plan))}</p>'
        f'<p class="layout">{parameters} parameters with padding; {escape(per_rank(plan))}</p></header>'
    )


def _fitting(fitting: Sequence[Option]) -> str:
    if not fitting:
        return _section("Changes that fit", f"<p>{escape(NOTHING_FITS)}</p>")
    rows = (
        f"<td>{escape(' '.join(each.changes))}</td>{_cell(each.memory, 'B')}"
        f'<td class="n">{_data(each.slowdown, f"{each.slowdown:+.1%}")}</td>'
        for each in fitting
    )
    return _section("Changes that fit", _table(("smallest changes", ">>memory", ">step"), rows))


def _memory_rows(plan: Plan) -> list[tuple[list[int], dict[str, int]]]:
    """Pipeline ranks with their memory; of many ranks, those with equal memory together."""
    if plan.grid.pp <= MANY_ROWS:
        return [([stage], memory) for stage, memory in enumerate(plan.memory)]
    found: dict[object, tuple[list[int], dict[str, int]]] = {}
    for stage, memory in enumerate(plan.memory):
        found.setdefault(tuple(memory.items()), ([], memory))[0].append(stage)
    return list(found.values())


def _memory(plan: Plan) -> str:
    limit, rows = plan.device.memory_bytes, _memory_rows(plan)
    kinds = list(dict.fromkeys(kind for memory in plan.memory for kind in memory))
    kinds = [kind for kind in kinds if any(memory.get(kind) for memory in plan.memory)]
    scale = 1.02 * max(limit, plan.peak_memory)
    label = f"{limit / 1e9:,.4g} GB of memory ({plan.device.name})"
    axis = scale_of_bars(scale, mark=limit, mark_label=label, unit="B")
    bars, numbers = [f"<th>pp rank</th><td>{axis}</td><td></td>"], []
    for stages, memory in rows:
        parts = [Part(kind, f"{kind}: {size_text(size)}", size) for kind, size in memory.items() if size]
        drawn = bar(parts, scale=scale, mark=limit, height=16 if len(rows) > MANY_ROWS else 30)
        style = "fullest" if plan.fullest in stages else "other"
        name, total = named_ranks(stages).partition(" ")[2], sum(memory.values())
        cell = f'<td class="n {style}">{_data(total, size_text(total))}</td>'
        bars.append(f'<th scope="row" class="{style}">{name}</th><td>{drawn}</td>{cell}')
        where = ranks_of(plan, stages[0]) if len(stages) == 1 else counted(len(stages), "pipeline rank")
        cells = "".join(
            f'<td class="n">{_data(memory.get(kind, 0), f"{memory.get(kind, 0) / 1e9:,.2f}")}</td>' for kind in kinds
        )
        numbers.append(f'<td>{name}</td><td>{where}</td>{cells}<td class="n">{total / 1e9:,.2f}</td>')
    thin = " thin" if len(rows) > MANY_ROWS else ""
    return _section(
        "Memory",
        "<p>The highest point of a step on each pipeline rank. The fullest one is bold.</p>",
        _legend((kind, kind) for kind in kinds),
        f'<table class="bars{thin}">{"".join(f"<tr>{row}</tr>" for row in bars)}</table>',
        "<details><summary>In GB</summary>",
        _table(["pipeline rank", "ranks", *(f">{kind}" for kind in kinds), ">together"], numbers),
        "</details>",
    )


def _pipeline(plan: Plan) -> str:
    drawing = timeline(plan.spans, plan.tails)
    ops = [op for op in MEANINGS if op == "E" or any(span.action.op == op for span in plan.spans)]
    chunks = max(span.action.chunk for span in plan.spans) + 1
    legend = [(op, f"{op} {MEANINGS[op]}" if op != "E" else MEANINGS[op]) for op in ops] + [("idle", "idle")]
    text = f"One row for each pipeline rank; {counted(plan.num_microbatches, 'micro-batch', 'micro-batches')}."
    text += f" {chunks} model chunks on each rank: later ones are lighter." if chunks > 1 else ""
    note, wide = "", ""
    if drawing.left_out:
        (first, second) = drawing.windows
        note = (
            f'<p class="note">Shortened: {drawing.left_out:,} of {len(plan.spans):,} passes are not drawn, between '
            f"{time_text(first.end)} and {time_text(second.start)}.</p>"
        )
    if drawing.enlarged_width > WIDTH:
        wide = '<input type="checkbox" id="enlarge"/><label for="enlarge">enlarge, with micro-batch numbers</label>'
    parts = step_parts(plan)
    total = sum(parts.values())
    of_step = [(PARTS.get(name, "wait"), f"{name} {duration(seconds)}", seconds) for name, seconds in parts.items()]
    return _section(
        "The step in time",
        f"<p>{escape(text)}</p>",
        _legend(legend),
        note,
        f'<div class="zoom" style="--wide:{drawing.enlarged_width}px">{wide}<div class="time">{drawing.names}',
        f'<div class="flow">{drawing.rows}</div></div></div>',
        f"<h3>{escape(duration(plan.step_seconds))} of the pipeline rank that ends last</h3>",
        bar((Part(*part) for part in of_step), scale=total, mark=None, height=30),
        _legend((style, name) for style, name, _ in of_step),
    )


def _communication(plan: Plan) -> str:
    if plan.grid.world_size == 1:
        return _section("Communication", "<p>One rank sends nothing.</p>")
    rows: list[str] = []
    small: dict[str, list[Traffic]] = {}
    for row in plan.traffic[plan.fullest]:
        if row.tensor_bytes < SMALL:
            small.setdefault(row.group, []).append(row)
        else:
            rows.append(_traffic_row(row))
    for group, found in small.items():
        ranks = " or ".join(f"{size:,}" for size in sorted({row.ranks for row in found}))
        rows.append(
            f'<td>{escape(group)}</td><td class="n">{ranks}</td><td>small</td>'
            f'<td class="n">{_data(sum(row.count for row in found), f"{sum(row.count for row in found):,}")}</td>'
            f"{_cell(sum(row.tensor_bytes for row in found), 'B')}{_cell(sum(row.sent_bytes for row in found), 'B')}"
            f"<td>{counted(len(found), 'line')}</td>"
        )
    heads = ["group", ">ranks", "operation", ">number", ">>tensors", ">>sent", "source line"]
    where = ranks_of(plan, plan.fullest)
    each = "each of " if where.startswith("ranks") else ""
    text = f"Operations of a step on {each}{where} (pipeline rank {plan.fullest}, the fullest)."
    return _section(
        "Communication",
        f"<p>{escape(text)} Sent bytes are those of a ring.</p>",
        _table(heads, rows),
    )


def _traffic_row(row: Traffic) -> str:
    return (
        f'<td>{escape(row.group)}</td><td class="n">{row.ranks:,}</td><td>{escape(row.operation)}</td>'
        f'<td class="n">{_data(row.count, f"{row.count:,}")}</td>{_cell(row.tensor_bytes, "B")}'
        f"{_cell(row.sent_bytes, 'B')}<td><code>{escape(row.line or NO_LINE)}</code></td>"
    )


def busiest(plan: Plan) -> int:
    """The pipeline rank whose kernels take the longest."""
    times = [sum(played.compute for played in durations.values()) for durations in plan.durations]
    return times.index(max(times))


def kernel_rows(plan: Plan, stage: int) -> list[Row]:
    """The operations of a step of a pipeline rank by source line, the slowest first."""
    trace, times = plan.traces[stage], plan.num_microbatches
    of_passes = [each for chunk in trace.chunks for one in chunk.passes.values() for each in kernels(one.events)]
    rows = [
        row._replace(
            seconds=times * row.seconds,
            launches=times * row.launches,
            bytes=times * row.bytes,
            flops=times * row.flops,
        )
        for row in by_line(of_passes, plan.device)
    ]
    return sorted([*rows, *by_line(kernels(trace.end.events), plan.device)], key=lambda row: -row.seconds)


def _kernels(plan: Plan) -> str:
    stage = busiest(plan)
    rows = kernel_rows(plan, stage)
    total = sum(row.seconds for row in rows)
    products, others = [], []
    for number, row in enumerate(rows, start=1):
        if row.seconds < DRAWN_SHARE * total or not row.bytes:  # a logarithmic axis has no 0
            continue
        title = f"{row.op} at {row.line or NO_LINE}: {time_text(row.seconds)}, {row.seconds / total:.1%}"
        radius = max(3.0, 42 * (row.seconds / total) ** 0.5)
        x, y = (row.flops / row.bytes, row.flops) if row.flops else (row.bytes / row.launches, row.bytes)
        label = str(number) if number <= SLOWEST else ""
        dot = Dot(x, y / row.seconds, radius, STYLES[row.kind], title, label)
        (products if row.flops else others).append(dot)
    share = {kind: sum(row.seconds for row in rows if row.kind == kind) / total for kind in STYLES}
    legend = [(STYLES[kind], f"{kind}, {part:.1%} of the time") for kind, part in share.items() if part]
    shown = [
        f"<figure><figcaption>{caption}</figcaption>{under_roof(dots, roof)}</figure>"
        for caption, dots, roof in (
            ("Products and attention: FLOP/s", products, _roof_of_products(plan)),
            ("Operations without products: bytes/s", others, _roof_of_memory(plan)),
        )
        if dots
    ]
    return _section(
        "Kernels under their roofs",
        f"<p>The kernels of a step on {escape(ranks_of(plan, stage))} (pipeline rank {stage}, where they take the "
        f"longest): {_data(total, duration(total))}. The area of a dot is its share of this time.</p>",
        _legend(legend),
        f'<div class="figures">{"".join(shown)}</div>',
        f"<h3>The slowest {min(SLOWEST, len(rows))} of {len(rows)} operations</h3>",
        _table(
            [">", "operation", ">>time", ">share", ">kernels", ">>memory", ">>FLOPs", "bound by", "source line"],
            (_kernel_row(number, row, total) for number, row in enumerate(rows[:SLOWEST], start=1)),
        ),
    )


def _kernel_row(number: int, row: Row, total: float) -> str:
    seconds = f"{row.seconds * 1e3:,.2f}"
    return (
        f'<td class="n">{number}</td><td>{escape(row.op)}</td>'
        f'<td class="n">{_data(row.seconds, seconds)}<span class="unit">ms</span></td>'
        f'<td class="n">{row.seconds / total:.1%}</td><td class="n">{row.launches:,}</td>{_cell(row.bytes, "B")}'
        f"{_cell(row.flops, 'FLOP')}<td>{escape(row.bound)}</td><td><code>{escape(row.line or NO_LINE)}</code></td>"
    )


def _roof_of_products(plan: Plan) -> Roof:
    device = plan.device
    return Roof(
        slope=device.memory,
        flat=device.product,
        slope_label=f"memory {scaled(device.memory, 'B/s')}",
        flat_label=f"products {scaled(device.product, 'FLOP/s')}",
        x_label="FLOPs for each byte of memory traffic",
        x_unit="",
        y_unit="FLOP/s",
        dotted=device.peak if device.peak > device.product else None,
        dotted_label=f"data sheet {scaled(device.peak, 'FLOP/s')}",
    )


def _roof_of_memory(plan: Plan) -> Roof:
    device = plan.device
    return Roof(
        slope=1 / device.kernel_seconds,
        flat=device.memory,
        slope_label=f"launches {device.kernel_seconds * 1e6:.3g} µs",
        flat_label=f"memory {scaled(device.memory, 'B/s')}",
        x_label="bytes for each kernel",
        x_unit="B",
        y_unit="B/s",
        dotted=None,
        dotted_label="",
    )


def _meaning(plan: Plan) -> str:
    device = plan.device
    rates = ", ".join(
        f"{name} {scaled(value, each)}"
        for name, value, each in (
            ("products", device.product, "FLOP/s"),
            ("attention forward", device.attention_forward, "FLOP/s"),
            ("attention backward", device.attention_backward, "FLOP/s"),
            ("memory", device.memory, "B/s"),
            ("links of a machine", device.link, "B/s"),
            ("network", device.network, "B/s"),
        )
    )
    entries = [
        ("Counted", COUNTED),
        ("Predicted", PREDICTED),
        ("Assumed", f"{rates}; {device.reserved_bytes / 1e9:,.3g} GB that CUDA, NCCL and cuBLAS reserve."),
        ("Left out", LEFT_OUT),
    ]
    shown = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in entries)
    return _section("What is counted and what is predicted", f"<dl>{shown}</dl>")


COUNTED = (
    "The training code of one rank of each kind of stage runs on tensors without memory. Parameters, training state, "
    "activations, FLOPs, memory traffic, and operations of communication with their bytes are those of this run."
)
PREDICTED = (
    "A kernel takes as long as its FLOPs, its memory traffic or its launch. An operation of communication takes its "
    "latency and the time of its bytes in a ring. It costs time only from where the code waits for it. Passes follow "
    "the order of the schedule; a pass starts when its input has arrived."
)
LEFT_OUT = (
    "The time of the host between kernels; contention between groups that use the same links; fragments of the "
    "allocator; loading of data, evaluation and checkpoints. So a measured step is slower."
)
