"""The plan of a job: memory, communication and time of a step, counted from the real code of a few of its ranks.

Ranks of one pipeline stage do the same work, and so do stages with the same layers, so a job of thousands of ranks
needs the traces of two or three. Counts are exact. Times are predictions: each pass as `timing.py` plays it, passes in
the order of the schedule, and after a rank's last backward what is left of its sums, the optimizer and the gathering of
weights, as far as the next forward waits for it.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from inspect import getsourcelines

from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.schema import Config
from megatron_lite.config.stages import stage_layers
from megatron_lite.config.validate import validate
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.p2p import Pipe
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.simulate import Span, timeline
from megatron_lite.plan.bubbles import idle_share
from megatron_lite.plan.communication import Operation
from megatron_lite.plan.devices import Device
from megatron_lite.plan.fake_world import grid_of
from megatron_lite.plan.links import Machines, sent_bytes, tensor_bytes
from megatron_lite.plan.memory import peak_bytes
from megatron_lite.plan.stage import Event, RankTrace, kernels, trace_rank, traceable
from megatron_lite.plan.timing import Played, play


@dataclass(frozen=True)
class Traffic:
    """The operations of one line of the code in a step on one rank."""

    group: str
    operation: str
    line: str
    ranks: int  # of the group
    count: int
    tensor_bytes: int  # of all of them, as the operations get them
    sent_bytes: float  # by this rank, in rings


@dataclass(frozen=True)
class Plan:
    """The plan of a job. Everything about a rank is by its place in the pipeline, 0 to pp - 1."""

    config: Config
    grid: Grid
    machines: Machines
    traces: list[RankTrace]

    @property
    def device(self) -> Device:
        return self.machines.device

    @property
    def num_microbatches(self) -> int:
        train = self.config.train
        return train.global_batch(self.grid.dp) // (train.micro_batch_size * self.grid.dp)

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.config.train.global_batch(self.grid.dp) * self.config.data.seq_length

    @cached_property
    def schedule(self) -> Schedule:
        parallel = self.config.parallel
        return build_schedule(parallel.schedule, self.grid.pp, self.num_microbatches, parallel.virtual_pipeline)

    @cached_property
    def parameters(self) -> int:
        """The parameters of the model with padding, tied ones counted once."""
        return sum(trace.model_parameters for trace in self.traces)

    @cached_property
    def memory(self) -> list[dict[str, int]]:
        """The bytes of each pipeline rank at the highest point of a step, by kind."""
        of_order = [peak_bytes(trace, order) for trace, order in zip(self.traces, self.schedule, strict=True)]
        return [{**found, "reserved": int(self.device.reserved_bytes)} for found in of_order]

    @cached_property
    def fullest(self) -> int:
        """The pipeline rank that needs the most memory."""
        totals = [sum(found.values()) for found in self.memory]
        return totals.index(max(totals))

    @property
    def peak_memory(self) -> int:
        return sum(self.memory[self.fullest].values())

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of a checkpoint: weights, and masters and moments, which are in fp32 or fp64."""
        precision = self.config.train.precision
        wide = 8 if precision == "fp64" else 4
        return self.parameters * ({"bf16": 2 + wide, "fp16": 2 + wide}.get(precision, wide) + 2 * wide)

    @property
    def model_flops(self) -> float:
        """The FLOPs of a step as utilisation counts them: without recomputation."""
        config = self.config
        return flops_per_token(config.model, config.data.seq_length, config.data.decoder_length) * self.tokens

    @cached_property
    def hardware_flops(self) -> float:
        """The FLOPs of the kernels of a step on all ranks."""
        passes = [each for trace in self.traces for chunk in trace.chunks for each in chunk.passes.values()]
        of_ranks = sum(kernel.flops for each in passes for kernel in kernels(each.events))
        return of_ranks * self.num_microbatches * self.grid.tp * self.grid.cp * self.grid.dp

    @cached_property
    def traffic(self) -> list[list[Traffic]]:
        """The operations of each pipeline rank in a step, by group, operation and line."""
        ranked = enumerate(zip(self.traces, self.schedule, strict=True))
        return [traffic_of(trace, order, rank=rank, pp=self.grid.pp) for rank, (trace, order) in ranked]

    @cached_property
    def durations(self) -> list[dict[tuple[str, int], Played]]:
        """The times of each pipeline rank's passes, by op and chunk."""
        found: dict[int, dict[tuple[str, int], Played]] = {}
        for trace in self.traces:
            if id(trace.chunks) not in found:
                found[id(trace.chunks)] = {
                    (op, number): self.played(each.events)
                    for number, chunk in enumerate(trace.chunks)
                    for op, each in chunk.passes.items()
                }
        return [found[id(trace.chunks)] for trace in self.traces]

    def played(self, events: list[Event]) -> Played:
        """The time of events; FSDP waits for its gathers in torch, so there they must end with the pass."""
        played = play(events, self.machines)
        if traceable(self.config).parallel.ddp == "fsdp" and played.in_flight > played.seconds:
            played.exposed["dp_cp"] += played.in_flight - played.seconds
            played.seconds = played.in_flight
        return played

    @cached_property
    def message_seconds(self) -> float:
        """The time of a message between neighbouring stages; the slowest pair counts."""
        if self.grid.pp == 1:
            return 0.0
        size = max(trace.message_bytes for trace in self.traces)
        stride = self.grid.tp * self.grid.cp * self.grid.dp
        pairs = [(stage * stride, (stage + 1) * stride) for stage in range(self.grid.pp - 1)]
        return max(self.machines.message_seconds(size, pair) for pair in pairs)

    @cached_property
    def spans(self) -> list[Span]:
        """The passes of a pipeline in time, from the first forward on."""
        durations = self.durations

        def cost(action: Action, rank: int) -> float:
            return durations[rank][action.op, action.chunk].seconds

        return timeline(self.schedule, cost, self.message_seconds)

    @property
    def bubble(self) -> float:
        """The idle share of the pipeline, 0..1."""
        return idle_share(self.spans, num_ranks=self.grid.pp)

    @cached_property
    def tails(self) -> list[float]:
        """The seconds between each pipeline rank's last backward and its next forward, at equal speed of both.

        The sums of a chunk begin in its last backward, and go on during those of the chunks before it.
        """
        found: dict[int, float] = {}
        for trace, durations, order in zip(self.traces, self.durations, self.schedule, strict=True):
            if id(trace.chunks) in found:
                continue
            op = "W" if "W" in trace.chunks[0].passes else "B"
            lasts = {action.chunk: place for place, action in enumerate(order) if action.op == op}
            row, alone = [], durations["F", 0].seconds
            for place, action in enumerate(order[min(lasts.values()) :], min(lasts.values())):
                chunk = trace.chunks[action.chunk]
                passes = chunk.last if place == lasts[action.chunk] else chunk.passes
                row += passes[action.op].events
                alone += durations[action.op, action.chunk].seconds
            played = self.played([*row, *trace.end.events, *trace.next_forward.events])
            found[id(trace.chunks)] = max(0.0, played.seconds - alone)
        return [found[id(trace.chunks)] for trace in self.traces]

    @cached_property
    def step_seconds(self) -> float:
        """Seconds until the last pipeline rank ends, and at least those of the sums of delayed gradients."""
        ends = [0.0] * self.grid.pp
        for span in self.spans:
            ends[span.rank] = max(ends[span.rank], span.end)
        longest = max(end + tail for end, tail in zip(ends, self.tails, strict=True))
        if self.config.sync.mode != "delayed":
            return longest
        return max(longest, *map(self._sum_seconds, self.traces))  # a sum in a step, however long it may take

    def _sum_seconds(self, trace: RankTrace) -> float:
        """The time of the sums over data-parallel ranks in a step, one after another."""
        lasts = [each.events for chunk in trace.chunks for each in chunk.last.values()]
        started = [event for events in (*lasts, trace.end.events) for event in events if isinstance(event, Operation)]
        return sum(self.machines.seconds(each) for each in started if each.group in ("", "dp", "dp_cp"))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        return self.model_flops / (self.step_seconds * self.grid.world_size * self.device.peak)

    @property
    def hfu(self) -> float:
        """The utilisation with recomputed FLOPs."""
        return self.hardware_flops / (self.step_seconds * self.grid.world_size * self.device.peak)


