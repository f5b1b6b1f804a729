"""`megatron-lite convert`: a checkpoint in another format or another layout."""

from pathlib import Path
from typing import Annotated

import typer

SOURCES = "megatron-lite, huggingface, megatron, torch_dist or codegeex"
TARGETS = "megatron-lite, huggingface, megatron, torch_dist, codegeex, gguf or onnx"


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder or file of a checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="New or empty folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.FIELD=VALUE", help="Config fields that SRC lacks: model.num_heads=12"),
    ] = None,
    source_format: Annotated[
        str, typer.Option("--from", metavar="FORMAT", help=f"{SOURCES}; default: detected from SRC.")
    ] = "",
    target_format: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"{TARGETS}.")] = "megatron-lite",
    tensor: Annotated[int, typer.Option("--tensor", min=1, metavar="T", help="Tensor-parallel size of DST.")] = 1,
    pipeline: Annotated[int, typer.Option("--pipeline", min=1, metavar="P", help="Pipeline stages of DST.")] = 1,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="TYPE", help="fp32, bf16 or fp16; default: dtype of SRC.")
    ] = "",
    ignored: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore-field", metavar="NAME", help="Field of SRC's config.json that does not change its output."
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out the optimizer state; only between megatron-lite formats.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare all weights and the logits of both models; write DST only if they agree. Optimizer state is "
            "not compared. For huggingface the logits come from transformers, for onnx from onnxruntime, which "
            "compares logits alone.",
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
        ignored=ignored or [],
    )
    driver.convert(request, typer.echo)
