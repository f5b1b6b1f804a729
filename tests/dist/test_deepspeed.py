"""DeepSpeed's ZeRO trains the model that LocalDDP trains."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.engines import FOUR_STEPS, OFFLOAD_ALL, OFFLOAD_OPTIMIZER, SMALL_BUCKETS, deepspeed
from tests.helpers.tiny import model_with_biases, portion, tiny_config, train_tiny


def case(ranks: int, tensor: int, precision: str, stage: int, model: str = "codegeex", **changes: Any):
    layout = {"parallel__tensor": tensor, "train__precision": precision, **FOUR_STEPS}
    name = " ".join([f"tp={tensor} dp={ranks // tensor} {precision} stage={stage} {model}", *changes])
    return pytest.param(ranks, model, layout, deepspeed(stage, **changes), id=name)


CASES = [
    *(case(2, 1, "fp32", stage) for stage in range(4)),
    *(case(4, 2, "fp32", stage) for stage in range(3)),
    case(4, 2, "fp32", 3, **SMALL_BUCKETS),
    *(case(2, 1, "bf16", stage) for stage in (1, 2, 3)),
    *(case(4, 2, "bf16", stage, model="gpt") for stage in (1, 2)),
    case(4, 2, "bf16", 3, model="llama", train__recompute="full"),
    case(2, 1, "bf16", 1, **OFFLOAD_OPTIMIZER),
    case(2, 1, "bf16", 2, **OFFLOAD_OPTIMIZER, parallel__bucket_mb=0.01),
    case(2, 1, "bf16", 3, **OFFLOAD_ALL, **SMALL_BUCKETS),
    case(2, 1, "fp32", 3, model="llama", **OFFLOAD_ALL),
]


@cache
def local(ranks, size: int, model: str, layout: tuple) -> dict[str, Any]:
    return ranks(size, train_tiny, model, **dict(layout))[0]


@pytest.mark.parametrize(("size", "model", "layout", "changes"), CASES)
def test_losses_and_gradient_norms_are_those_of_local_ddp(ranks, size, model, layout, changes):
    """A mean where a sum belongs, a norm over half of a model or a rounded accumulation would show in the first steps.

    fp32: only the order of sums differs. bf16: a master that differs in its last bit may be rounded to the next number
    of 8 bits, so a few of the weights differ by 2^-8 of themselves.
    """
    truth = local(ranks, size, model, tuple(layout.items()))
    loss_tolerance, norm_tolerance = (1e-5, 1e-5) if layout["train__precision"] == "fp32" else (5e-4, 5e-3)
    for got in ranks(size, train_tiny, model, **layout, **changes):
        assert len(got["loss"]) == 4
        torch.testing.assert_close(got["loss"], truth["loss"], rtol=loss_tolerance, atol=0)
        torch.testing.assert_close(got["grad_norm"], truth["grad_norm"], rtol=norm_tolerance, atol=0)
        assert got["weights"].keys() == truth["weights"].keys()
        if layout["train__precision"] == "fp32":
            for name, weight in truth["weights"].items():
                if not name.endswith("linear_qkv.bias"):  # keys have a true gradient of zero, and Adam magnifies it
                    torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=2e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_three_data_parallel_ranks_hold_every_element_once(ranks, stage):
    """Three does not divide what is shared out, so the last rank's part is padded; and a mean of three is rounded."""
    changes = {"train__global_batch_size": 6, "train__micro_batch_size": 1, "train__iterations": 3}
    truth = ranks(3, train_tiny, "gpt", **changes)[0]
    for loss, grad_norm, held in ranks(3, trained_and_held, "gpt", **changes, **deepspeed(stage, **SMALL_BUCKETS)):
        torch.testing.assert_close(torch.tensor(loss).double(), truth["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(grad_norm).double(), truth["grad_norm"], rtol=1e-5, atol=0)
        for name, runs in held.items():
            ends = [0]
            for start, end in sorted(runs):
                assert start == ends[-1] and end > start, name
                ends.append(end)
            assert ends[-1] == truth["weights"][name].numel(), name


def trained_and_held(model: str, **changes: Any) -> tuple[list[float], list[float], dict[str, list[tuple[int, int]]]]:
    """Losses, norms, and by name the runs of exp_avg on all ranks."""
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    reports = [train_step(run, portion(run)) for _ in range(run.config.train.iterations)]
    mine = {name: (kinds["exp_avg"].start, kinds["exp_avg"].end) for name, kinds in run.optimizer.state().items()}
    of_ranks = [mine for _ in range(run.ctx.dp.size)]
    dist.all_gather_object(of_ranks, mine, group=run.ctx.dp.pg)
    finalize_megatron()
    runs = {name: [runs[name] for runs in of_ranks if name in runs] for name in run.table}
    return [report.loss for report in reports], [report.grad_norm for report in reports], runs
