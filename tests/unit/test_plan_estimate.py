"""The plan of a job against steps on the meta device, and the arithmetic of its memory and links."""

from collections.abc import Hashable
from typing import Any
from unittest.mock import patch

import pytest

from megatron_lite.config.schema import Config
from megatron_lite.pipeline import p2p
from megatron_lite.pipeline.actions import Action
from megatron_lite.plan import estimate
from megatron_lite.plan.communication import Communicator, Operation, Wait, record_step
from megatron_lite.plan.devices import device_of
from megatron_lite.plan.estimate import Plan, make_plan
from megatron_lite.plan.fake_world import empty_batch, fake_rank
from megatron_lite.plan.kernels import Recorder, on_gpu
from megatron_lite.plan.links import Machines, sent_bytes, tensor_bytes
from megatron_lite.plan.memory import LiveBytes, peak_bytes
from megatron_lite.plan.report import step_parts
from megatron_lite.plan.stage import Chunk, Event, Pass, RankTrace, kernels
from megatron_lite.training.step import local_batches, train_step
from tests.helpers.axes import axes, engine, num_layers, settings, sizes
from tests.helpers.cover import in_tiers
from tests.helpers.kept import planned_traffic, recorded_traffic, wide_config
from tests.helpers.layouts import BATCH, MODELS, OF_SEVERAL_RANKS, context, layout
from tests.helpers.tiny import tiny_config
from tests.helpers.traces import shared_traces  # noqa: F401

# All layouts whose engine runs on the meta device: torch's DDP does not.
LAYOUTS = [name for name, (_, each) in OF_SEVERAL_RANKS.items() if engine(each) != "torch"]
H100 = Machines(device_of("h100"), 8)


def features(name: str) -> set[Hashable]:
    model, each = OF_SEVERAL_RANKS[name]
    return {model, *settings(each), *axes(each)}


def cost(name: str) -> float:
    _, each = OF_SEVERAL_RANKS[name]
    return num_layers(each) * (3 + BATCH / (each["changes"]["train__micro_batch_size"] * sizes(each)["data"]))


@pytest.mark.parametrize("name", in_tiers(LAYOUTS, features, cost, name=str))
def test_a_plan_has_the_operations_of_a_step(name):
    """The plan multiplies the passes of two micro-batches. A pass that another micro-batch does differently, or a part
    of the step that was left out, would be missing here."""
    model, each = OF_SEVERAL_RANKS[name]
    changes = each["changes"] | {"train__global_batch_size": BATCH, "model__num_layers": num_layers(each)}
    config = tiny_config(model, train__precision="bf16", **changes)
    plan = make_plan(config, each["ranks"], H100)
    for pp_rank, trace in enumerate(plan.traces):
        step = record_step(config, trace.rank, each["ranks"], num_microbatches=plan.num_microbatches)
        assert planned_traffic(plan, pp_rank) == recorded_traffic(step), f"rank {trace.rank}"
        if config.parallel.ddp != "fsdp":  # torch starts its collectives, and no line of ours does
            planned_lines = {(row.operation, row.line) for row in plan.traffic[pp_rank]}
            assert planned_lines == {(operation.name, operation.line) for operation in step}


def plan_of(each: dict[str, Any], *, model: str = "gpt", num_microbatches: int = 4, **changes: Any) -> Plan:
    """The plan of a layout without data parallelism, whose micro-batches have one sequence."""
    sizes = {"train__global_batch_size": num_microbatches}
    return make_plan(wide_config(model, **each["changes"] | sizes | changes), each["ranks"], H100)


