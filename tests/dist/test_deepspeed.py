"""DeepSpeed's ZeRO trains to the same losses, norms and weights as LocalDDP."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.engines import FOUR_STEPS, OFFLOAD_ALL, OFFLOAD_OPTIMIZER, SMALL_BUCKETS, deepspeed
from tests.helpers.tiny import ENCODERS, model_with_biases, next_microbatches, tiny_config, train_tiny

# Of a case that repeats the features of another one, with other ranks or another model.
SOAK = {"marks": pytest.mark.soak}


def case(ranks: int, tensor: int, precision: str, stage: int, model: str = "codegeex", marks: Any = (), **changes: Any):
    layout = {"parallel__tensor": tensor, "train__precision": precision, **FOUR_STEPS}
    name = " ".join([f"tp={tensor} dp={ranks // tensor} {precision} stage={stage} {model}", *changes])
    return pytest.param(ranks, model, layout, deepspeed(stage, **changes), id=name, marks=marks)


CASES = [
    *(case(2, 1, "fp32", stage) for stage in range(4)),
    *(case(4, 2, "fp32", stage, **SOAK) for stage in (0, 1)),
    case(4, 2, "fp32", 2),
    case(4, 2, "fp32", 3, **SMALL_BUCKETS),
    *(case(2, 1, "fp32", stage, **SOAK, parallel__context=2) for stage in (0, 2)),
    *(case(2, 1, "fp32", stage, parallel__context=2) for stage in (1, 3)),
    case(4, 2, "fp32", 2, **SOAK, parallel__context=2, parallel__context_mode="ulysses"),
    *(case(2, 1, "bf16", stage) for stage in (1, 2, 3)),
    *(case(4, 2, "bf16", stage, model="gpt", **SOAK) for stage in (1, 2)),
    case(4, 2, "bf16", 3, model="llama", **SOAK, train__recompute="full"),
    case(2, 1, "bf16", 1, **OFFLOAD_OPTIMIZER),
    case(2, 1, "bf16", 2, **OFFLOAD_OPTIMIZER, parallel__bucket_mb=0.01),
    case(2, 1, "bf16", 3, **OFFLOAD_ALL, **SMALL_BUCKETS),
    case(2, 1, "fp32", 3, model="llama", **OFFLOAD_ALL),
    case(2, 1, "fp32", 1, model="bert"),
    case(2, 1, "fp32", 3, model="bert", **SOAK),
    case(2, 1, "fp32", 1, model="t5", **SOAK),
    case(2, 1, "fp32", 3, model="t5"),
    *(case(4, 2, "fp32", 1, model=model, **SOAK) for model in ENCODERS),
    case(4, 2, "fp32", 3, model="t5", **SOAK, **SMALL_BUCKETS),
]


@cache
def local(ranks, size: int, model: str, layout: tuple) -> dict[str, Any]:
    return ranks(size, train_tiny, model, **dict(layout))[0]


@pytest.mark.parametrize(("size", "model", "layout", "changes"), CASES)
def test_deepspeed_losses_and_gradient_norms_equal_those_of_local_ddp(ranks, size, model, layout, changes):
    """A mean instead of a sum, a norm over half of the model or accumulation in bf16 would change the first steps.

    fp32: only the order of sums differs. bf16: a master that differs in its last bit may round to a neighbouring bf16
    value, so a few weights differ by a relative 2^-8.
    """
    expected = local(ranks, size, model, tuple(layout.items()))
    loss_tolerance, norm_tolerance = (1e-5, 1e-5) if layout["train__precision"] == "fp32" else (5e-4, 5e-3)
    for got in ranks(size, train_tiny, model, **layout, **changes):
        assert len(got["loss"]) == 4
        torch.testing.assert_close(got["loss"], expected["loss"], rtol=loss_tolerance, atol=0)
        torch.testing.assert_close(got["grad_norm"], expected["grad_norm"], rtol=norm_tolerance, atol=0)
        assert got["weights"].keys() == expected["weights"].keys()
        if layout["train__precision"] == "fp32":
            for name, weight in expected["weights"].items():
                # The exact gradient of key biases is zero, and Adam scales up its rounding errors. It does so for other
                # gradients near zero too: 1e-4 is a part of the 2e-2 that four steps can move a weight.
                if not name.endswith(("linear_qkv.bias", "linear_kv.bias")):
                    torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_three_data_parallel_ranks_hold_every_element_once(ranks, stage):
    """Sizes do not divide by three, so the last rank's shard has padding; a wrong border would lose or repeat elements.
    DeepSpeed computes a mean over ranks, which rounds for three."""
    changes = {"train__global_batch_size": 6, "train__micro_batch_size": 1, "train__iterations": 3}
    expected = ranks(3, train_tiny, "gpt", **changes)[0]
    for loss, grad_norm, ranges_by_name in ranks(
        3, train_and_list_ranges, "gpt", **changes, **deepspeed(stage, **SMALL_BUCKETS)
    ):
        torch.testing.assert_close(torch.tensor(loss).double(), expected["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(grad_norm).double(), expected["grad_norm"], rtol=1e-5, atol=0)
        for name, ranges in ranges_by_name.items():
            ends = [0]
            for start, end in sorted(ranges):
                assert start == ends[-1] and end > start, name
                ends.append(end)
            assert ends[-1] == expected["weights"][name].numel(), name


def train_and_list_ranges(
    model: str, **changes: Any
) -> tuple[list[float], list[float], dict[str, list[tuple[int, int]]]]:
    """Losses, norms, and by parameter name the element ranges of exp_avg on all ranks."""
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    reports = [train_step(run, next_microbatches(run)) for _ in range(run.config.train.iterations)]
    local_ranges = {
        name: (kinds["exp_avg"].start, kinds["exp_avg"].end) for name, kinds in run.optimizer.state().items()
    }
    by_rank = [local_ranges for _ in range(run.ctx.dp.size)]
    dist.all_gather_object(by_rank, local_ranges, group=run.ctx.dp.pg)
    finalize_megatron()
    ranges_by_name = {name: [ranges[name] for ranges in by_rank if name in ranges] for name in run.table}
    return [report.loss for report in reports], [report.grad_norm for report in reports], ranges_by_name