def make_plan(config: Config, world_size: int, machines: Machines, *, lines: bool = False) -> Plan:
    """The plan of a job on so many ranks. Raises ConfigError for a config that cannot run on them.

    `lines`: kernels of backward have the lines of their forwards; tracing takes longer.
    """
    validate(config, world_size)
    grid = grid_of(config, world_size)
    fusion = "off" if machines.device.name == "cpu" else "on"
    return Plan(config, grid, machines, traces_of(config, grid, fusion=fusion, lines=lines))


def traces_of(config: Config, grid: Grid, *, fusion: str, lines: bool) -> list[RankTrace]:
    """The trace of the first rank of each pipeline rank; those with the same layers are traced once."""
    alike: dict[object, RankTrace] = {}
    found = []
    for stage in range(grid.pp):
        key = _work_of(config, grid.pp, stage)
        rank = grid.rank(pp=stage)
        if key not in alike:
            alike[key] = trace_rank(config, rank, grid.world_size, fusion=fusion, lines=lines)
        found.append(alike[key]._replace(rank=rank))
    return found


def _work_of(config: Config, pp: int, rank: int) -> object:
    """What makes the work of pipeline ranks differ: the kinds of their layers, and the ends of the model."""
    model, layers = config.model, stage_layers(config.model, config.parallel)
    last = len(layers) - 1

    def kind(layer: int) -> tuple[bool, int]:
        return layer < model.encoder_layers, model.window_of(layer)

    stages = range(rank, len(layers), pp)
    return tuple((stage == 0, stage == last, tuple(map(kind, layers[stage]))) for stage in stages)


