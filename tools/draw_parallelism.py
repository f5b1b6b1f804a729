"""Draws the ideas of docs/tensor-parallelism.md and docs/data-parallelism.md, one picture for each name.

Slices come from the functions that shard the model, times from the plan of a model on A100 GPUs.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_lite.cli.picture import picture_at, write_picture
from megatron_lite.config.load import load_config
from megatron_lite.mpu import VocabUtility
from megatron_lite.parallel.shard import Shard
from megatron_lite.plan.communication import Operation, Wait
from megatron_lite.plan.devices import device_of
from megatron_lite.plan.kernels import Kernel
from megatron_lite.plan.links import Machines
from megatron_lite.plan.sizes import state_bytes
from megatron_lite.plan.stage import Event, trace_rank
from megatron_lite.plan.timing import TimeOfEvent, play

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind people can distinguish.
RANKS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7")
ALL, SUM, PALE = "#d9d9d9", "#d55e00", "#f4f4f4"  # every rank has it; communication; nothing
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
PER_MACHINE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", choices=PICTURES, required=True, help="the idea")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .svg")
    given = parser.parse_args()
    picture = picture_at(given.out)
    from matplotlib.figure import Figure

    draw, width, height = PICTURES[given.name]
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    draw(figure)
    write_picture(figure, picture)


def blank(axes: "Axes", title: str, width: float, height: float) -> None:
    """Axes without ticks, with y downwards."""
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axes.set_title(title, size=12, loc="left")
    axes.spines[:].set_visible(False)


def box(axes: "Axes", x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
    axes.broken_barh([(x, width)], (y, height), facecolor=colour, edgecolor="white", linewidth=1)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=10)


# Products


def draw_products(figure: "Figure") -> None:
    """X times A, with the columns or the rows of A on two ranks."""
    first, second = figure.subplots(2, 1)
    blank(first, "columns of A: each rank computes some columns of Y", 18.5, 3.1)
    matrix(first, 0, "X, on every rank", 2.4, [ALL])
    matrix(first, 4.2, "A", 4, RANKS[:2])
    matrix(first, 10, "Y = [X A0, X A1]", 4, RANKS[:2])
    signs(first, (3.3, "x"), (9.1, "="))
    blank(second, "rows of A, and columns of X: Y is the sum of what both compute", 18.5, 3.1)
    matrix(second, 0, "X = [X0, X1]", 2.4, RANKS[:2])
    matrix(second, 4.2, "A", 4, RANKS[:2], rows=True)
    matrix(second, 9.2, "X0 A0", 4, RANKS[:1])
    matrix(second, 14.2, "X1 A1", 4, RANKS[1:2])
    signs(second, (3.3, "x"), (8.7, "="), (13.7, "+"))
    legend(figure, {f"rank {rank}": RANKS[rank] for rank in range(2)} | {"every rank": ALL})


def matrix(axes: "Axes", x: float, title: str, width: float, colours: list | tuple, *, rows: bool = False) -> None:
    """A matrix whose columns, or rows, have the colours of ranks."""
    axes.text(x + width / 2, 0.3, title, ha="center", va="center", size=11)
    count, high = len(colours), 2.2
    for place, colour in enumerate(colours):
        if rows:
            box(axes, x, 0.7 + place * high / count, width, high / count, colour)
        else:
            box(axes, x + place * width / count, 0.7, width / count, high, colour)


def signs(axes: "Axes", *places: tuple[float, str]) -> None:
    for x, text in places:
        axes.text(x, 1.8, text, ha="center", va="center", size=16)


def legend(figure: "Figure", colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    boxes = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=boxes, loc="outside lower center", ncols=len(boxes), frameon=False, fontsize=11)


# Lanes: what two ranks do one after another, and what they do together


class Step(NamedTuple):
    """A step of both ranks: `together` is communication or replicated work, else each rank has its own slice."""

    text: str
    colour: str = ""  # of a step that both ranks do together


def lanes(axes: "Axes", title: str, steps: list[Step]) -> None:
    """A row for each of two ranks; communication covers both rows."""
    blank(axes, title, 2.2 * len(steps), 2)
    for place, step in enumerate(steps):
        x = 2.2 * place
        if step.colour:
            box(axes, x, 0, 2.1, 1.96, step.colour, step.text)
        else:
            for rank in range(2):
                box(axes, x, rank, 2.1, 0.96, RANKS[rank], step.text.replace("#", str(rank)))


def draw_mlp(figure: "Figure") -> None:
    """The MLP in both orders."""
    first, second = figure.subplots(2, 1)
    start, end = Step("X\n[s, b, h]", ALL), Step("Z\n[s, b, h]", ALL)
    right = [start, Step("X A#\n[s, b, 4h/2]"), Step("GeLU"), Step("Y# B#\n[s, b, h]"), Step("all-reduce\nb s h", SUM)]
    lanes(first, "columns of A, then rows of B: one sum, after the second product", [*right, end])
    gathered = Step("all-gather\nb s h", SUM)
    wrong = [start, Step("X# A#\n[s, b, 4h]"), Step("all-reduce\n4 b s h", SUM), Step("GeLU\n[s, b, 4h]", ALL)]
    wrong += [Step("Y B#\n[s, b, h/2]"), gathered, end]
    lanes(second, "rows of A, then columns of B: GeLU needs the sum, which is four times as large", wrong)
    legend(figure, {"rank 0": RANKS[0], "rank 1": RANKS[1], "both, the same": ALL, "communication": SUM})


def draw_loss(figure: "Figure") -> None:
    """The end of the model: gathered logits against three sums."""
    first, second = figure.subplots(2, 1)
    hidden, logits = Step("hidden\n[s, b, h]", ALL), Step("logits\n[s, b, v/2]")
    gather = [
        hidden,
        logits,
        Step("all-gather\nb s v", SUM),
        Step("all logits\n[s, b, v]", ALL),
        Step("loss\n[s, b]", ALL),
    ]
    lanes(first, "gather the logits", gather)
    sums = [
        hidden,
        logits,
        Step("maximum"),
        Step("all-reduce\nof the max\nb s", SUM),
        Step("exp, sum,\nlogit of the\nlabel"),
    ]
    lanes(
        second,
        "three all-reduces of one value for each token",
        [*sums, Step("2 all-reduces\nof b s each", SUM), Step("loss\n[s, b]", ALL)],
    )
    legend(figure, {"rank 0": RANKS[0], "rank 1": RANKS[1], "both, the same": ALL, "communication": SUM})


# Slices of the model


def draw_heads(figure: "Figure") -> None:
    """The columns of query, key and value on four ranks, for several numbers of key/value groups."""
    heads, tp = 16, len(RANKS)
    for axes, groups in zip(figure.subplots(3, 1), (16, 4, 2), strict=True):
        blank(axes, f"{heads} heads, {groups} key/value groups, tensor {tp}", 2 * heads + heads + 3, 1.5)
        parts, x = (heads, groups, groups), 0.0
        of_ranks = [Shard(0, parts, parts).ranges(sum(parts), rank, tp) for rank in range(tp)]
        for part, (name, count) in enumerate(zip(("query", "key", "value"), parts, strict=True)):
            before = sum(parts[:part])
            for member in range(count):
                owners = [r for r in range(tp) if of_ranks[r][part][0] <= before + member < of_ranks[r][part][1]]
                for place, rank in enumerate(owners):
                    box(axes, x, place / len(owners), 0.95, 0.94 / len(owners), RANKS[rank])
                x += 1
            axes.text(x - count / 2, 1.3, name, ha="center", va="center", size=11)
            x += 1.5
    legend(figure, {f"rank {rank}": colour for rank, colour in enumerate(RANKS)})


def draw_vocabulary(figure: "Figure") -> None:
    """The rows of the embedding on two ranks, and what each puts into the sum for some tokens."""
    vocabulary, tp, tokens = 12, 2, (7, 2, 11, 3)
    owners = [VocabUtility.vocab_range_from_global_vocab_size(vocabulary, rank, tp) for rank in range(tp)]
    axes = figure.subplots()
    blank(axes, "", 20, 12.6)
    axes.text(1.5, -0.6, "rows of the embedding", ha="center", va="center", size=11)
    for rank, (start, end) in enumerate(owners):
        for row in range(start, end):
            box(axes, 0, row, 3, 1, RANKS[rank], str(row))
    for rank, (start, end) in enumerate(owners):
        x = 5.2 + 5 * rank
        axes.text(x + 1.5, 2, f"rank {rank}", ha="center", va="center", size=11)
        for place, token in enumerate(tokens):
            has = start <= token < end
            box(axes, x, 3 + 1.6 * place, 3, 1.3, RANKS[rank] if has else PALE, f"row {token}" if has else "zeros")
    axes.text(17, 2, "on every rank", ha="center", va="center", size=11)
    for place, token in enumerate(tokens):
        axes.text(4.1, 3.65 + 1.6 * place, str(token), ha="center", va="center", size=11)
        (owner,) = (rank for rank, (start, end) in enumerate(owners) if start <= token < end)
        box(axes, 15.5, 3 + 1.6 * place, 3, 1.3, RANKS[owner], f"row {token}")
    for x, text in ((9.2, "+"), (14.4, "=")):
        axes.text(x, 6.1, text, ha="center", va="center", size=16)
    axes.text(4.1, 2, "tokens", ha="center", va="center", size=11)
    axes.text(12, 10.2, "all-reduce of b s h values", ha="center", va="center", size=11, color=SUM)


# Times of a plan


def layer_of(events: list[Event]) -> list[Event]:
    """The events of the second layer: from the end of a sum over tp to that of the next but one."""
    sums = [place for place, event in enumerate(events) if isinstance(event, Operation) and event.group == "tp"]
    ends = [next(at for at in range(place, len(events)) if isinstance(events[at], Wait)) + 1 for place in sums]
    return events[ends[2] : ends[4]]


def draw_overlap(figure: "Figure") -> None:
    """Forward and backward of a layer under tensor parallelism, on one rank."""
    settings = ["parallel.tensor=8", "parallel.pipeline=1", "optim.distributed=true", "model.num_layers=4"]
    settings += ["train.micro_batch_size=1", "train.global_batch_size=1", "model.top_query_layer=false"]
    config = load_config(str(CONFIGS / "codegeex_13b.yaml"), settings)
    (chunk,) = trace_rank(config, 0, PER_MACHINE).chunks
    size = f"h {config.model.hidden_size:,}, {config.data.seq_length:,} tokens, one of 8 A100"
    for axes, op, name in zip(figure.subplots(2, 1), "FB", ("forward", "backward"), strict=True):
        timeline(axes, f"{name} of one layer: {size}", layer_of(chunk.last[op].events))


def draw_buckets(figure: "Figure") -> None:
    """The last backward of a step under data parallelism, on one rank."""
    settings = ["parallel.tensor=1", "train.micro_batch_size=4", "train.global_batch_size=256"]
    config = load_config(str(CONFIGS / "gpt_345m.yaml"), settings)
    trace = trace_rank(config, 0, 64)
    title = "last backward of a step, then the update: GPT 345M on 64 A100"
    timeline(figure.subplots(), title, [*trace.chunks[0].last["B"].events, *trace.end.events])


def timeline(axes: "Axes", title: str, events: list[Event]) -> None:
    """A row for products, one for other kernels, and one for communication, in milliseconds."""
    rows = {"products": RANKS[0], "other kernels": RANKS[2], "communication": SUM}
    spans: list[TimeOfEvent] = []
    play(events, Machines(device_of("a100"), PER_MACHINE), spans)
    for event, start, end in spans:
        is_product = isinstance(event, Kernel) and event.kind != "memory"
        name = "communication" if isinstance(event, Operation) else "products" if is_product else "other kernels"
        place = (1e3 * start, 1e3 * (end - start))
        box = {"facecolor": rows[name], "edgecolor": "white", "linewidth": 0.5}
        axes.broken_barh([place], (list(rows).index(name) - 0.43, 0.86), **box)
    axes.set(xlim=(0, 1e3 * max(span.end for span in spans)), ylim=(2.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows), size=11)
    axes.set_xlabel("milliseconds", size=11)
    axes.set_title(title, size=12, loc="left")
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)


# Data parallelism


def draw_server(figure: "Figure") -> None:
    """The bytes on the busiest link, in one direction, for a gradient of 1 GB."""
    counts = [2**power for power in range(1, 11)]
    axes = figure.subplots()
    axes.loglog(counts, [n - 1 for n in counts], "o-", color=RANKS[1], label="the server's link: N - 1")
    axes.loglog(
        counts, [2 * (n - 1) / n for n in counts], "s-", color=RANKS[0], label="each rank of a ring: 2 (N - 1) / N"
    )
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.minorticks_off()
    axes.set_xlabel("ranks", size=11)
    axes.set_ylabel("GB for a gradient of 1 GB", size=11)
    axes.set_title("bytes on the busiest link in a step, in one direction", size=12, loc="left")
    axes.grid(color=ALL, linewidth=0.6)
    axes.legend(frameon=False, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def draw_zero(figure: "Figure") -> None:
    """The bytes of the training state for a parameter, by engine."""
    ranks, bf16 = (
        64,
        ["train.precision=bf16", "parallel.tensor=1", "train.micro_batch_size=4", "train.global_batch_size=256"],
    )
    engines = {
        "local\n(DDP)": [],
        "optim.distributed\n(ZeRO-1)": ["optim.distributed=true"],
        "deepspeed stage 2\n(ZeRO-2)": ["parallel.ddp=deepspeed", "deepspeed.zero_stage=2"],
        "deepspeed stage 3\n(ZeRO-3)": ["parallel.ddp=deepspeed", "deepspeed.zero_stage=3"],
        "fsdp\n(ZeRO-3)": ["parallel.ddp=fsdp"],
    }
    axes = figure.subplots()
    for place, settings in enumerate(engines.values()):
        config, bottom = load_config(str(CONFIGS / "gpt_345m.yaml"), bf16 + settings), 0.0
        for (kind, size), colour in zip(state_bytes(config, ranks).items(), RANKS, strict=False):
            axes.bar(place, size, bottom=bottom, color=colour, label=kind if place == 0 else "_")
            bottom += size
        axes.text(place, bottom + 0.2, f"{bottom:.2f}", ha="center", size=11)
    axes.set_xticks(range(len(engines)), list(engines), size=11)
    axes.set_ylabel("bytes", size=11)
    axes.set_title(
        f"training state of a parameter on each of {ranks} ranks, between steps, in bf16", size=12, loc="left"
    )
    axes.legend(frameon=False, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


PICTURES: dict[str, tuple[Callable[["Figure"], None], float, float]] = {  # with width and height in inches
    "products": (draw_products, 9, 5),
    "mlp": (draw_mlp, 10, 4.6),
    "overlap": (draw_overlap, 10, 5.4),
    "heads": (draw_heads, 10, 4.4),
    "vocabulary": (draw_vocabulary, 8, 5),
    "loss": (draw_loss, 10, 4.6),
    "server": (draw_server, 8, 4.5),
    "buckets": (draw_buckets, 10, 3),
    "zero": (draw_zero, 9, 4.5),
}

if __name__ == "__main__":
    main()
