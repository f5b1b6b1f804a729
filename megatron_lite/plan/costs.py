"""The cost of any pipeline stage under any layout, from traces of four small stages.

A stage costs what its layers, the embedding and the head cost, and every layer of a model costs the same. So four
stages give them all: the first with one layer, one in the middle with one layer and one with two, the last with one.
Kernels and tensors grow linearly with the micro-batch, so traces with two and four sequences give every size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_lite.config.schema import Config
from megatron_lite.plan.communication import Operation, Wait
from megatron_lite.plan.kernels import Kernel
from megatron_lite.plan.links import Machines
from megatron_lite.plan.stage import Chunk, Event, trace_passes
from megatron_lite.plan.timing import play

BASES = (2, 4)  # sequences of a micro-batch; with one, some kernels are missing, such as sums over the batch


class Cost(NamedTuple):
    """What a stage costs for one micro-batch. Costs of parts add up, but for the peaks, of which the largest counts."""

    forward: float = 0.0  # seconds
    backward: float = 0.0  # with both halves of a split one
    weights: float = 0.0  # of the backward, what W takes
    waits: float = 0.0  # of forward and backward, for communication within the stage
    kept: float = 0.0  # bytes
    deferred: float = 0.0  # bytes between I and W
    parameters: float = 0.0
    forward_peak: float = 0.0  # bytes above those at the start of the pass
    backward_peak: float = 0.0

    def plus(self, other: "Cost", times: float = 1.0) -> "Cost":
        peaks = max(self.forward_peak, other.forward_peak), max(self.backward_peak, other.backward_peak)
        return Cost._make([*(a + times * b for a, b in zip(self[:7], other[:7], strict=True)), *peaks])

    def shortened(self, times: int) -> "Cost":
        """The cost for sequences that are so many times shorter."""
        return Cost._make([each / times for each in self])._replace(parameters=self.parameters)


class Parts(NamedTuple):
    """The costs of a layer, and of what the first and the last stage have beside their layers."""

    layer: Cost
    first: Cost
    last: Cost
    tied: float  # parameters that first and last share, if they are one stage

    def stage(self, layers: int, *, is_first: bool, is_last: bool) -> Cost:
        """The cost of a stage. Its forward's peak is at its end, when it keeps everything."""
        cost = Cost().plus(self.layer, layers)
        for part, present in ((self.first, is_first), (self.last, is_last)):
            cost = cost.plus(part) if present else cost
        shared = self.tied if is_first and is_last else 0.0
        return cost._replace(forward_peak=max(cost.forward_peak, cost.kept), parameters=cost.parameters - shared)


@dataclass(frozen=True)
class Work:
    """What decides the kernels of a layer: a key of the cache."""

    tensor: int
    context: int
    context_mode: str
    sequence: bool
    recompute: str
    splits: bool  # backwards in two halves
    shards: bool = False  # FSDP, which copies what it gathers


