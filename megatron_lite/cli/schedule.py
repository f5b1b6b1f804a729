"""`megatron-lite schedule`: a drawing and the bubble of a pipeline schedule."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lite.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lite.pipeline.actions import Action

COSTS = "F=1,B=2,I=1,W=1"
MAX_PASSES = 200_000  # takes seconds to draw


def schedule(
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="A value of parallel.schedule, or forward-only.")
    ] = "",
    pp: Annotated[int | None, typer.Option("--pp", min=1, metavar="N", help="Number of pipeline ranks.")] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", min=1, metavar="N", help="Number of micro-batches per optimizer step."),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks",
            min=1,
            metavar="N",
            help="Number of model chunks per rank (parallel.virtual_pipeline); default: 2 for interleaved, else 1.",
        ),
    ] = None,
    cost: Annotated[
        str,
        typer.Option(
            "--cost",
            metavar="OP=COST,...",
            help="Durations of F forward, B backward, I backward to the inputs and W backward to the weights.",
        ),
    ] = COSTS,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write a .png or .svg picture.")
    ] = None,
    ring: Annotated[
        int | None,
        typer.Option("--ring", min=2, max=64, metavar="N", help="Draw a ring all-reduce of N ranks instead."),
    ] = None,
    tree: Annotated[
        int | None,
        typer.Option("--tree", min=2, max=64, metavar="N", help="Draw a tree all-reduce of N ranks instead."),
    ] = None,
) -> None:
    """Draw a pipeline schedule and print its bubble, its length and the peak activations of each rank; or draw the
    messages of an all-reduce, and the chunks that each rank has after each step."""
    if num_ranks := ring or tree:
        if name or pp or microbatches or chunks or cost != COSTS or (ring and tree):
            raise ConfigError("--ring N and --tree N draw an all-reduce, alone or with --out; leave out the others")
        draw_messages("ring" if ring else "tree", num_ranks, out)
        return
    if not (name and pp and microbatches):
        options = {"--name": name, "--pp": pp, "--microbatches": microbatches}
        missing = ", ".join(option for option, value in options.items() if not value)
        raise ConfigError(f"missing: {missing}; give --name, --pp and --microbatches, or --ring N, or --tree N")
    num_chunks = chunks or (2 if name == "interleaved" else 1)
    draw_schedule(name, pp, microbatches, num_chunks, cost, out)


def draw_schedule(name: str, pp: int, microbatches: int, num_chunks: int, cost: str, out: Path | None) -> None:
    """Draw a pipeline schedule of passes that take the times of `cost`."""
    from megatron_lite.cli.picture import draw, picture_at, save_picture
    from megatron_lite.pipeline.schedules import build_schedule
    from megatron_lite.pipeline.simulate import timeline
    from megatron_lite.plan.bubbles import idle_share, peak_live

    durations = parse_cost(COSTS) | parse_cost(cost)
    picture = picture_at(out) if out is not None else None

    def duration(action: "Action", rank: int) -> float:
        return durations[action.op]

    if pp * microbatches * num_chunks > MAX_PASSES:
        raise ConfigError(
            f"--pp {pp} --microbatches {microbatches} with {num_chunks} chunks: {pp * microbatches * num_chunks:,} "
            f"forwards are too many to draw; use fewer micro-batches, at most {MAX_PASSES:,} forwards"
        )
    order = build_schedule(name, pp, microbatches, num_chunks)
    spans = timeline(order, duration)
    length = max(span.end for span in spans)
    if not 0 < length < float("inf"):
        raise ConfigError(
            f"--cost {cost}: the length of {name} is {length:g}; give durations with a finite sum above 0"
        )
    idle = idle_share(spans, num_ranks=pp)
    if picture is not None:
        of_chunks = f", {num_chunks} chunks" if num_chunks > 1 else ""
        title = f"{name}: {pp} ranks{of_chunks}, {microbatches} micro-batches; bubble {idle:.3f}"
        save_picture(picture, spans, num_ranks=pp, title=title)

    used = sorted({action.op for rank in order for action in rank}, key="FBIW".index)
    unit = "micro-batches" if num_chunks == 1 else "micro-batch chunks"
    typer.echo(draw(order, duration))
    typer.echo(f"\nbubble {idle:.3f}")
    typer.echo(f"length {length:g} at {' '.join(f'{op}={durations[op]:g}' for op in used)}")
    typer.echo(f"peak activations {' '.join(map(str, peak_live(order)))} ({unit}, from rank 0 on)")
    if out is not None:
        typer.echo(f"picture in {out}")


def draw_messages(kind: str, num_ranks: int, out: Path | None) -> None:
    """Draw the steps of `parallel.ddp: ring_all_reduce` or `tree_all_reduce`."""
    from megatron_lite.cli import chunks
    from megatron_lite.cli.picture import picture_at
    from megatron_lite.engines.moves import ALGORITHMS, num_chunks

    picture = picture_at(out) if out is not None else None
    steps = ALGORITHMS[f"{kind}_all_reduce"](num_ranks)
    typer.echo(chunks.draw(steps, num_ranks))
    sent = [sum(move.source == rank for moves in steps for move in moves) for rank in range(num_ranks)]
    of_chunk = f"{max(sent)}/{num_chunks(steps)} of the tensor"
    typer.echo(f"\n{len(steps)} steps; the busiest rank sends {of_chunk}")
    if picture is not None:
        title = f"{kind} all-reduce of {num_ranks} ranks: how many ranks' values each copy of a chunk has"
        chunks.save_picture(picture, steps, num_ranks, title=title)
        typer.echo(f"picture in {out}")


def parse_cost(text: str) -> dict[str, float]:
    """Durations by op, from F=1,B=2,I=1,W=1 or a part of it."""
    durations = {}
    for part in text.split(","):
        op, _, number = part.partition("=")
        try:
            duration = float(number)
        except ValueError:
            duration = -1.0
        if op not in ("F", "B", "I", "W") or op in durations or not duration >= 0:
            raise ConfigError(
                f"--cost {text}: {part!r} is not OP=DURATION; give each of F, B, I and W at most once, with a number "
                f"of 0 or more: {COSTS}"
            )
        durations[op] = duration
    return durations
