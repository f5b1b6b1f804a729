"""The simulation of NCCL: every layout of the parity matrix passes, and planted mistakes are found."""

import multiprocessing
import re
from collections.abc import Hashable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import validate
from megatron_lite.ddp.local import GradBuffers
from megatron_lite.parallel import collectives, linear
from megatron_lite.plan.communication import (
    Communicator,
    Operation,
    agreement_problems,
    memory_problems,
    problems,
    progress_problems,
    record_rank,
)
from tests.helpers.axes import engine, num_layers, parts, sizes
from tests.helpers.command import ROOT
from tests.helpers.cover import in_tiers
from tests.helpers.layouts import BATCH
from tests.helpers.layouts import OF_SEVERAL_RANKS as LAYOUTS
from tests.helpers.tiny import tiny_config


def steps(each: dict[str, Any]) -> int:
    """Two where a step leaves something to the next one: weights that are gathered, or torch's new buckets."""
    return 1 if engine(each) == "local" else 2


def record(config: Config, world_size: int, *, steps: int = 2) -> dict[int, list[Operation]]:
    """The operations of every rank. The models are so small that computing is faster than the meta device."""
    validate(config, world_size)
    count = BATCH // (config.train.micro_batch_size * config.parallel.data(world_size))
    sizes = {"num_microbatches": count, "steps": steps, "device": torch.device("cpu")}
    return {rank: record_rank(config, rank, world_size, **sizes) for rank in range(world_size)}


def microbatches(each: dict[str, Any]) -> int:
    return BATCH // (each["changes"]["train__micro_batch_size"] * sizes(each)["data"])


def parts_of(name: str) -> set[Hashable]:
    """Also whether there are fewer micro-batches than stages, as many, or more."""
    model, each = LAYOUTS[name]
    stages = sizes(each)["pipeline"]
    amount = ("as many", "more", "fewer")[(microbatches(each) > stages) - (microbatches(each) < stages)]
    return parts(model, each) | ({amount} if stages > 1 else set())


def cost_of(name: str) -> float:
    _, each = LAYOUTS[name]
    return each["ranks"] * (1 + microbatches(each)) * steps(each)


@pytest.mark.parametrize("name", in_tiers(list(LAYOUTS), parts_of, cost_of, name=str))
def test_a_layout_communicates_as_nccl_needs_it(name):
    """Its members agree, its tensors are contiguous, and it ends even with one queue on each rank."""
    model, each = LAYOUTS[name]
    changes = each["changes"] | {"train__global_batch_size": BATCH, "model__num_layers": num_layers(each)}
    ranks = record(tiny_config(model, train__precision="bf16", **changes), each["ranks"], steps=steps(each))
    assert all(ranks.values())
    assert problems(ranks) == []


def small(**changes) -> Config:
    return tiny_config("gpt", train__precision="bf16", train__global_batch_size=BATCH, **changes)


def test_a_planted_other_order_is_found(monkeypatch):
    """A rank that sums its buckets from the last to the first would add gradients of different parameters."""
    config = small(parallel__bucket_mb=0.001, train__micro_batch_size=6)
    ranks = record(config, 2)
    real = GradBuffers.__init__

    def reversed_buckets(self, buffers):
        real(self, buffers)
        self.buckets.reverse()

    monkeypatch.setattr(GradBuffers, "__init__", reversed_buckets)
    ranks[1] = record_rank(config, 1, 2, num_microbatches=1)
    (found,) = problems(ranks)
    assert re.match(r"ranks 0, 1 \(communicator 0\): operation \d+: rank 0 starts all_reduce of float32 \[", found)


def test_a_planted_missing_rank_is_found(monkeypatch):
    """One rank of tensor parallelism leaves out a sum."""
    config = small(parallel__tensor=2, train__micro_batch_size=12)
    ranks = record(config, 2)
    monkeypatch.setattr(linear, "all_reduce_async", lambda x, group: (x, lambda: None))
    ranks[1] = record_rank(config, 1, 2, num_microbatches=1)
    (found,) = agreement_problems(ranks)
    assert "rank 0 starts all_reduce of bfloat16 [16, 12, 32]" in found
    assert "at parallel/linear.py:" in found
    assert any("waits forever in all_reduce" in line for line in progress_problems(ranks))


def test_a_planted_buffer_that_is_not_contiguous_is_found(monkeypatch):
    config = small(parallel__tensor=2, train__micro_batch_size=12)

    def transposed(x, group, op="sum"):
        x = x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x
        dist.all_reduce(x, group=group.pg)
        return x

    monkeypatch.setattr(collectives, "all_reduce", transposed)
    operations = record_rank(config, 0, 2, num_microbatches=1)
    found = memory_problems({0: operations})
    assert found
    assert all(
        line.endswith("on rank 0: a tensor is not contiguous, and NCCL would send other memory") for line in found
    )


PAIR, OTHER = Communicator((0, 1), 1), Communicator((0, 1), 2)


def operation(name: str, communicator: Communicator = PAIR, peer: int = -1, size: int = 4) -> Operation:
    return Operation(name, communicator, (((size,), "float32"),), peer)


def test_two_communicators_in_another_order_deadlock_with_one_queue():
    """Each communicator alone agrees, so only the simulated queues show it."""
    first, second = operation("all_reduce"), operation("all_reduce", OTHER)
    ranks = {0: [first, second], 1: [second, first]}
    assert agreement_problems(ranks) == []
    assert [line.split(" of ")[0] for line in problems(ranks)] == [
        "rank 0 waits forever in all_reduce",
        "rank 1 waits forever in all_reduce",
    ]


def test_two_ranks_that_receive_before_they_send_deadlock():
    there, back = operation("send", PAIR, 1), operation("recv", OTHER, 1)
    other = operation("recv", PAIR, 0), operation("send", OTHER, 0)
    assert progress_problems({0: [there, back], 1: list(other)}) == []
    assert len(progress_problems({0: [back, there], 1: list(other)})) == 2


def test_messages_of_another_size_or_number_are_found():
    sent = operation("send", PAIR, 1)
    for received in ([operation("recv", PAIR, 0, size=5)], [], 2 * [operation("recv", PAIR, 0)]):
        (found,) = agreement_problems({0: [sent], 1: received})
        assert "rank 0 (sends)" in found
        assert "rank 1 (receives)" in found


@pytest.mark.soak
def test_512_ranks_of_codegeex_13b_communicate_as_nccl_needs_it():
    """On the meta device, with the published tensor-parallel size 8: one step of one micro-batch."""
    config = load_config(ROOT / "configs" / "codegeex_13b.yaml", ["train.global_batch_size=64"])
    validate(config, 512)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        step = partial(record_rank, config, world_size=512, num_microbatches=1, steps=1)
        ranks = dict(enumerate(pool.map(step, range(512), chunksize=16)))
    communicators = {operation.communicator for operations in ranks.values() for operation in operations}
    assert len(communicators) == 64 + 8 + 1  # tp, dp and the world
    assert problems(ranks) == []