def traffic_of(trace: RankTrace, order: list[Action], *, rank: int, pp: int) -> list[Traffic]:
    """The operations of pipeline rank `rank` of `pp` in a step, those that send the most first."""
    counts: dict[tuple[str, str, str, int], list[float]] = defaultdict(lambda: [0, 0, 0.0])

    def add(events: list[Event], times: int = 1) -> None:
        for event in events:
            if isinstance(event, Operation):
                ranks = len(event.communicator.ranks)
                entry = counts[event.group or "dp_cp", event.name, event.line, ranks]  # FSDP's have no name
                entry[0] += times
                entry[1] += times * tensor_bytes(event)
                entry[2] += times * sent_bytes(event)

    of_pass = Counter((action.op, action.chunk) for action in order)
    for (op, number), count in of_pass.items():
        chunk = trace.chunks[number]
        add(chunk.passes[op].events, count - 1)
        add(chunk.last[op].events)
    add(trace.end.events)
    rows = [
        Traffic(*key, count=int(count), tensor_bytes=int(size), sent_bytes=sent)
        for key, (count, size, sent) in counts.items()
    ]
    messages = _messages(trace, order, rank=rank, pp=pp)
    return sorted([*rows, *messages], key=lambda row: (-row.sent_bytes, -row.tensor_bytes))


def _messages(trace: RankTrace, order: list[Action], *, rank: int, pp: int) -> list[Traffic]:
    """The hidden states and gradients between a pipeline rank and its neighbours."""
    last = pp * len(trace.chunks) - 1
    sent = received = 0
    for action in order:
        stage = action.stage(rank, pp)
        to_next, from_previous = action.op == "F" and stage < last, action.op == "F" and stage > 0
        to_previous, from_next = action.op in "BI" and stage > 0, action.op in "BI" and stage < last
        sent += to_next + to_previous
        received += from_previous + from_next
    rows = []
    for name, function, count in (("send", Pipe.send, sent), ("recv", Pipe._open, received)):
        if count:
            source, first = getsourcelines(function)
            number = next(number for number, line in enumerate(source, first) if f"dist.i{name}(" in line)
            line, size = f"pipeline/p2p.py:{number}", count * trace.message_bytes
            rows.append(Traffic("pp", name, line, 2, count, size, size if name == "send" else 0.0))
    return rows
