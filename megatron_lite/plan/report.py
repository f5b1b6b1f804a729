"""The plan of a job as text and as JSON."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron_lite.plan import control
from megatron_lite.plan.communication import Operation
from megatron_lite.plan.estimate import Plan, Traffic
from megatron_lite.plan.links import tensor_bytes
from megatron_lite.plan.units import duration, gigabytes, size_text
from megatron_lite.text import counted

CHINCHILLA = 20  # tokens of training for each parameter; Hoffmann et al., arXiv 2203.15556, table 3
SMALL = 10**4  # bytes; operations that together send fewer are not printed


@dataclass(frozen=True)
class Budget:
    """The length of a training, and the price of a GPU."""

    tokens: float
    price: float | None = None  # dollars for a GPU and hour

    def days(self, plan: Plan) -> float:
        return self.tokens / plan.tokens_per_second / 86400

    def dollars(self, plan: Plan) -> float | None:
        return None if self.price is None else self.price * 24 * self.days(plan) * plan.grid.world_size


def summary(plan: Plan, budget: Budget) -> list[str]:
    """Lines with layout, memory, time and cost, and the time of a start, a save and a resume."""
    speed, ranks = plan.tokens_per_second, plan.grid.world_size
    return [
        f"layout        {layout_line(plan)}",
        f"model         {plan.parameters:,} parameters with padding; {per_rank(plan)}",
        f"memory        {memory_line(plan)}",
        f"step          {step_line(plan)}",
        f"speed         {speed:,.0f} tokens/s, {speed / ranks:,.0f} on each {unit(plan)}; MFU {plan.mfu:.3f}, with "
        f"recomputed FLOPs {plan.hfu:.3f}",
        f"training      {training_line(plan, budget)}",
        f"checkpoint    {size_text(plan.checkpoint_bytes)} with the optimizer",
        *control.lines(plan),
    ]


def unit(plan: Plan) -> str:
    return "process" if plan.device.name == "cpu" else "GPU"


def layout_line(plan: Plan) -> str:
    """Sizes of the groups, schedule, engine, micro-batches, recomputation and machines."""
    grid, parallel, train = plan.grid, plan.config.parallel, plan.config.train
    machines = -(-grid.world_size // plan.machines.ranks_per_machine)
    sizes = [f"{axis} {size}" for axis, size in (("tp", grid.tp), ("cp", grid.cp), ("pp", grid.pp), ("dp", grid.dp))]
    parts = [", ".join(size for size in sizes if not size.endswith(" 1")) or "one rank"]
    if grid.pp > 1:
        chunks = f" with {parallel.virtual_pipeline} chunks" if parallel.virtual_pipeline > 1 else ""
        parts.append(f"{parallel.schedule}{chunks}")
    if parallel.sequence:
        parts.append("sequence parallelism")
    batches = counted(plan.num_microbatches, "micro-batch", "micro-batches")
    parts += [plan.config.engine] if grid.dp * grid.cp > 1 else []
    size = f"{train.micro_batch_size} x {plan.config.data.seq_length:,} tokens"
    where = f"{counted(grid.world_size, 'rank')} on {counted(machines, 'machine')} ({plan.device.name})"
    return f"{'; '.join(parts)}; {batches} of {size}; recomputation {train.recompute}; {where}"


def per_rank(plan: Plan) -> str:
    counts = [trace.parameters for trace in plan.traces]
    if len(set(counts)) == 1:
        return f"{counts[0]:,} on each rank"
    return f"{min(counts):,} to {max(counts):,} on a rank"


def ranks_of(plan: Plan, stage: int) -> str:
    """The ranks of a pipeline rank."""
    count = plan.grid.world_size // plan.grid.pp
    first = stage * count
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def memory_line(plan: Plan) -> str:
    needed, most = plan.peak_memory, plan.device.memory_bytes
    verdict = f"fits in {most / 1e9:,.1f} GB" if needed <= most else f"does not fit in {most / 1e9:,.1f} GB"
    beyond = "" if needed <= most else f", {(needed - most) / 1e9:,.1f} GB too much"
    return f"{verdict}: {needed / 1e9:,.1f} GB on the fullest ({ranks_of(plan, plan.fullest)}){beyond}"


def step_parts(plan: Plan) -> dict[str, float]:
    """The seconds of a step on the pipeline rank that ends last, by what it does in them."""
    ends = [0.0] * plan.grid.pp
    for span in plan.spans:
        ends[span.rank] = max(ends[span.rank], span.end)
    totals = [end + tail for end, tail in zip(ends, plan.tails, strict=True)]
    last = totals.index(max(totals))
    parts: dict[str, float] = {"kernels": 0.0}
    for played in plan.durations[last].values():
        parts["kernels"] += plan.num_microbatches * played.compute
        for group, seconds in played.exposed.items():
            name = f"waits for {group or 'dp_cp'}"
            parts[name] = parts.get(name, 0.0) + plan.num_microbatches * seconds
    parts["bubble"] = ends[last] - sum(parts.values())
    parts["end of the step"] = plan.tails[last]
    parts["waits for delayed sums"] = plan.step_seconds - max(totals)
    return {name: seconds for name, seconds in parts.items() if seconds > 1e-9}


def step_line(plan: Plan) -> str:
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in step_parts(plan).items())
    bubble = f"; {plan.bubble:.3f} of the pipeline is idle" if plan.grid.pp > 1 else ""
    return f"{duration(plan.step_seconds)}: {parts}{bubble}"


def days_text(days: float) -> str:
    return f"{days:,.0f} days" if days >= 100 else f"{days:.3g} days"


def training_line(plan: Plan, budget: Budget) -> str:
    """Tokens, days and price of the training."""
    dollars = budget.dollars(plan)
    cost = "" if dollars is None else f", {dollars:,.0f} dollars"
    ratio = budget.tokens / plan.parameters
    return (
        f"{budget.tokens:,.4g} tokens take {days_text(budget.days(plan))}{cost}; {ratio:,.3g} tokens for each "
        f"parameter (Chinchilla: {CHINCHILLA})"
    )


def memory_table(plan: Plan) -> list[tuple[str, ...]]:
    """The bytes by kind of the first, the fullest and the last pipeline rank."""
    shown = sorted({0, plan.fullest, plan.grid.pp - 1})
    kinds = list(dict.fromkeys(kind for stage in shown for kind in plan.memory[stage]))
    kinds = [kind for kind in kinds if any(plan.memory[stage].get(kind) for stage in shown)]
    rows: list[tuple[str, ...]] = [("GB", *(ranks_of(plan, stage) for stage in shown))]
    rows += [(kind, *(gigabytes(plan.memory[stage].get(kind, 0)) for stage in shown)) for kind in kinds]
    rows.append(("together", *(gigabytes(sum(plan.memory[stage].values())) for stage in shown)))
    return rows


def communication_table(rows: Sequence[Traffic]) -> list[tuple[str, ...]]:
    """The operations of a rank in a step; small ones are left out."""
    table: list[tuple[str, ...]] = [("group", "ranks", "operation", "number", "GB of tensors", "GB sent", "line")]
    for row in rows:
        if row.tensor_bytes >= SMALL:
            sizes = f"{row.tensor_bytes / 1e9:.4g}", f"{row.sent_bytes / 1e9:.4g}"
            table.append((row.group, str(row.ranks), row.operation, f"{row.count:,}", *sizes, row.line))
    return table


def sent_by_group(plan: Plan) -> dict[str, float]:
    """The bytes that a rank sends in a step, by group; of the pipeline rank that sends the most there."""
    found: dict[str, float] = defaultdict(float)
    for rows in plan.traffic:
        here: Counter[str] = Counter()
        for row in rows:
            here[row.group] += row.sent_bytes  # type: ignore[assignment]
        for group, size in here.items():
            found[group] = max(found[group], size)
    return dict(found)


def as_dict(plan: Plan, budget: Budget) -> dict[str, Any]:
    """The plan in plain values. `docs/planning.md` describes the keys."""
    grid = plan.grid
    totals = [sum(memory.values()) for memory in plan.memory]
    stage_size = grid.world_size // grid.pp
    fullest = plan.memory[plan.fullest]
    return {
        "device": plan.device.name,
        "layout": {"tp": grid.tp, "cp": grid.cp, "dp": grid.dp, "pp": grid.pp, "ranks": grid.world_size},
        "num_microbatches": plan.num_microbatches,
        "parameters": plan.parameters,
        "parameters_by_rank": [trace.parameters for trace in plan.traces for _ in range(stage_size)],
        "memory_bytes": {**fullest, "total": sum(fullest.values()), "rank": plan.traces[plan.fullest].rank},
        "memory_bytes_by_rank": [total for total in totals for _ in range(stage_size)],
        "memory_limit_bytes": plan.device.memory_bytes,
        "fits": plan.peak_memory <= plan.device.memory_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "flops": {"model": plan.model_flops, "hardware": plan.hardware_flops},
        "communication_bytes": sent_by_group(plan),
        "communication": [
            {"pipeline_rank": stage, **vars(row)} for stage, rows in enumerate(plan.traffic) for row in rows
        ],
        "bubble": plan.bubble,
        "step_seconds": plan.step_seconds,
        "step_parts_seconds": step_parts(plan),
        **{f"{name}_seconds": event.seconds for name, event in control.events(plan).items()},
        "tokens_per_step": plan.tokens,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "training_tokens": budget.tokens,
        "tokens_per_parameter": budget.tokens / plan.parameters,
        "training_days": budget.days(plan),
        "training_dollars": budget.dollars(plan),
    }


def operations_in_order(operations: Iterable[Operation]) -> Iterator[tuple[int, Operation]]:
    """The operations of a step with the number of equal ones in a row."""
    last: Operation | None = None
    count = 0
    for operation in operations:
        if last is not None and operation != last:
            yield count, last
            count = 0
        last, count = operation, count + 1
    if last is not None:
        yield count, last


def rank_table(operations: Sequence[Operation]) -> list[tuple[str, ...]]:
    """The operations of a rank's step in their order."""
    rows: list[tuple[str, ...]] = [("group", "ranks", "operation", "number", "tensor", "MB of tensors", "line")]
    for count, each in operations_in_order(operations):
        shape, dtype = max(each.tensors, key=lambda tensor: prod(tensor[0]), default=((), "no tensor"))
        size = f"{count * tensor_bytes(each) / 1e6:,.4g}"
        tensor = f"{dtype} {list(shape)}"
        group = each.group or ("pp" if each.peer >= 0 else "dp_cp")
        rows.append((group, str(len(each.communicator.ranks)), each.name, f"{count:,}", tensor, size, each.line))
    return rows


def totals(counts: Iterable[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    """Number and tensor bytes by operation, from (operation, number, bytes)."""
    found: dict[str, tuple[int, int]] = {}
    for name, count, size in counts:
        before = found.get(name, (0, 0))
        found[name] = before[0] + count, before[1] + size
    return found
