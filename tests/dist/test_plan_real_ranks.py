"""The plan of a job against real ranks: training state and communication to the byte, and activations.

A plan is traced on one process without values. Here the same layouts train over Gloo, and each rank counts what it
holds, keeps for backward and communicates in a step.
"""

from collections.abc import Hashable
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from megatron_lite.model import attention, bf16_attention
from megatron_lite.plan.communication import CommunicationRecorder
from megatron_lite.plan.estimate import Plan, make_plan
from megatron_lite.plan.fake_world import empty_batch
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import local_batches, train_step
from tests.helpers.axes import axes, settings
from tests.helpers.cover import in_tiers
from tests.helpers.kept import CPU, Counts, KeptBytes, planned_traffic, recorded_traffic, wide_config
from tests.helpers.layouts import context, layout, name_of

MODELS = ("gpt", "codegeex", "llama")
FP32: dict[str, Any] = {"train__precision": "fp32"}
MATH: dict[str, Any] = {
    "model__attention": "math",
    "data__seq_length": 128,
}  # shorter, or the scores would be most of the memory
ZERO_1: dict[str, Any] = {"optim__distributed": "true"}
INTERLEAVED: dict[str, Any] = {"schedule": "interleaved", "virtual_pipeline": 2}
LAYOUTS = [
    layout(micro=2, **MATH),
    layout(pipeline=2, micro=2, **MATH),
    layout(tensor=2, micro=1, **FP32),
    layout(tensor=4, micro=1, sequence=True),
    layout(data=2, micro=1),
    layout(data=2, micro=1, **ZERO_1),
    layout(data=4, micro=1, **ZERO_1, **FP32),
    layout(data=2, micro=1, ddp="fsdp"),
    layout(data=2, micro=1, ddp="torch"),
    layout(tensor=2, data=2, micro=1, ddp="fsdp", sequence=True, **FP32),
    layout(tensor=2, data=2, micro=1, ddp="torch", **FP32),
    layout(pipeline=2, micro=1, schedule="gpipe"),
    layout(pipeline=2, micro=1, schedule="zb-h1", **FP32),
    layout(pipeline=4, micro=1),
    layout(pipeline=2, micro=1, **INTERLEAVED),
    layout(tensor=2, pipeline=2, micro=1, sequence=True, **INTERLEAVED),
    layout(data=2, pipeline=2, micro=1, **ZERO_1),
    context(2, "ring", micro=1, **FP32),
    context(2, "all_gather", micro=1, ddp="fsdp"),
    context(2, "ulysses", tensor=2, micro=1, sequence=True),
    context(2, "all_gather", data=2, micro=1, **ZERO_1),
    context(2, "ring", pipeline=2, micro=1, schedule="zb-h1"),
    layout(data=4, micro=1, ddp="fsdp", fsdp_shard=2),
    layout(data=4, micro=1, **ZERO_1, optim__distributed_shard=2),
]
CASES = [(MODELS[number % 3], each) for number, each in enumerate(LAYOUTS)]
KINDS = ("none", "activation", "selective", "full", "full:1", "uniform:2", "stage")
PLACES = [
    layout(micro=1),
    layout(tensor=2, micro=1, sequence=True),
    *(context(2, mode, micro=1) for mode in ("ring", "all_gather", "ulysses")),
    layout(pipeline=2, micro=1),
]
RECOMPUTED = [
    (model, {**place, "changes": place["changes"] | {"train__recompute": kind}})
    for model, kind, place in product(MODELS, KINDS, PLACES)
]


class Measured(NamedTuple):
    """A step of a real rank."""

    pp_rank: int
    state: dict[str, int]
    num_counters: int  # of the optimizer, which counts the steps of each tensor that it updates
    activations: int
    traffic: Counts


