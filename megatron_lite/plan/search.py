"""The fastest layout of a job that fits into memory, by estimates of all legal ones (`closed_form.py`).

The best ones are then simulated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from typing import NamedTuple

from megatron_lite.config.schema import Config
from megatron_lite.config.stages import layer_counts
from megatron_lite.config.validate import divisors, failures
from megatron_lite.errors import ConfigError
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.plan.closed_form import Estimate, Estimator
from megatron_lite.plan.costs import Cost, CostTable, Work
from megatron_lite.plan.layouts import Layout, layout_of, sharding
from megatron_lite.plan.links import Machines
from megatron_lite.plan.sizes import state_bytes

IDEAL_BATCH = 64  # sequences; the largest micro-batch of a search
POWERS = tuple(1 << power for power in range(7))
SLACK = 0.95  # of a step's memory, because the next step may need a little less
HYBRID = ("zero1", "fsdp")  # engines that may have copies
SHORTEST = 1024  # tokens of a context-parallel rank; shorter ones would compute less than they send


class Candidate(NamedTuple):
    """A layout in a search; the one with the smallest bound is next."""

    seconds: float  # lower bound of its time
    number: int
    layout: Layout
    num_steps: int = 0  # that it has made


@dataclass
class Search:
    """Estimates for a config on so many ranks."""

    config: Config
    world_size: int
    machines: Machines
    table: CostTable = field(init=False)
    num_layouts: int = 0  # that `find` has compared, by their estimate or by a bound
    _state: dict[tuple[str, int, int], float] = field(default_factory=dict)

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
        own = layout_of(config).engine
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
                if own not in engines and dp * context > 1:
                    engines.append(own)
                if schedule == "zb-h1":
                    engines = [name for name in engines if sharding(config, name, dp * context) != "fsdp"]
                shards = self.shards(tensor, dp * context)
                sharded = [(name, size) for name in engines for size in (shards if name in HYBRID else shards[:1])]
                rests = product(names, micro_batches, recomputes, {False, tensor > 1})
                for rest, engine in product(rests, sharded):
                    yield Layout(tensor, context, pipeline, virtual, schedule, *rest, *engine)

    def shards(self, tensor: int, ranks: int) -> list[int]:
        """How many of the ranks of dp_cp share a copy: all (0), those of a machine, or as many as in the config."""
        of_machine, rest = divmod(self.machines.ranks_per_machine, tensor)
        sizes = {layout_of(self.config).shard, 0 if rest else of_machine}
        return [0, *sorted(size for size in sizes if 1 < size < ranks and ranks % size == 0)]

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
        if layout.shard and self.world_size // size * layout.context % layout.shard:
            return False
        return layout.pipeline * layout.virtual <= self.config.model.num_layers and self.global_batch % portion == 0

    def is_legal(self, layout: Layout) -> bool:
        """By the rules of `validate`."""
        return not failures(layout.applied(self.config), self.world_size)

    @cached_property
    def _ideal(self) -> tuple[Cost, Cost]:
        """The costs of the model, and of one of its layers, without any parallelism, for a large micro-batch."""
        mode = self.config.parallel.context_mode
        work = Work(1, 1, mode, sequence=False, recompute="none", splits=False)
        parts = self.table.parts(work, IDEAL_BATCH)
        return parts.stage(self.config.model.num_layers, is_first=True, is_last=True), parts.layer

    def bound(self, layout: Layout) -> float:
        """A time that this layout does not fall short of: kernels as without parallelism, sums of forwards, bubble."""
        full, layer = self._ideal
        forwards = 2 if layout.recompute == "full" else 1
        again = self.config.model.num_layers * layer.forward * (forwards - 1)
        kernels = (full.forward + again + full.backward) / IDEAL_BATCH * self.global_batch / self.world_size
        count = self.global_batch * layout.tensor * layout.context * layout.pipeline / self.world_size
        shortened = 3 if layout.schedule == "zb-h1" else layout.virtual
        waits = self._forward_waits(layout) * forwards
        passes = (kernels + waits) * (1 + (layout.pipeline - 1) * layout.micro_batch / count / shortened)
        if layout.engine != "fsdp":
            return passes
        return max(passes, count / layout.micro_batch * self._fsdp_seconds(layout, full.parameters / layout.tensor))

    def steps(self, layout: Layout) -> list[tuple[Layout, Work]]:
        """What the layout is estimated as in turn, at last with its own work.

        Smaller context-parallel groups come first, with a rank's part of a sequence, and for zb-h1 those of 1F1B. A
        step is traced in less time than the next one. Its time is a lower bound, and so is its memory, but for `SLACK`.
        """
        work = self.work(layout)
        unsplit = replace(layout, schedule="1f1b") if work.splits else layout
        steps = [(unsplit, replace(work, splits=False, context=size)) for size in divisors(work.context)]
        return [*steps, (layout, work)] if work.splits else steps

    def work(self, layout: Layout) -> Work:
        """What decides the kernels of this layout."""
        mode, splits = self.config.parallel.context_mode, layout.schedule == "zb-h1"
        dp_cp = self.world_size // (layout.tensor * layout.pipeline)
        shards = sharding(self.config, layout.engine, dp_cp) == "fsdp"
        return Work(layout.tensor, layout.context, mode, layout.sequence, layout.recompute, splits, shards)

    def _fsdp_seconds(self, layout: Layout, parameters: float) -> float:
        """The seconds of FSDP's gathers and sums for a micro-batch: weights twice, gradients once."""
        machines, shards = self.machines, layout.shard or self.world_size // layout.tensor
        members = max(1, machines.ranks_per_machine // layout.tensor)  # of the group, on a machine
        rate = (
            machines.device.link if shards <= members else min(machines.device.link, members * machines.device.network)
        )
        return parameters * (2 * self.weight_bytes + self.gradient_bytes) * (shards - 1) / shards / rate

    def _forward_waits(self, layout: Layout) -> float:
        """The seconds of tensor parallelism's sums in all forwards: two of each layer, for which nothing else runs."""
        tp, config = layout.tensor, self.config
        if tp == 1 or "tp" in self.machines.hidden:
            return 0.0
        tokens = self.global_batch * config.data.seq_length * tp * layout.pipeline / self.world_size
        sent = 4 * (tp - 1) / tp * tokens * config.model.hidden_size * self.weight_bytes
        return sent * config.model.num_layers / layout.pipeline / self.machines.device.link

    def least_memory(self, layout: Layout) -> float:
        """What the device reserves, and the training state, if the parameters were divided evenly; bytes."""
        shards = self.world_size // (layout.tensor * layout.pipeline)
        key = layout.engine, layout.shard, shards
        if key not in self._state:
            self._state[key] = sum(state_bytes(layout.applied(self.config), shards).values())
        state = self._state[key] * self._ideal[0].parameters / (layout.tensor * layout.pipeline)
        return state + self.machines.device.reserved_bytes

    def estimate(self, layout: Layout, work: Work | None = None) -> Estimate:
        """Time and memory by closed forms, from its own work or that of a step."""
        return Estimator(self, layout, work).estimate()

    def simulated(self, estimate: Estimate) -> Estimate:
        """The estimate with the bubble of the simulated schedule."""
        estimator = Estimator(self, estimate.layout)
        return replace(estimate, bubble=estimator.simulated_bubble())


def find(search: Search, limit: float, *, most: int = 10) -> list[Estimate]:
    """The fastest legal layouts whose fullest rank needs at most `limit` bytes; their bubbles are simulated.

    A best-first search. Each layout has a lower bound of its time: first one that needs no trace, then the estimate of
    its last step. The layout with the smallest bound makes its next step. The first layouts with no step left are the
    fastest. A layout with recomputation is left out where it fits without.
    """
    found: list[Estimate] = []
    fitting: set[Layout] = set()
    waiting = [Candidate(search.bound(each), at, each) for at, each in enumerate(search.layouts())]
    search.num_layouts = len(waiting)
    heapify(waiting)
    while waiting and len(found) < most:
        candidate = heappop(waiting)
        layout, num_steps = candidate.layout, candidate.num_steps
        if replace(layout, recompute="none") in fitting or (num_steps == 0 and search.least_memory(layout) > limit):
            continue
        steps = search.steps(layout)
        if num_steps == len(steps):
            if search.is_legal(layout):
                fitting.add(layout)
                found.append(search.estimate(layout))
            continue
        estimate, is_last = search.estimate(*steps[num_steps]), num_steps == len(steps) - 1
        if estimate.memory * (1 if is_last else SLACK) <= limit:
            bubble = estimate.bubble if estimate.layout == layout else estimate.bubble / 3  # of 1F1B for zb-h1
            seconds = max(candidate.seconds, estimate.seconds - estimate.bubble + bubble)
            # Rounded, so that of two with the same time the one without recomputation comes first.
            heappush(waiting, candidate._replace(seconds=round(seconds, 9), num_steps=num_steps + 1))
    return sorted((search.simulated(each) for each in found), key=lambda each: each.seconds)


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
