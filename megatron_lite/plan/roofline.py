"""The roofline of a training step: each kernel takes as long as its products or its memory traffic need.

The kernels are those of the real step on the meta device (`kernels.py`): one micro-batch through model, loss and the
hooks of the data-parallel engine, then the optimizer. A kernel that computes f FLOPs on b bytes takes
max(f / rate of products, b / rate of memory, the least time of a kernel). Communication and the host's time are left
out: a GPU waits for neither where both are hidden.
Source: Williams et al., Roofline, CACM 52(4), 2009.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.schema import Config
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.plan.devices import Device
from megatron_lite.plan.kernels import Kernel
from megatron_lite.plan.stage import kernels, trace_rank


class Trace(NamedTuple):
    """The kernels of a step on one rank, what a forward keeps, and the model."""

    forward: list[Kernel]  # of one micro-batch, after the first
    backward: list[Kernel]
    optimizer: list[Kernel]  # and everything else that a step does after its last backward
    kept_bytes: int  # by the forwards of one micro-batch, for their backwards
    parameters: int  # on this rank


def trace_step(config: Config, *, rank: int = 0, world_size: int | None = None) -> Trace:
    """The kernels of one rank of a layout, on a GPU. `world_size`: that of one model, if None."""
    found = trace_rank(config, rank, world_size or size_of_model(config), lines=True)
    passes = [(op, each) for chunk in found.chunks for op, each in chunk.passes.items()]
    return Trace(
        forward=[kernel for op, each in passes if op == "F" for kernel in kernels(each.events)],
        backward=[kernel for op, each in passes if op != "F" for kernel in kernels(each.events)],
        optimizer=kernels(found.end.events),
        kept_bytes=sum(chunk.kept_bytes for chunk in found.chunks),
        parameters=found.parameters,
    )


def size_of_model(config: Config) -> int:
    """The number of ranks that hold one model."""
    return config.parallel.tensor * config.parallel.context * config.parallel.pipeline


def seconds(kernel: Kernel, device: Device) -> float:
    """The time of a kernel on a device."""
    is_backward = kernel.kind == "attention backward"
    if kernel.kind.startswith("attention") and any(device.score_bytes):
        return _stored_attention(kernel, device, is_backward=is_backward)
    rate = {
        "product": device.product,
        "attention forward": device.attention_forward,
        "attention backward": device.attention_backward,
    }.get(kernel.kind, device.product)
    return max(kernel.flops / rate, kernel.bytes / device.memory, device.kernel_seconds * kernel.launches)


def _stored_attention(kernel: Kernel, device: Device, *, is_backward: bool) -> float:
    """Two products over the full square in forward and four in backward, and the traffic of the scores between them."""
    count, queries, keys, head = kernel.shape
    scores = count * queries * keys
    flops = (8 if is_backward else 4) * scores * head
    return flops / device.product + device.score_bytes[is_backward] * scores / device.memory


@dataclass(frozen=True)
class Prediction:
    """Times of one rank on a device, in seconds, and its utilisation."""

    micro_batch: float
    optimizer: float
    by_kind: dict[str, float]  # of a micro-batch
    kernels: int  # of a micro-batch
    flops: float  # of the model on this rank, for one micro-batch
    mfu: float  # of micro-batches alone, against the device's peak


def predict(config: Config, trace: Trace, device: Device) -> Prediction:
    """The prediction for the rank that was traced; the model's FLOPs are divided evenly over tp, cp and pp."""
    by_kind: dict[str, float] = defaultdict(float)
    kernels = [*trace.forward, *trace.backward]
    for kernel in kernels:
        by_kind[kernel.kind] += seconds(kernel, device)
    length = config.data.seq_length
    tokens = length * config.train.micro_batch_size
    flops = flops_per_token(config.model, length, config.data.decoder_length) * tokens / size_of_model(config)
    total = sum(by_kind.values())
    return Prediction(
        micro_batch=total,
        optimizer=sum(seconds(kernel, device) for kernel in trace.optimizer),
        by_kind=dict(by_kind),
        kernels=sum(kernel.launches for kernel in kernels),
        flops=flops,
        mfu=flops / total / device.peak,
    )


class Layer(NamedTuple):
    """What one more layer adds to a micro-batch."""

    passes: float  # reads or writes of one [s, b, h] by kernels that memory bounds
    kernels: int
    kept: float  # bytes for each element of [s, b, h]
    rows: dict[tuple[str, bool, str, str], tuple[int, float]]  # by kind, direction, op and line: kernels and passes


def per_layer(config: Config) -> Layer:
    """The difference of the traces with three layers and with two."""
    two, three = (_tally(config, layers) for layers in (2, 3))
    unit = config.data.seq_length * config.train.micro_batch_size * config.model.hidden_size * two[1]
    rows = {}
    for key, (count, moved) in three[0].items():
        before = two[0].get(key, (0, 0))
        if (count, moved) != before:
            rows[key] = count - before[0], (moved - before[1]) / unit
    passes = sum(moved for (kind, *_), (_, moved) in rows.items() if kind == "memory")
    elements = config.data.seq_length * config.train.micro_batch_size * config.model.hidden_size
    return Layer(passes, sum(count for count, _ in rows.values()), (three[2] - two[2]) / elements, rows)


def _tally(config: Config, layers: int) -> tuple[dict[tuple[str, bool, str, str], tuple[int, int]], int, int]:
    """Kernels and bytes by kind, direction, op and line; the size of an element; and the bytes kept for backward."""
    fields = config.model.model_dump() | {"num_layers": layers, "preset": ""}
    smaller = config.model_copy(update={"model": type(config.model).model_validate(fields)})
    trace = trace_step(smaller)
    tally: dict[tuple[str, bool, str, str], tuple[int, int]] = {}
    for kernel in (*trace.forward, *trace.backward):
        key = (kernel.kind, kernel.is_backward, kernel.op, kernel.line)
        count, moved = tally.get(key, (0, 0))
        tally[key] = count + kernel.launches, moved + kernel.bytes
    return tally, PRECISIONS[config.train.precision].itemsize, trace.kept_bytes


class Row(NamedTuple):
    """The kernels of one operation at one source line."""

    seconds: float
    op: str
    line: str
    kind: str
    launches: int
    bytes: int
    flops: int
    bound: str  # what takes the longest: products, memory or launches


def by_line(kernels: Iterable[Kernel], device: Device) -> list[Row]:
    """The operations by source line, the slowest first."""
    groups: dict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.op, kernel.line, kernel.kind].append(kernel)
    rows = []
    for (op, line, kind), group in groups.items():
        total, launches = sum(seconds(kernel, device) for kernel in group), sum(kernel.launches for kernel in group)
        moved, flops = sum(kernel.bytes for kernel in group), sum(kernel.flops for kernel in group)
        shares = {"memory": moved / device.memory, "launches": launches * device.kernel_seconds}
        bound = max(shares, key=lambda name: shares[name])
        if flops and shares[bound] <= 0.99 * total:
            bound = "products"
        rows.append(Row(total, op, line, kind, launches, moved, flops, bound))
    return sorted(rows, key=lambda row: -row.seconds)