@dataclass
class CostTable:
    """The costs of a model's stages on some machines, traced when they are first asked for."""

    config: Config
    machines: Machines
    num_traces: int = 0
    _chunks: dict[tuple[Work, int], list[tuple[Chunk, int]]] = field(default_factory=dict)
    _parts: dict[tuple[Work, int], Parts] = field(default_factory=dict)

    def parts(self, work: Work, micro_batch: int) -> Parts:
        """The costs of a layer and of the model's ends, for micro-batches of this many sequences."""
        if (work, micro_batch) not in self._parts:
            low, high = (self._traced(work, size) for size in BASES)
            if all(map(_are_alike, low, high)):
                costs = [self._cost(a, b, micro_batch) for a, b in zip(low, high, strict=True)]
            else:  # the number of slices of the logits depends on the micro-batch
                costs = [self._cost(each, each, BASES[0]) for each in self._traced(work, micro_batch)]
            first, middle, two_layers, last = costs
            layer = two_layers.plus(middle, -1.0)
            model = self.config.model
            tied = model.padded_vocab * model.hidden_size / work.tensor if model.tie_embeddings else 0.0
            self._parts[work, micro_batch] = Parts(layer, _beside(first, layer), _beside(last, layer), tied)
        return self._parts[work, micro_batch]

    @cached_property
    def fusion(self) -> str:
        return "off" if self.machines.device.name == "cpu" else "on"

    def _traced(self, work: Work, micro_batch: int) -> list[tuple[Chunk, int]]:
        """The four stages, in order of the model."""
        if (work, micro_batch) not in self._chunks:
            sizes = BASES if micro_batch in BASES else (micro_batch,)
            config, size = self._small(work), work.tensor * work.context * (8 if work.shards else 1)
            pp = config.parallel.pipeline
            ranks = [trace_passes(config, rank * size, pp * size, sizes, fusion=self.fusion) for rank in range(pp)]
            for at, each in enumerate(sizes):
                self._chunks[work, each] = [ranks[stage % pp][at][stage // pp] for stage in range(4)]
            self.num_traces += pp
        return self._chunks[work, micro_batch]

    def _small(self, work: Work) -> Config:
        """The model with five layers on four stages; a split backward allows one stage on a rank, others two."""
        parallel = {
            "tensor": work.tensor,
            "context": work.context,
            "context_mode": work.context_mode,
            "sequence": work.sequence,
            "pipeline": 4 if work.splits else 2,
            "virtual_pipeline": 1 if work.splits else 2,
            "schedule": "zb-h1" if work.splits else "interleaved",
            "pipeline_layout": (1, 1, 2, 1),
            "ddp": "fsdp" if work.shards else "local",
            "fsdp_shard": 0,
        }
        config = self.config
        return config.model_copy(
            update={
                "model": config.model.model_copy(update={"num_layers": 5}),
                "parallel": config.parallel.model_copy(update=parallel),
                "train": config.train.model_copy(update={"recompute": work.recompute}),
                "optim": config.optim.model_copy(update={"distributed": False, "distributed_shard": 0}),
            }
        )

    def _cost(self, low: tuple[Chunk, int], high: tuple[Chunk, int], micro_batch: int) -> Cost:
        """The cost of a stage, from its traces at both base sizes."""
        (a, parameters), (b, _) = low, high
        seconds, waits, peaks = {}, 0.0, {}
        for op, of_low in a.passes.items():
            of_high = b.passes[op]
            events = at_batch(of_low.events, of_high.events, micro_batch)
            within = [event for event in events if not isinstance(event, Operation) or event.group]  # not FSDP's
            played = play(within, self.machines)
            seconds[op], waits = played.seconds, waits + sum(played.exposed.values())
            peaks[op] = _line(of_low.peak_bytes, of_high.peak_bytes, micro_batch)
        others = [op for op in seconds if op != "F"]
        return Cost(
            forward=seconds["F"],
            backward=sum(seconds[op] for op in others),
            weights=seconds.get("W", 0.0),
            waits=waits,
            kept=_line(a.kept_bytes, b.kept_bytes, micro_batch),
            deferred=_line(a.deferred_bytes, b.deferred_bytes, micro_batch),
            parameters=parameters,
            forward_peak=peaks["F"],
            backward_peak=max(peaks[op] for op in others),
        )


def _are_alike(low: tuple[Chunk, int], high: tuple[Chunk, int]) -> bool:
    """Whether the passes of two sizes have the same events."""

    def names(events: list[Event]) -> list[str]:
        return [event.op if isinstance(event, Kernel) else type(event).__name__ for event in events]

    return all(names(low[0].passes[op].events) == names(high[0].passes[op].events) for op in low[0].passes)


def _beside(stage: Cost, layer: Cost) -> Cost:
    """What a stage with one layer has beside the layer; its peaks are those of the stage."""
    rest = stage.plus(layer, -1.0)
    return rest._replace(forward_peak=stage.forward_peak, backward_peak=stage.backward_peak)


def _line(low: float, high: float, micro_batch: int) -> float:
    """The value at a micro-batch size, on the line through those at the base sizes."""
    return low + (micro_batch - BASES[0]) * (high - low) / (BASES[1] - BASES[0])


def at_batch(low: list[Event], high: list[Event], micro_batch: int) -> Iterable[Event]:
    """The events at a micro-batch size, from those at the base sizes."""
    for a, b in zip(low, high, strict=True):
        if isinstance(a, Wait):
            yield a
            continue
        if isinstance(a, Kernel):
            assert isinstance(b, Kernel) and a.op == b.op, (a, b)
            shape = tuple(int(_line(x, y, micro_batch)) for x, y in zip(a.shape, b.shape, strict=True))
            moved, flops = (int(_line(x, y, micro_batch)) for x, y in ((a.bytes, b.bytes), (a.flops, b.flops)))
            yield a._replace(bytes=moved, flops=flops, shape=shape)
        else:
            assert isinstance(b, Operation) and a.name == b.name, (a, b)
            tensors = tuple(
                (tuple(int(_line(x, y, micro_batch)) for x, y in zip(of_a, of_b, strict=True)), dtype)
                for (of_a, dtype), (of_b, _) in zip(a.tensors, b.tensors, strict=True)
            )
            yield a._replace(tensors=tensors)
