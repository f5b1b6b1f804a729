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
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="A value of parallel.schedule, or forward-only.")],
    pp: Annotated[int, typer.Option("--pp", min=1, metavar="N", help="Number of pipeline ranks.")],
    microbatches: Annotated[
        int, typer.Option("--microbatches", min=1, metavar="N", help="Number of micro-batches per optimizer step.")
    ],
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
) -> None:
    """Draw a pipeline schedule and print its bubble, its length and the peak activations of each rank."""
    from megatron_lite.cli.picture import draw, picture_at, save_picture
    from megatron_lite.pipeline.schedules import build_schedule
    from megatron_lite.pipeline.simulate import timeline
    from megatron_lite.plan.bubbles import idle_share, peak_live

    durations = parse_cost(COSTS) | parse_cost(cost)
    picture = picture_at(out) if out is not None else None

    def duration(action: "Action", rank: int) -> float:
        return durations[action.op]

    num_chunks = chunks or (2 if name == "interleaved" else 1)
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
