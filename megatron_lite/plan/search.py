"""The fastest layout of a job that fits into memory, by estimates of all legal ones.

A layout's time and memory follow from the costs of its stages (`costs.py`) and from the closed form of its schedule.
The best ones are then simulated. The estimates are those of `estimate.py`, but for the last micro-batch and the end of
a step, where here the bytes of gradients and weights count instead of each bucket.
Source of the closed forms: Narayanan et al., arXiv 2104.04473, sections 2 and 3; zb-h1: arXiv 2401.10241, section 2.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf

from megatron_lite.config.schema import Config
from megatron_lite.config.sizes import state_bytes
from megatron_lite.config.stages import layer_counts
from megatron_lite.config.validate import divisors, failures
from megatron_lite.errors import ConfigError
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.pipeline.actions import Action
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.simulate import timeline
from megatron_lite.plan.costs import Cost, CostTable, Parts, Work
from megatron_lite.plan.layouts import Layout
from megatron_lite.plan.links import Machines

IDEAL_BATCH = 8  # sequences; larger products are hardly faster
POWERS = tuple(1 << power for power in range(7))
SIMULATED = 2  # micro-batches for each stage
SHORTEST = 1024  # tokens of a context-parallel rank; shorter ones would compute less than they send


@dataclass(frozen=True)
class Estimate:
    """The time and memory of a layout; `seconds` is the sum of the parts below it."""

    layout: Layout
    memory: float  # bytes of the fullest rank
    kernels: float  # seconds
    waits: float  # for communication within stages: tp and cp, and FSDP's gathers
    bubble: float
    end: float  # what is left of the sums over dp, the optimizer, the gathers

    @property
    def seconds(self) -> float:
        return self.kernels + self.waits + self.bubble + self.end


@dataclass
class Search:
    """Estimates for a config on so many ranks."""

    config: Config
    world_size: int
    machines: Machines
    table: CostTable = field(init=False)
    num_layouts: int = 0  # that `find` has compared, by their estimate or by a bound
    _state: dict[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = CostTable(self.config, self.machines)

    @cached_property
    def global_batch(self) -> int:
        if not self.config.train.global_batch_size:
            raise ConfigError(
                "train.global_batch_size is 0, so it would change with the layout; give the sequences of a step"
            )
        return self.config.train.global_batch_size

    @cached_property
    def weight_bytes(self) -> int:
        return PRECISIONS[self.config.train.precision].itemsize

    @cached_property
    def gradient_bytes(self) -> int:
        return max(4, self.weight_bytes)

    def layouts(self) -> Iterator[Layout]:
        """All layouts that may be legal; `is_legal` decides."""
        config, machine = self.config, self.machines.ranks_per_machine
        tensors = [size for size in divisors(config.model.num_heads) if size <= machine]
        contexts = [size for size in POWERS if size == 1 or config.data.seq_length / size >= SHORTEST]
        recomputes = ["none", "activation", "full"]
        if config.model.attention == "math":
            recomputes.append("selective")
        models = [pair for pair in product(tensors, contexts) if self._can_split(*pair)]
        for (tensor, context), pipeline in product(models, divisors(self.world_size)):
            size = tensor * context * pipeline
            if self.world_size % size or pipeline > config.model.num_layers:
                continue
            dp = self.world_size // size
            if self.global_batch % dp:
                continue
            micro_batches = [each for each in POWERS if self.global_batch // dp % each == 0]
            for schedule, virtual in self._schedules(pipeline):
                names = self._stage_names(pipeline, virtual)
                engines = ["local"] if dp * context == 1 else ["local", "zero1"] + ["fsdp"] * (pipeline == 1)
                if schedule == "zb-h1":
                    engines = [name for name in engines if name != "fsdp"]
                for rest in product(names, micro_batches, recomputes, {False, tensor > 1}, engines):
                    yield Layout(tensor, context, pipeline, virtual, schedule, *rest)

    def _stage_names(self, pipeline: int, virtual: int) -> list[str]:
        """The names of `parallel.pipeline_layout` with different layers in some stage."""
        found: dict[tuple[int, ...], str] = {}
        for name in ("even", "balanced"):
            update = {"pipeline": pipeline, "virtual_pipeline": virtual, "pipeline_layout": name}
            counts = layer_counts(self.config.model, self.config.parallel.model_copy(update=update))
            found.setdefault(tuple(counts), name)
        return list(found.values())

    def _can_split(self, tensor: int, context: int) -> bool:
        """Whether the model itself can be split so, by the rules of `validate`."""
        alone = Layout(tensor, context, 1, 1, "1f1b", "even", 1, "none", False, "local").applied(self.config)
        train = alone.train.model_copy(update={"global_batch_size": 0, "ramp_up": None})
        return not failures(alone.model_copy(update={"train": train}), tensor * context)

    def _schedules(self, pipeline: int) -> Iterator[tuple[str, int]]:
        yield "1f1b", 1
        if pipeline > 1:
            yield "zb-h1", 1
            for virtual in range(2, self.config.model.num_layers // pipeline + 1):
                if self.config.model.num_layers % (pipeline * virtual) == 0:
                    yield "interleaved", virtual

    def may_be_legal(self, layout: Layout) -> bool:
        """Whether sizes divide, so that an estimate is possible; `is_legal` has all rules."""
        size = layout.tensor * layout.context * layout.pipeline
        if self.world_size % size or self.config.model.num_heads % layout.tensor:
            return False
        portion = self.world_size // size * layout.micro_batch
        return layout.pipeline * layout.virtual <= self.config.model.num_layers and self.global_batch % portion == 0

    def is_legal(self, layout: Layout) -> bool:
        """By the rules of `validate`."""
        return not failures(layout.applied(self.config), self.world_size)

    @cached_property
    def _ideal(self) -> Parts:
        """The costs without any parallelism, of a large micro-batch."""
        mode = self.config.parallel.context_mode
        return self.table.parts(Work(1, 1, mode, sequence=False, recompute="none", splits=False), IDEAL_BATCH)

    def bound(self, layout: Layout) -> float:
        """A time that no schedule of this layout falls short of: kernels as fast as without parallelism, and bubble."""
        layers, ideal = self.config.model.num_layers, self._ideal
        full = ideal.stage(layers, is_first=True, is_last=True)
        forwards = 2 if layout.recompute == "full" else 1
        kernels = (full.forward * forwards + full.backward) / IDEAL_BATCH * self.global_batch / self.world_size
        count = self.global_batch * layout.tensor * layout.context * layout.pipeline / self.world_size
        shortened = 3 if layout.schedule == "zb-h1" else layout.virtual
        return kernels * (1 + (layout.pipeline - 1) * layout.micro_batch / count / shortened)

    def least_memory(self, layout: Layout) -> float:
        """What the device reserves, and the training state, if the parameters were divided evenly; bytes."""
        full = self._ideal.stage(self.config.model.num_layers, is_first=True, is_last=True)
        shards = self.world_size // (layout.tensor * layout.pipeline)
        key = layout.engine, shards
        if key not in self._state:
            self._state[key] = sum(state_bytes(layout.applied(self.config), shards).values())
        state = self._state[key] * full.parameters / (layout.tensor * layout.pipeline)
        return state + self.machines.device.reserved_bytes

    def estimate(self, layout: Layout) -> Estimate:
        """Time and memory by closed forms."""
        return _Estimator(self, layout).estimate()

    def simulated(self, estimate: Estimate) -> Estimate:
        """The estimate with the bubble of the simulated schedule."""
        estimator = _Estimator(self, estimate.layout)
        return replace(estimate, bubble=estimator.simulated_bubble())


class _Estimator:
    """The estimate of one layout."""

    def __init__(self, search: Search, layout: Layout):
        self.search, self.layout = search, layout
        size = layout.tensor * layout.context * layout.pipeline
        self.dp = search.world_size // size
        self.count = search.global_batch // (self.dp * layout.micro_batch)
        self.ranks = self._ranks()

    def _parts(self, recompute: str) -> Parts:
        layout = self.layout
        mode = self.search.config.parallel.context_mode
        splits = layout.schedule == "zb-h1"
        shards = layout.engine == "fsdp"
        work = Work(layout.tensor, layout.context, mode, layout.sequence, recompute, splits, shards)
        return self.search.table.parts(work, layout.micro_batch)

    def _ranks(self) -> list[tuple[int, list[Cost]]]:
        """The first, a middle and the last pipeline rank, with the costs of their stages."""
        layout = self.layout
        parallel = {"pipeline": layout.pipeline, "virtual_pipeline": layout.virtual, "pipeline_layout": layout.stages}
        config = self.search.config
        counts = layer_counts(config.model, config.parallel.model_copy(update=parallel))
        parts, last = self._parts(layout.recompute), len(counts) - 1

        def cost(stage: int) -> Cost:
            return parts.stage(counts[stage], is_first=stage == 0, is_last=stage == last)

        ranks = sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})
        return [(rank, [cost(stage) for stage in range(rank, len(counts), layout.pipeline)]) for rank in ranks]

    def estimate(self) -> Estimate:
        layout, count = self.layout, self.count
        times = [sum(each.forward + each.backward for each in costs) for _, costs in self.ranks]
        slowest = times.index(max(times))
        waits = sum(each.waits for each in self.ranks[slowest][1])
        gathers = self._gathers(self.ranks[slowest][1])
        return Estimate(
            layout,
            memory=max(self._memory(rank, costs) for rank, costs in self.ranks),
            kernels=count * (times[slowest] - waits),
            waits=count * (waits + gathers),
            bubble=self._bubble(times),
            end=max(self._end(rank, costs) for rank, costs in self.ranks),
        )

    def _bubble(self, times: list[float]) -> float:
        """The idle time of the slowest rank."""
        layout, pp = self.layout, self.layout.pipeline
        if pp == 1:
            return 0.0
        others = sum(times) - max(times) + (pp - len(times)) * times[len(times) // 2]
        if layout.schedule == "zb-h1":
            middle = self.ranks[len(self.ranks) // 2][1][0]
            others = (pp - 1) * max(middle.forward + middle.backward - 2 * middle.weights, middle.forward)
        return others / layout.virtual + 2 * (pp - 1) * self._message_seconds()

    def _message_seconds(self) -> float:
        """The time of a hidden state from one stage to the next."""
        layout, config = self.layout, self.search.config
        tokens = config.data.seq_length * layout.micro_batch / layout.context
        size = tokens * config.model.hidden_size * self.search.weight_bytes / (layout.tensor if layout.sequence else 1)
        stride = self.search.world_size // layout.pipeline
        return self.search.machines.message_seconds(int(size), (0, stride))

    def simulated_bubble(self) -> float:
        """The idle time of the slowest rank by simulation, with the costs of its kind for each rank.

        Beyond a few micro-batches for each stage, more of them add only busy time.
        """
        layout, pp = self.layout, self.layout.pipeline
        if pp == 1:
            return 0.0
        by_rank = dict(self.ranks)
        middle = self.ranks[len(self.ranks) // 2][1]

        def cost(action: Action, rank: int) -> float:
            of_stage = by_rank.get(rank, middle)[action.chunk]
            return {
                "F": of_stage.forward,
                "B": of_stage.backward,
                "I": of_stage.backward - of_stage.weights,
                "W": of_stage.weights,
            }[action.op]

        count = min(self.count, SIMULATED * pp)
        schedule = build_schedule(layout.schedule, pp, count, layout.virtual)
        length = max(span.end for span in timeline(schedule, cost, self._message_seconds()))
        busiest = max(sum(each.forward + each.backward for each in costs) for costs in by_rank.values())
        return length - count * busiest

    def _dp_ranks(self) -> tuple[int, ...]:
        stride = self.layout.tensor * self.layout.context
        if self.layout.context == 1:
            return tuple(range(0, stride * self.dp, stride))
        return tuple(
            self.layout.tensor * (place + self.layout.context * row)
            for row in range(self.dp)
            for place in range(self.layout.context)
        )

    @cached_property
    def _dp_rate(self) -> float:
        return self.search.machines.rate(self._dp_ranks())

    @property
    def _shards(self) -> int:
        return self.dp * self.layout.context

    def _ring_seconds(self, size: float) -> float:
        """The time to gather, or to reduce and scatter, so many bytes over dp."""
        return size * (self._shards - 1) / self._shards / self._dp_rate if self._shards > 1 else 0.0

    def _gathers(self, costs: list[Cost]) -> float:
        """What FSDP's gathers and sums take beyond the passes that they overlap, for one micro-batch."""
        if self.layout.engine != "fsdp":
            return 0.0
        cost, search = costs[0], self.search
        gather = self._ring_seconds(cost.parameters * search.weight_bytes)
        scatter = self._ring_seconds(cost.parameters * search.gradient_bytes)
        return max(0.0, gather - cost.forward) + max(0.0, gather + scatter - cost.backward)

    def _end(self, rank: int, costs: list[Cost]) -> float:
        """The seconds after the last backward."""
        search, layout, parameters = self.search, self.layout, sum(each.parameters for each in costs)
        memory = search.machines.device.memory
        sharded = layout.engine != "local"
        owned = parameters / self._shards if sharded else parameters
        optimizer = owned * self._optimizer_bytes() / memory + self._tied_seconds(rank)
        if layout.engine == "fsdp":
            return optimizer
        scatter = self._ring_seconds(parameters * search.gradient_bytes)
        gather = self._ring_seconds(parameters * (search.weight_bytes if sharded else search.gradient_bytes))
        # The embedding's gradient is complete last, and its weights are needed first.
        late = self._parts(layout.recompute).first.parameters / parameters if rank == 0 else 0.0
        # After the last chunk's last backward, each other chunk has one for each stage.
        backward = costs[-1].backward + layout.pipeline * sum(each.backward for each in costs[:-1])
        if not sharded:
            return optimizer + max(late * (scatter + gather), scatter + gather - backward)
        return optimizer + max(late * scatter, scatter - backward) + max(late * gather, gather - costs[0].forward)

    def _optimizer_bytes(self) -> int:
        """What the end of a step moves for a parameter: the norm reads its gradient; AdamW reads and writes gradient,
        master and two moments; 16-bit weights are copies of masters."""
        wide, weight = self.search.gradient_bytes, self.search.weight_bytes
        return 9 * wide + (wide + weight if weight < wide else 0)

    def _tied_seconds(self, rank: int) -> float:
        """The sum of the tied embedding's gradient over the first and the last stage."""
        layout, search, pp = self.layout, self.search, self.layout.pipeline
        if pp == 1 or rank not in (0, pp - 1):
            return 0.0
        size = self._parts(layout.recompute).tied * search.gradient_bytes
        owned = size / self._shards if layout.engine == "zero1" else size
        return search.machines.message_seconds(int(owned), (0, search.world_size - search.world_size // pp))

    def _memory(self, rank: int, costs: list[Cost]) -> float:
        """The bytes of a pipeline rank at the highest point of a step."""
        layout, search = self.layout, self.search
        of_parameter = sum(state_bytes(layout.applied(search.config), self._shards).values())
        parameters = sum(each.parameters for each in costs)
        total = of_parameter * parameters + search.machines.device.reserved_bytes
        return total + self._activations(rank, costs)

    def _activations(self, rank: int, costs: list[Cost]) -> float:
        layout, count, pp = self.layout, self.count, self.layout.pipeline
        peak = max(max(each.forward_peak - each.kept, each.backward_peak) for each in costs)
        if layout.schedule == "zb-h1":  # W is deferred by as many micro-batches as the rank's place
            late = min(rank, count)
            return (min(pp, count) - late) * costs[0].kept + late * costs[0].deferred + peak
        if layout.virtual > 1:
            in_flight = min(2 * (pp - 1 - rank) + (layout.virtual - 1) * pp + 1, count * layout.virtual)
            kept = sorted((each.kept for each in costs), reverse=True)
            each, rest = divmod(in_flight, layout.virtual)
            return each * sum(kept) + sum(kept[:rest]) + peak
        in_flight = count if layout.schedule == "gpipe" else min(count, pp - rank)
        return in_flight * costs[0].kept + peak


def find(search: Search, limit: float, *, most: int = 10) -> list[Estimate]:
    """The fastest legal layouts whose fullest rank needs at most `limit` bytes; the best of them simulated.

    Layouts come in the order of a lower bound of their time, which needs no trace. The search ends where the bound
    exceeds the times that it has found. A layout with recomputation is left out where it fits without.
    """
    found: list[Estimate] = []
    fitting: set[Layout] = set()
    bounded = sorted(((search.bound(each), each) for each in search.layouts()), key=lambda pair: pair[0])
    search.num_layouts = len(bounded)
    for bound, layout in bounded:
        tenth = found[most - 1].seconds if len(found) >= most else inf
        if bound >= tenth:
            break
        if replace(layout, recompute="none") in fitting or search.least_memory(layout) > limit:
            continue
        if layout.schedule == "zb-h1" and not _may_help(search, layout, limit, tenth):
            continue
        estimate = search.estimate(layout)
        if estimate.memory <= limit and search.is_legal(layout):
            fitting.add(layout)
            insort(found, estimate, key=lambda each: each.seconds)
    return sorted((search.simulated(each) for each in found[:most]), key=lambda each: each.seconds)


def _may_help(search: Search, layout: Layout, limit: float, slowest: float) -> bool:
    """Whether a split backward, which has traces of its own, can be among the best: 1F1B with a third of its bubble."""
    plain = search.estimate(replace(layout, schedule="1f1b"))
    return plain.memory <= limit and plain.seconds - plain.bubble * 2 / 3 < slowest


def reason(loser: Estimate, best: Estimate) -> str:
    """Why a layout is slower than the best one: the part of its time that grows the most."""
    parts = {
        "kernels": loser.kernels - best.kernels,
        "waits for tp and cp": loser.waits - best.waits,
        "bubble": loser.bubble - best.bubble,
        "sums and optimizer": loser.end - best.end,
    }
    name = max(parts, key=lambda each: parts[each])
    return f"{name} {parts[name] * 1e3:+.3g} ms"
