"""`megatron-lite schedule`: a pipeline schedule to look at, before it costs a machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lite.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lite.pipeline.actions import Action

COSTS = "F=1,B=2,I=1,W=1"
MAX_PASSES = 200_000  # seconds of work, and more than anyone can look at


def schedule(
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="gpipe, 1f1b, interleaved, zb-h1 or forward-only.")
    ],
    pp: Annotated[int, typer.Option("--pp", min=1, metavar="N", help="Pipeline ranks.")],
    microbatches: Annotated[
        int, typer.Option("--microbatches", min=1, metavar="N", help="Micro-batches of one optimizer step.")
    ],
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks",
            min=1,
            metavar="N",
            help="Model chunks on each rank, a run's parallel.virtual_pipeline; 2 for interleaved, else 1, unless "
            "given.",
        ),
    ] = None,
    cost: Annotated[
        str,
        typer.Option(
            "--cost",
            metavar="OP=COST,...",
            help="How long a forward, a backward, its input half and its weight half take.",
        ),
    ] = COSTS,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write a picture, a .png or .svg file.")
    ] = None,
) -> None:
    """Draw a pipeline schedule and print its bubble, its length and how many activations each rank holds."""
    from megatron_lite.cli.picture import draw, save_picture
    from megatron_lite.pipeline.schedules import build_schedule
    from megatron_lite.pipeline.simulate import idle_share, peak_live, timeline

    durations = parse_cost(COSTS) | parse_cost(cost)

    def duration(action: "Action", rank: int) -> float:
        return durations[action.op]

    num_chunks = chunks or (2 if name == "interleaved" else 1)
    if pp * microbatches * num_chunks > MAX_PASSES:
        raise ConfigError(
            f"--pp {pp} --microbatches {microbatches} with {num_chunks} chunks: {pp * microbatches * num_chunks:,} "
            f"forwards are too many to draw; {MAX_PASSES:,} can be. Fewer micro-batches show the same pattern"
        )
    order = build_schedule(name, pp, microbatches, num_chunks)
    spans = timeline(order, duration)
    length = max(span.end for span in spans)
    if not 0 < length < float("inf"):
        raise ConfigError(
            f"--cost {cost} makes {name} {length:g} long; its durations must add up to a finite number above 0"
        )
    idle = idle_share(spans, num_ranks=pp)
    if out is not None:
        of_chunks = f", {num_chunks} chunks" if num_chunks > 1 else ""
        title = f"{name}: {pp} ranks{of_chunks}, {microbatches} micro-batches; bubble {idle:.3f}"
        save_picture(out, spans, num_ranks=pp, title=title)

    used = sorted({action.op for rank in order for action in rank}, key="FBIW".index)
    held = "micro-batches" if num_chunks == 1 else "micro-batch chunks"
    typer.echo(draw(order, duration))
    typer.echo(f"\nbubble {idle:.3f}")
    typer.echo(f"length {length:g} at {' '.join(f'{op}={durations[op]:g}' for op in used)}")
    typer.echo(f"peak activations {' '.join(map(str, peak_live(order)))} ({held}, from rank 0 on)")
    if out is not None:
        typer.echo(f"picture in {out}")


def parse_cost(text: str) -> dict[str, float]:
    """Durations by op, from F=1,B=2,I=1,W=1 or some of these."""
    durations = {}
    for part in text.split(","):
        op, _, number = part.partition("=")
        try:
            duration = float(number)
        except ValueError:
            duration = -1.0
        if op not in ("F", "B", "I", "W") or op in durations or not duration >= 0:
            raise ConfigError(
                f"--cost {text}: {part!r} is no duration; give F, B, I and W, or some of them, each once a number "
                f"of 0 or more, as in {COSTS}"
            )
        durations[op] = duration
    return durations