def peak_of_step(config: Config, rank: int, world_size: int, *, num_microbatches: int) -> tuple[int, int]:
    """The most bytes that exist in a full step above those between steps; and the bytes of gradients of vectors."""
    live = LiveBytes()
    as_on_a_gpu = patch.object(p2p, "may_open_ahead", lambda device: False)
    with on_gpu(Recorder(), lines=False), as_on_a_gpu, fake_rank(config, rank, world_size) as run, live:
        batches = local_batches([empty_batch(config)] * num_microbatches, run.ctx.cp)
        train_step(run, batches)  # the first step also allocates what all steps use
        run.ddp.wait_for_params()
        with live.peak_of() as peak:
            train_step(run, batches)
            run.ddp.wait_for_params()
        vectors = sum(parameter.nbytes for parameter in run.params.values() if parameter.dim() == 1)
    return peak[0], vectors


INTERLEAVED = layout(pipeline=2, micro=1, schedule="interleaved", virtual_pipeline=2)
STEPS = [
    layout(micro=1),
    layout(tensor=2, micro=1, sequence=True),
    *(layout(pipeline=2, micro=1, schedule=schedule) for schedule in ("1f1b", "gpipe", "zb-h1")),
    INTERLEAVED,
    layout(pipeline=2, micro=1, train__recompute="full"),
    layout(pipeline=2, micro=1, schedule="zb-h1", train__recompute="full:1"),
    context(2, "ring", micro=1),
]


@pytest.mark.parametrize(
    "number", in_tiers(range(len(STEPS)), lambda number: {*settings(STEPS[number]), *axes(STEPS[number])})
)
def test_the_peak_from_passes_is_that_of_a_full_step(number):
    """The schedule is played with the peaks of single passes, so a tensor that one leaves for another would be missing.

    A pass has neither messages in flight, of which a rank has two (interleaved four: each chunk sends before the first
    message is confirmed), nor the gradients of vectors of the backward before it, which LocalDDP adds later.
    """
    model, each = MODELS[number % 3], STEPS[number]
    plan = plan_of(each, model=model, model__fusion=("on", "off")[number % 2])
    for trace, memory in zip(plan.traces, plan.memory, strict=True):
        microbatches = {"num_microbatches": plan.num_microbatches}
        peak, vectors = peak_of_step(plan.config, trace.rank, each["ranks"], **microbatches)
        messages = (4 if each is INTERLEAVED else 2) * trace.message_bytes
        planned = memory["activations"] + memory["temporary"]
        assert planned - vectors <= peak <= planned + messages + vectors


def test_the_activations_of_1f1b_fall_with_the_pipeline_rank():
    """Rank r of p keeps p - r micro-batches. Without this, a plan would reserve the first rank's memory for all."""
    plan = plan_of(layout(pipeline=4, micro=1))
    for rank, (trace, memory) in enumerate(zip(plan.traces, plan.memory, strict=True)):
        assert memory["activations"] == (4 - rank) * trace.chunks[0].kept_bytes > 0


def test_gpipe_keeps_all_micro_batches():
    """This memory is the reason for 1F1B."""
    for count in (4, 6):
        plan = plan_of(layout(pipeline=2, micro=1, schedule="gpipe"), num_microbatches=count)
        for trace, memory in zip(plan.traces, plan.memory, strict=True):
            assert memory["activations"] == count * trace.chunks[0].kept_bytes


def test_fsdp_keeps_the_weights_that_it_does_not_gather_again():
    """The embedding and the last norm stay gathered from a forward to its backward. For a vocabulary of 150,000 tokens
    these weights can be larger than all others of a rank."""
    kept = {}
    for ddp in ("local", "fsdp"):
        config = wide_config("gpt", parallel__ddp=ddp, train__global_batch_size=8)
        kept[ddp] = make_plan(config, 8, H100).traces[0].chunks[0].kept_bytes
    root = 128 * (256 + 256 + 2)  # rows of the padded vocabulary, positions, norm
    assert kept["fsdp"] - kept["local"] == 2 * root


def trace_of(passes: dict[str, int], *, kept: int, deferred: int = 0, end: int = 0) -> RankTrace:
    """A trace with these peaks of passes."""
    chunk = Chunk({op: Pass([], peak) for op, peak in passes.items()}, {}, kept, deferred)
    empty = Pass([], 0)
    return RankTrace(0, 0, 0, {"parameters": 7}, [chunk], Pass([], end), empty, 11)


