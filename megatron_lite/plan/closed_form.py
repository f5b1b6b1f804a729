"""The time and memory of a layout by closed forms, from the costs of its stages (`costs.py`).

The estimates are those of `estimate.py`, but for the last micro-batch and the end of a step, where here the bytes of
gradients and weights count instead of each bucket.
Source of the closed forms: Narayanan et al., arXiv 2104.04473, sections 2 and 3; zb-h1: arXiv 2401.10241, section 2.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_lite.config.stages import layer_counts
from megatron_lite.pipeline.actions import Action
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.simulate import timeline
from megatron_lite.plan.costs import Cost, Parts, Work
from megatron_lite.plan.layouts import Layout, sharding
from megatron_lite.plan.sizes import state_bytes

if TYPE_CHECKING:
    from megatron_lite.plan.search import Search

SIMULATED = 2  # micro-batches for each stage


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


class Estimator:
    """The estimate of one layout, from the costs of its own work or of a step's (`Search.steps`)."""

    def __init__(self, search: "Search", layout: Layout, work: Work | None = None):
        self.search, self.layout = search, layout
        size = layout.tensor * layout.context * layout.pipeline
        self.dp = search.world_size // size
        self.count = search.global_batch // (self.dp * layout.micro_batch)
        self.sharding = sharding(search.config, layout.engine, self.dp * layout.context)
        self.work = work or search.work(layout)
        self.ranks = self._ranks()

    def _parts(self) -> Parts:
        return self.search.table.parts(self.work, self.layout.micro_batch)

    def _ranks(self) -> list[tuple[int, list[Cost]]]:
        """The first, a middle and the last pipeline rank, with the costs of their stages."""
        layout = self.layout
        parallel = {"pipeline": layout.pipeline, "virtual_pipeline": layout.virtual, "pipeline_layout": layout.stages}
        config = self.search.config
        counts = layer_counts(config.model, config.parallel.model_copy(update=parallel))
        parts, last = self._parts(), len(counts) - 1

        def cost(stage: int) -> Cost:
            full = parts.stage(counts[stage], is_first=stage == 0, is_last=stage == last)
            return full.shortened(layout.context // self.work.context)

        ranks = sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})
        return [(rank, [cost(stage) for stage in range(rank, len(counts), layout.pipeline)]) for rank in ranks]

    def estimate(self) -> Estimate:
        """Time and memory; the slowest and the fullest of three ranks count."""
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
        """The idle time of the slowest rank.

        With 1F1B, pp micro-batches go to the last stage and back before the next ones begin. So each pays its share of
        these messages, less what ranks with shorter passes wait anyway. Other schedules do more passes meanwhile.
        """
        layout, pp = self.layout, self.layout.pipeline
        if pp == 1:
            return 0.0
        total = sum(times) + (pp - len(times)) * times[len(times) // 2]
        others, message = total - max(times), self._message_seconds()
        beyond = 2 * (pp - 1) / pp * message - (max(times) - total / pp)  # of a micro-batch's messages
        if layout.schedule == "zb-h1":
            middle = self.ranks[len(self.ranks) // 2][1][0]
            others = (pp - 1) * max(middle.forward + middle.backward - 2 * middle.weights, middle.forward)
            return others + 4 * (pp - 1) * message + self.count * max(0.0, beyond - middle.weights)
        if layout.virtual > 1:
            beyond = layout.virtual * message - max(times) / 2
            return others / layout.virtual + 2 * (pp * layout.virtual - 1) * message + self.count * max(0.0, beyond)
        return others + 2 * (pp - 2) * message + self.count * max(0.0, beyond)

    def _message_seconds(self) -> float:
        """The time of a hidden state between the neighbouring stages with the slowest link."""
        layout, config = self.layout, self.search.config
        tokens = config.data.seq_length * layout.micro_batch / layout.context
        size = tokens * config.model.hidden_size * self.search.weight_bytes / (layout.tensor if layout.sequence else 1)
        stride, machine = self.search.world_size // layout.pipeline, self.search.machines.ranks_per_machine
        last_inside = max(0, -(-machine // stride) - 1)  # the next stage begins on another machine
        stage = last_inside if last_inside < layout.pipeline - 1 else 0
        return self.search.machines.message_seconds(int(size), (stage * stride, (stage + 1) * stride))

    def simulated_bubble(self) -> float:
        """The idle time of the slowest rank by simulation, with the costs of its kind for each rank.

        Each micro-batch beyond a few for each stage adds as much as one before it.
        """
        pp = self.layout.pipeline
        if pp == 1:
            return 0.0
        few, more = (min(self.count, times * SIMULATED * pp) for times in (1, 2))
        idle, longer = self._idle(few), self._idle(more)
        return longer + (longer - idle) * (self.count - more) / max(1, more - few)

    def _idle(self, count: int) -> float:
        """The idle time with so many micro-batches."""
        layout, pp = self.layout, self.layout.pipeline
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

        schedule = build_schedule(layout.schedule, pp, count, layout.virtual)
        length = max(span.end for span in timeline(schedule, cost, self._message_seconds()))
        busiest = max(sum(each.forward + each.backward for each in costs) for costs in by_rank.values())
        return length - count * busiest

    @property
    def _ranks_of_dp(self) -> int:
        return self.dp * self.layout.context

    @property
    def _shards(self) -> int:
        return self.layout.shard or self._ranks_of_dp

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """Of the ranks that share a copy, and of those with the same shard of all copies."""
        stride, rate = self.layout.tensor, self.search.machines.rate
        end = stride * self._ranks_of_dp
        return rate(tuple(range(0, stride * self._shards, stride))), rate(tuple(range(0, end, stride * self._shards)))

    def _ring_seconds(self, size: float) -> float:
        """The time to gather, or to reduce and scatter, so many bytes over the ranks that share a copy."""
        return size * (self._shards - 1) / self._shards / self._rates[0] if self._shards > 1 else 0.0

    def _copies_seconds(self, size: float) -> float:
        """The time to sum each rank's shard of so many bytes over its copies."""
        copies = self._ranks_of_dp // self._shards
        return 2 * size / self._shards * (copies - 1) / copies / self._rates[1] if copies > 1 else 0.0

    def _gathers(self, costs: list[Cost]) -> float:
        """What FSDP's gathers and sums take beyond the passes that they overlap, for one micro-batch."""
        if self.sharding != "fsdp":
            return 0.0
        cost, search = costs[0], self.search
        gather = self._ring_seconds(cost.parameters * search.weight_bytes)
        scatter = self._ring_seconds(cost.parameters * search.gradient_bytes)
        return max(0.0, gather - cost.forward) + max(0.0, gather + scatter - cost.backward)

    def _end(self, rank: int, costs: list[Cost]) -> float:
        """The seconds after the last backward."""
        search, layout, parameters = self.search, self.layout, sum(each.parameters for each in costs)
        memory = search.machines.device.memory
        sharded = self.sharding != "local"
        owned = parameters / self._shards if sharded else parameters
        optimizer = owned * self._optimizer_bytes() / memory + self._tied_seconds(rank)
        scatter = self._ring_seconds(parameters * search.gradient_bytes)
        sums = self._copies_seconds(parameters * search.gradient_bytes)  # beside gathers and sums within machines
        if self.sharding == "fsdp":
            gather = self._ring_seconds(parameters * search.weight_bytes)
            return optimizer + max(0.0, sums - max(gather + scatter, costs[0].backward))
        gather = self._ring_seconds(parameters * (search.weight_bytes if sharded else search.gradient_bytes))
        # The embedding's gradient is complete last, and its weights are needed first.
        late = self._parts().first.parameters / parameters if rank == 0 else 0.0
        # After the last chunk's last backward, each other chunk has one for each stage.
        backward = costs[-1].backward + layout.pipeline * sum(each.backward for each in costs[:-1])
        if not sharded:
            return optimizer + max(late * (scatter + gather), scatter + gather - backward)
        reduction = max(late * (scatter + sums), max(scatter, sums) - backward)
        return optimizer + reduction + max(late * gather, gather - costs[0].forward)

    def _optimizer_bytes(self) -> int:
        """What the end of a step moves for a parameter: the norm reads its gradient; AdamW reads and writes gradient,
        master and two moments; 16-bit weights are copies of masters."""
        wide, weight = self.search.gradient_bytes, self.search.weight_bytes
        return 9 * wide + (wide + weight if weight < wide else 0)

    def _tied_seconds(self, rank: int) -> float:
        """The sum of the tied embedding's gradient over the first and the last stage."""
        search, pp = self.search, self.layout.pipeline
        if pp == 1 or rank not in (0, pp - 1):
            return 0.0
        size = self._parts().tied * search.gradient_bytes
        owned = size / self._shards if self.sharding == "zero1" else size
        return search.machines.message_seconds(int(owned), (0, search.world_size - search.world_size // pp))

    def _memory(self, rank: int, costs: list[Cost]) -> float:
        """The bytes of a pipeline rank at the highest point of a step."""
        layout, search = self.layout, self.search
        of_parameter = sum(state_bytes(layout.applied(search.config), self._ranks_of_dp).values())
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
            # Forwards go through the chunks in turn, with as many micro-batches as stages.
            return sum(costs[number // pp % layout.virtual].kept for number in range(in_flight)) + peak
        in_flight = count if layout.schedule == "gpipe" else min(count, pp - rank)
        return in_flight * costs[0].kept + peak
