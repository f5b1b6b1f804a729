"""`megatron-lite convert`: a checkpoint in another format or another layout."""

from pathlib import Path
from typing import Annotated

import typer

FORMATS = "megatron-lite, huggingface, megatron or codegeex"


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint: its folder, or its file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A folder that is not there yet, or an empty one.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.FIELD=VALUE", help="What SRC does not say, such as model.num_heads=12"),
    ] = None,
    source_format: Annotated[
        str, typer.Option("--from", metavar="FORMAT", help=f"{FORMATS}; recognised when not given.")
    ] = "",
    target_format: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"{FORMATS}.")] = "megatron-lite",
    tensor: Annotated[int, typer.Option("--tensor", min=1, metavar="T", help="Tensor-parallel ranks of DST.")] = 1,
    pipeline: Annotated[int, typer.Option("--pipeline", min=1, metavar="P", help="Pipeline stages of DST.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="fp32, bf16 or fp16; else as in SRC.")] = "",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="From megatron-lite to megatron-lite: no optimizer state.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare logits (of transformers' model for huggingface, of ours for others) and every weight, but no "
            "optimizer state; DST is only there if they agree.",
        ),
    ] = False,
) -> None:
    """Convert a checkpoint to another format or layout, tensor by tensor, on the CPU."""
    from megatron_lite.convert import driver

    request = driver.Request(
        source=source,
        target=target,
        source_format=source_format,
        target_format=target_format,
        tensor=tensor,
        pipeline=pipeline,
        dtype=dtype,
        weights_only=weights_only,
        verify=verify,
        overrides=overrides or [],
    )
    driver.convert(request, typer.echo)
