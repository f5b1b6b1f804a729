"""The all-reduces of our own: messages, bits and overlap of `parallel.ddp: ring_all_reduce` and `tree_all_reduce`."""

import threading
from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.load import load_config
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.engines.moves import ALGORITHMS
from megatron_lite.engines.ring import sum_in_steps
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, Shard
from megatron_lite.plan.estimate import make_plan
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.kept import CPU
from tests.helpers.split_layers import draw, world_group
from tests.helpers.tiny import next_microbatches, tiny_config

NAMES = list(ALGORITHMS)


class Sent:
    """Inside, `elements` counts those that this process sends, in any thread."""

    def __enter__(self) -> "Sent":
        self.elements = 0
        batch = dist.batch_isend_irecv

        def counted(messages: list[dist.P2POp]) -> list[dist.Work]:
            self.elements += sum(each.tensor.numel() for each in messages if each.op is dist.isend)
            return batch(messages)

        self._patch = patch.object(dist, "batch_isend_irecv", counted)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Values whose sum depends on the order, also in bf16."""
    return draw(size, seed=rank, dtype=dtype)


def sums(name: str, cases: list[tuple[int, torch.dtype]]) -> list[tuple[Tensor, int]]:
    """For each size and dtype the sum on this rank, and the elements that it has sent."""
    group, found = world_group(), []
    for size, dtype in cases:
        x = values(group.rank, size, dtype)
        with Sent() as sent:
            sum_in_steps(x, ALGORITHMS[name](group.size), group)
        found.append((x, sent.elements))
    return found


def ring_order(x: list[Tensor]) -> Tensor:
    """The sum in one process: chunk c from rank c around the ring."""
    count, size = len(x), len(x[0])
    chunks = [torch.nn.functional.pad(each, (0, -size % count)).chunk(count) for each in x]
    return torch.cat([reduce(torch.add, [chunks[(c + at) % count][c] for at in range(count)]) for c in range(count)])[
        :size
    ]


def tree_order(x: list[Tensor], rank: int = 0) -> Tensor:
    """The sum in one process: a rank, then all below its first child, then all below its second one."""
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < len(x)]
    return reduce(torch.add, [x[rank], *(tree_order(x, child) for child in children)])


ORDERS = {"ring_all_reduce": ring_order, "tree_all_reduce": tree_order}


def elements(name: str, num_ranks: int, rank: int, size: int) -> int:
    """The elements that a rank sends, by the formulas of `engines/moves.py`."""
    if name == "ring_all_reduce":
        return 2 * (num_ranks - 1) * -(-size // num_ranks)
    return ((rank > 0) + (2 * rank + 1 < num_ranks) + (2 * rank + 2 < num_ranks)) * size


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_a_sum_has_the_bits_of_its_order_and_sends_the_elements_of_its_formula(ranks, num_ranks):
    """Zero tolerance: replicas with other bits drift apart, and another order would change with the backend."""
    sizes = [1, num_ranks - 1, 17, *([1_000_003] if num_ranks == 3 else [])]
    cases = [(size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]
    for name, in_order in ORDERS.items():
        results = ranks(num_ranks, sums, name, cases)
        for case, (size, dtype) in enumerate(cases):
            expected = in_order([values(rank, size, dtype) for rank in range(num_ranks)])
            for rank, found in enumerate(results):
                total, sent = found[case]
                assert torch.equal(total, expected), (name, size, dtype, rank)
                assert sent == elements(name, num_ranks, rank, size), (name, size, rank)


class Chain(nn.Module):
    """Layers whose backward calls `reached` with their number, the last layer first."""

    def __init__(self, reached: Any):
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(64) for _ in range(3)])
        self.reached = reached

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in enumerate(self.weights):
            x = (x * weight).sum().reshape(1)
            x.register_hook(lambda _, layer=layer: self.reached(layer))
        return x


def sum_during_backward(name: str) -> list[float]:
    """The gradients of a backward whose first layer, the last one in backward, waits for sums of later layers."""
    ctx = ParallelContext.create(Grid(dp=dist.get_world_size()), torch.device("cpu"), timeout_seconds=20)
    ended = threading.Semaphore(0)

    def reached(layer: int) -> None:
        if layer == 0:
            assert all(ended.acquire(timeout=15) for _ in range(2)), "no sum has ended during backward"

    def noted(*arguments: Any) -> list[dist.Work]:
        found = sum_in_steps(*arguments)
        ended.release()
        return found

    with patch("megatron_lite.engines.ring.sum_in_steps", noted):
        model = Chain(reached)
        params = dict(model.named_parameters())
        table = {each: ParamMeta(tuple(weight.shape), Shard(), "normal") for each, weight in params.items()}
        config = load_config(None, [f"parallel.ddp={name}", "parallel.bucket_mb=1e-9"])
        ddp = wrap_ddp(config, [model], params, table, ctx, grad_dtype=torch.float32)
        ddp.begin_backward(0, is_last=True)
        ddp.module(0)(torch.full((1,), float(ctx.rank))).backward()
        ddp.finish_grad_sync()
    return [grad.unique().item() for grad in ddp.main_grads.values()]


@pytest.mark.parametrize("name", NAMES)
def test_all_steps_of_a_bucket_run_while_backward_computes_earlier_layers(ranks, name):
    """Backward waits for the sums of two buckets. If a later step waited for the end of backward, nothing would
    overlap."""
    gradient = 64.0**2 * sum(range(4))  # weights are 1: the sizes of the other two layers, and the inputs of all ranks
    assert ranks(4, sum_during_backward, name) == [[gradient] * 3] * 4


def traffic(name: str) -> tuple[int, int, int]:
    """Elements that this rank sends in a step for its gradients, those of its plan, and of its buckets."""
    config = tiny_config("gpt", parallel__ddp=name, parallel__bucket_mb=0.02, train__micro_batch_size=1)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    with Sent() as sent:
        train_step(run, next_microbatches(run))
    size = sum(grads.numel() for grads in run.ddp.grad_memory())
    finalize_megatron()
    return sent.elements, size, ctx.dp.size


def test_a_plan_counts_the_bytes_that_the_first_rank_sends(ranks):
    """Otherwise a job would be slower than planned."""
    for name in NAMES:
        sent, size, dp = ranks(4, traffic, name)[0]
        config = tiny_config("gpt", parallel__ddp=name, parallel__bucket_mb=0.02, train__micro_batch_size=1)
        planned = make_plan(config, 4, CPU).traffic[0]
        assert sum(row.sent_bytes for row in planned if row.operation == "send") == 4 * sent
        assert sent == elements(name, dp, 0, size)