def order(text: str) -> list[Action]:
    counts = dict.fromkeys("FBIW", 0)
    actions = []
    for op in text:
        actions.append(Action(op, counts[op], 0))
        counts[op] += 1
    return actions


@pytest.mark.parametrize(
    ("text", "passes", "kept", "deferred", "end", "activations", "temporary"),
    [
        ("FBFB", {"F": 15, "B": 12}, 10, 0, 0, 10, 12),  # a backward, with the activations of its own forward
        ("FFBB", {"F": 15, "B": 12}, 10, 0, 0, 20, 12),
        ("FFBB", {"F": 40, "B": 12}, 10, 0, 0, 20, 30),  # the second forward: of its 40 it keeps 10
        ("FBFB", {"F": 15, "B": 12}, 10, 0, 50, 0, 50),  # the end of the step, when no activations exist
        ("FIFIWW", {"F": 15, "I": 12, "W": 30}, 10, 8, 0, 16, 30),  # the first W, with two deferred ones
        ("FIWFIW", {"F": 15, "I": 12, "W": 3}, 10, 8, 0, 10, 12),
    ],
)
def test_the_peak_follows_from_the_order_of_passes(text, passes, kept, deferred, end, activations, temporary):
    """Every number of the plan's memory depends on this sum."""
    trace = trace_of(passes, kept=kept, deferred=deferred, end=end)
    found = peak_bytes(trace, order(text))
    assert found == {"parameters": 7, "activations": activations, "temporary": temporary, "messages": 22}


@pytest.mark.parametrize("chunks", [1, 2])
def test_sums_go_on_during_the_last_backwards_of_other_chunks(monkeypatch, chunks):
    """After the last backward of the upper chunk, the lower one has one for each stage."""
    schedule = {"virtual_pipeline": chunks, "schedule": "interleaved"} if chunks > 1 else {}
    plan = plan_of(layout(pipeline=4, micro=1, **schedule), num_microbatches=8, model__num_layers=8)
    played: list[list[Event]] = []
    times, original = plan.durations, Plan.played
    monkeypatch.setattr(Plan, "played", lambda self, events: played.append(events) or original(self, events))
    assert len(plan.tails) == len(times) == 4

    def flops(events: list[Event]) -> int:
        return sum(kernel.flops for kernel in kernels(events))

    for trace, row in zip((plan.traces[rank] for rank in (0, 1, 3)), played, strict=True):
        lower, *upper = (flops(chunk.passes["B"].events) for chunk in trace.chunks)
        others = flops(trace.end.events) + flops(trace.next_forward.events)
        assert flops(row) == others + (sum(upper) + 4 * lower if upper else lower)


def test_the_next_forward_waits_for_the_gathers_of_weights():
    """Of the distributed optimizer. On a slow network, sums and gathers take longer than the passes beside them."""
    slow = Machines(device_of("4090"), 1)
    changes = {"train__micro_batch_size": 1, "train__global_batch_size": 2, "optim__distributed": True}
    plan = make_plan(wide_config("gpt", **changes), 2, slow)
    gathers = [each for each in plan.traces[0].end.events if isinstance(each, Operation) and each.name == "all_gather"]
    waits = [each for each in plan.traces[0].next_forward.events if isinstance(each, Wait)]
    assert len(waits) == len(gathers) >= 1
    sent = sum(row.sent_bytes for row in plan.traffic[0] if row.operation in ("reduce_scatter", "all_gather"))
    assert plan.step_seconds > sent / slow.device.network