def measured(model: str, changes: dict[str, Any]) -> Measured:
    """The second step of this rank, with the kernels that keep the tensors of a GPU's kernels.

    On a CPU, queries, keys and values are copied for speed, and bf16 may have its own kernel. The plan has neither.
    """
    config = wide_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    batches = local_batches([empty_batch(config, torch.device("cpu"))] * num_microbatches(changes), ctx.cp)
    recorder, kept = CommunicationRecorder(), KeptBytes()
    with ExitStack() as stack:
        stack.enter_context(patch.object(attention, "_heads_first", lambda x: x.permute(1, 2, 0, 3)))
        stack.enter_context(patch.object(bf16_attention, "can_compute", lambda query, dropout: False))
        # In its second step, torch's DDP communicates to build its buckets again.
        for _ in range(2 if config.parallel.ddp == "torch" else 1):
            train_step(run, batches)
            run.ddp.wait_for_params()
        stack.enter_context(recorder.recording())
        stack.enter_context(kept.following(run))
        train_step(run, batches)
        run.ddp.wait_for_params()
    traffic = recorded_traffic(recorder.operations)
    result = Measured(ctx.pp.rank, run.optimizer.bytes_held(), len(run.ddp.owned), kept.highest, traffic)
    finalize_megatron()
    return result


def num_microbatches(changes: dict[str, Any]) -> int:
    """Of each rank of dp: as many as the longest pipeline here has stages, or two, of which one is the last."""
    return 4 if changes["parallel__pipeline"] > 1 else 2


def with_batch(each: dict[str, Any]) -> dict[str, Any]:
    """The changes of a layout, and its global batch size."""
    changes = each["changes"]
    of_model = changes["parallel__tensor"] * changes["parallel__pipeline"] * changes.get("parallel__context", 1)
    size = each["ranks"] // of_model * num_microbatches(changes) * changes["train__micro_batch_size"]
    return changes | {"train__global_batch_size": size}


def check(ranks, model: str, each: dict[str, Any]) -> None:
    """Compare the plan of a layout with each of its ranks."""
    changes = with_batch(each)
    plan = make_plan(wide_config(model, **changes), each["ranks"], CPU)
    real = ranks(each["ranks"], measured, model, changes)
    for rank, got in enumerate(real):
        assert got.state == planned_state(plan, got, real), f"rank {rank}"
        expected = plan.memory[got.pp_rank]["activations"]
        # 1%: statistics of norms, which are fp32 on a GPU and bf16 on a CPU, or kept on one only; with zb-h1 gradients
        # of vectors, which exist until the next backward. 4 KiB: losses and labels, where nothing else is kept.
        assert got.activations == pytest.approx(expected, rel=0.01, abs=4096), f"rank {rank}"
        assert got.traffic == planned_traffic(plan, got.pp_rank), f"rank {rank}"


def planned_state(plan: Plan, got: Measured, real: list[Measured]) -> dict[str, int]:
    """The state of a rank as its plan has it, which is that of the first rank at this place of the pipeline.

    The distributed optimizer divides tensors by bytes, so its ranks have different numbers of them, with a counter of
    4 bytes each. The state of torch's DDP follows from arithmetic, without counters.
    """
    trace = plan.traces[got.pp_rank]
    counted = 0 if plan.config.parallel.ddp == "torch" else real[trace.rank].num_counters
    optimizer = trace.state_bytes["optimizer"] + 4 * (got.num_counters - counted)
    return {**trace.state_bytes, "optimizer": optimizer}


Case = tuple[str, dict[str, Any]]


def features(case: Case) -> set[Hashable]:
    """Two ranks along an axis are enough: more of them hold, keep and send by the same arithmetic."""
    model, each = case
    return {model, *axes(each), *(name for name in settings(each) if not name.startswith("more than two"))}


def features_of_recomputed(case: Case) -> set[Hashable]:
    return features(case) if case[1]["changes"]["train__recompute"] != "none" else set()


def ranks_of(case: Case) -> float:
    return case[1]["ranks"]


def name(case: Case) -> str:
    return f"{case[0]}-{name_of(case[1])}"


@pytest.mark.parametrize(("model", "each"), in_tiers(CASES, features, ranks_of, name=name))
def test_real_ranks_hold_keep_and_send_what_the_plan_has(ranks, model, each):
    """Otherwise a job that fits by its plan would run out of memory, or would be slower than planned."""
    check(ranks, model, each)


@pytest.mark.parametrize(("model", "each"), in_tiers(RECOMPUTED, features_of_recomputed, ranks_of, name=name))
def test_recomputation_keeps_what_the_plan_has(ranks, model, each):
    """The plan would recommend a recomputation that does not save its memory."""
    check(ranks, model, each)
