"""`megatron-lite roofline`: the kernels of a training step, and their predicted times on a device that is not there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lite.cli.options import ConfigFile, Overrides

if TYPE_CHECKING:
    from megatron_lite.plan.devices import Device
    from megatron_lite.plan.roofline import Prediction, Trace


def roofline(
    config: ConfigFile = None,
    overrides: Overrides = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="NAME", help="h100, h200, b200, mi300x, a100, l40s, 4090, v100 or cpu."),
    ] = "h100",
    attention: Annotated[
        str,
        typer.Option(
            "--attention", metavar="KERNEL", help="The attention kernel's rate: cudnn, flash2, or stored scores."
        ),
    ] = "cudnn",
    rank: Annotated[
        int, typer.Option("--rank", min=0, metavar="N", help="The rank of one model's tp x cp x pp ranks to trace.")
    ] = 0,
    lines: Annotated[int, typer.Option("--lines", min=1, metavar="N", help="Rows of the table of source lines.")] = 25,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also draw the roofline into a .png or .svg picture.")
    ] = None,
) -> None:
    """Trace one micro-batch and the optimizer without memory or a GPU, and predict their times and MFU.

    Each kernel takes as long as its FLOPs, its memory traffic or its launch needs. Communication and the host's own
    time are left out, so a measured step is slower.
    """
    from megatron_lite.cli.inspect import aligned
    from megatron_lite.cli.picture import picture_at
    from megatron_lite.config.load import load_config
    from megatron_lite.config.validate import validate
    from megatron_lite.errors import ConfigError
    from megatron_lite.parallel.dtypes import PRECISIONS
    from megatron_lite.plan.devices import device_of
    from megatron_lite.plan.roofline import predict, size_of_model, trace_step

    picture = picture_at(out) if out is not None else None
    loaded = load_config(config, overrides or [])
    size = size_of_model(loaded)
    validate(loaded, size)
    if rank >= size:
        raise ConfigError(f"--rank {rank}: one model of this layout has ranks 0 to {size - 1}; choose one of them")
    if device == "cpu" and loaded.model.fusion == "auto":  # as a run chooses there
        loaded = loaded.model_copy(update={"model": loaded.model.model_copy(update={"fusion": "off"})})
    profile = device_of(device, attention=attention, dtype=PRECISIONS[loaded.train.precision])
    trace = trace_step(loaded, rank=rank)
    prediction = predict(loaded, trace, profile)
    typer.echo("\n".join([*summary(trace, prediction, profile), "", *aligned(table(trace, profile, lines))]))
    if picture is not None:
        from megatron_lite.cli.roofline_picture import save_roofline

        title = f"{config or 'defaults'} on {profile.name}: one micro-batch {prediction.micro_batch * 1e3:.3g} ms"
        save_roofline(picture, [*trace.forward, *trace.backward], profile, title=title)
        typer.echo(f"picture in {out}")


def summary(trace: "Trace", prediction: "Prediction", device: "Device") -> list[str]:
    """Lines with the times of a micro-batch and of the optimizer, and the MFU."""
    times = ", ".join(f"{kind} {seconds * 1e3:.3g} ms" for kind, seconds in prediction.by_kind.items())
    return [
        f"device       {device.name}: {device.product / 1e12:.3g} TFLOP/s in products, {device.memory / 1e12:.3g} TB/s",
        f"this rank    {trace.parameters:,} parameters, {prediction.kernels:,} kernels in a micro-batch",
        f"activations  {trace.kept_bytes / 1e9:.3g} GB kept by the last chunk's forward of a micro-batch",
        f"micro-batch  {prediction.micro_batch * 1e3:.4g} ms predicted: {times}",
        f"optimizer    {prediction.optimizer * 1e3:.4g} ms predicted, once per step",
        f"MFU          {prediction.mfu:.3f} predicted, of {device.peak / 1e12:.4g} TFLOP/s, without the optimizer",
    ]


def table(trace: "Trace", device: "Device", count: int) -> list[tuple[str, ...]]:
    """The slowest operations of a micro-batch, by source line."""
    from megatron_lite.plan.roofline import by_line

    rows: list[tuple[str, ...]] = [("ms", "direction", "operation", "kernels", "GB", "TFLOP", "bound by", "line")]
    found = [
        (row, direction)
        for direction, kernels in (("forward", trace.forward), ("backward", trace.backward))
        for row in by_line(kernels, device)
    ]
    for row, direction in sorted(found, key=lambda entry: -entry[0].seconds)[:count]:
        figures = f"{row.launches:,}", f"{row.bytes / 1e9:.3f}", f"{row.flops / 1e12:.3f}"
        rows.append((f"{row.seconds * 1e3:.3f}", direction, row.op, *figures, row.bound, row.line))
    return rows