def test_a_delayed_step_has_its_optimizer_and_no_step_is_shorter_than_its_sums():
    slow = Machines(device_of("4090"), 1)
    changes = {"train__micro_batch_size": 1, "train__global_batch_size": 2}
    plain, delayed = (
        make_plan(wide_config("gpt", **changes, **sync), 2, slow)
        for sync in ({}, {"sync__mode": "delayed", "sync__delay": 2})
    )
    steps = [sum(kernel.bytes for kernel in kernels(plan.traces[0].end.events)) for plan in (plain, delayed)]
    assert steps[1] == steps[0]
    sums = sum(row.sent_bytes for row in plain.traffic[0] if row.operation == "all_reduce") / slow.device.network
    assert sums < delayed.step_seconds < plain.step_seconds
    assert sum(step_parts(delayed).values()) == pytest.approx(delayed.step_seconds)
    assert "waits for delayed sums" in step_parts(delayed)
    assert "waits for delayed sums" not in step_parts(plain)


def test_stage_3_of_deepspeed_waits_for_its_gathers_like_fsdp():
    slow = Machines(device_of("4090"), 1)
    changes = {"train__micro_batch_size": 1, "train__global_batch_size": 2}
    fsdp, deepspeed = (
        make_plan(wide_config("gpt", **changes, **engine), 2, slow)
        for engine in ({"parallel__ddp": "fsdp"}, {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 3})
    )
    assert deepspeed.step_seconds == fsdp.step_seconds


def test_ranks_alike_are_traced_once(monkeypatch):
    """Otherwise a plan for 64 stages would take minutes. The ends of the model differ from its middle."""
    traced = []

    def recorded(config: Config, rank: int, *args: Any, **options: Any) -> RankTrace:
        traced.append(rank)
        return trace_of({"F": 1, "B": 1}, kept=1)

    monkeypatch.setattr(estimate, "trace_rank", recorded)
    each = layout(pipeline=8, micro=1)
    assert [trace.rank for trace in plan_of(each, model__num_layers=8).traces] == list(range(8))
    assert traced == [0, 1, 7]
    traced.clear()
    plan_of(each, model__num_layers=8, model__window_size=3, model__window_attn_skip_freq=4)
    assert traced == [0, 1, 3, 7]  # every fourth block has no window


def operation(name: str, ranks: tuple[int, ...], *shapes: tuple[int, ...], dtype: str = "float32") -> Operation:
    return Operation(name, Communicator(ranks, 1), tuple((shape, dtype) for shape in shapes))


def test_a_rank_sends_the_bytes_of_a_ring():
    """The times of all communication are proportional to these bytes."""
    eight = tuple(range(8))
    total = operation("all_reduce", eight, (1000,))
    assert tensor_bytes(total) == 4000 and sent_bytes(total) == 2 * 7 / 8 * 4000
    # One of the two tensors is the shard.
    for name in ("all_gather", "reduce_scatter"):
        gathered = operation(name, eight, (8, 125), (1, 125), dtype="bfloat16")
        assert tensor_bytes(gathered) == 2000 and sent_bytes(gathered) == 7 / 8 * 2000
    assert sent_bytes(operation("all_to_all", eight, (8, 125), (8, 125))) == 7 / 8 * 4000
    assert sent_bytes(operation("send", (0, 1), (1000,))) == 4000
    assert sent_bytes(operation("recv", (0, 1), (1000,))) == 0
    assert sent_bytes(operation("barrier", eight)) == 0


def test_a_group_on_several_machines_is_as_slow_as_its_share_of_the_network():
    """With the speed of NVLink between machines, the plan would put tensor parallelism across them."""
    link, network = H100.device.link, H100.device.network
    assert H100.rate(tuple(range(8))) == link
    assert H100.rate((0, 8)) == network  # seven other groups use the other cards of the machine
    assert H100.rate((0, 1, 8, 9)) == 2 * network
    assert H100.rate((0, 1, 8)) == network  # the machine with one member limits the ring
    assert H100.rate(tuple(range(16))) == min(link, 8 * network)
    inside, across = operation("all_reduce", (0, 1), (2**20,)), operation("all_reduce", (0, 8), (2**20,))
    assert H100.seconds(inside) == H100.latency((0, 1)) + 2**22 / link
    assert H100.seconds(across) == H100.latency((0, 8)) + 2**22 / network > H100.seconds(inside)
    assert H100.latency((0, 8)) > H100.latency((0, 1))
