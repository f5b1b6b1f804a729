"""The distributed optimizer on real ranks: LocalDDP's training to the bit, with every parameter updated by one rank."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.load import load_config
from megatron_lite.ddp import sharded
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.ddp.sharded import ShardedDDP
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer
from megatron_lite.optim.scaler import ConstantScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, Shard
from tests.e2e.tiny import train_tiny
from tests.ranks import RanksFailed

STEPS = 10
LAYOUTS = {
    "dp 2": (2, {}),
    "dp 2, many buckets": (2, {"parallel__bucket_mb": 0.001}),
    "dp 4, codegeex": (4, {"model": "codegeex"}),
    "dp 2, bf16": (2, {"train__precision": "bf16", "parallel__bucket_mb": 0.01}),
    "dp 2, fp16 with overflows": (2, {"train__precision": "fp16", "optim__initial_loss_scale": 2.0**24}),
    "tp 2, dp 2": (4, {"parallel__tensor": 2, "model": "llama"}),
    "pp 2, dp 2, tied": (4, {"parallel__pipeline": 2, "parallel__schedule": "zb-h1"}),
    "pp 2, dp 2, tied, bf16": (4, {"parallel__pipeline": 2, "train__precision": "bf16"}),
    "pp 2, vpp 2, dp 2, tied": (
        4,
        {
            "parallel__pipeline": 2,
            "parallel__virtual_pipeline": 2,
            "parallel__schedule": "interleaved",
            "model__num_layers": 4,
        },
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_steps_are_those_of_plain_adam_to_the_bit(ranks, name):
    """Clipping in every step, two decay groups, sizes that no number of ranks divides, biases smaller than dp: gloo adds
    up both ways in the same order, and elements are cut where the vector kernel has a border anyway.

    The norm is a sum in fp64 of other pieces, so it may differ in its last bits; the clip coefficient then rounds to
    the same fp32.
    """
    size, changes = LAYOUTS[name]
    changes = {
        "model": "gpt",
        "train__iterations": STEPS,
        "train__micro_batch_size": 1,
        "optim__hysteresis": 1,
    } | changes
    results = [ranks(size, train_tiny, optim__distributed=choice, **changes) for choice in ("false", "true")]
    for plain, shared_out in zip(*results, strict=True):
        assert torch.equal(shared_out["loss"], plain["loss"])
        assert (shared_out["grad_norm"] / plain["grad_norm"] - 1).abs().nan_to_num().max() < 1e-13
        assert plain["grad_norm"].isfinite().sum() >= 3 and (plain["grad_norm"].isfinite().all() or "fp16" in name)
        for key, weight in plain["weights"].items():
            assert torch.equal(shared_out["weights"][key], weight), key


class Uncalled(nn.Module):
    """Uses a parameter of a module that it never calls, as a head that shares the embedding's weight may."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        for layer in (self.first, self.second):
            nn.init.eye_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.second.weight


class Later:
    """A gather that happens when it is waited for, and never before."""

    def __init__(self, log: list[int], flat: Tensor, own: Tensor, group):
        self.log, self.flat, self.own, self.group = log, flat, own, group

    def wait(self) -> None:
        self.log.append(self.flat.numel())
        GATHER(self.flat, self.own, group=self.group)


GATHER = sharded.all_gather_single


def engine_of(model: nn.Module, ctx: ParallelContext) -> ShardedDDP:
    params = dict(model.named_parameters())
    table = {name: ParamMeta(tuple(parameter.shape), Shard(), "normal") for name, parameter in params.items()}
    config = load_config(None, ["optim.distributed=true", "parallel.bucket_mb=0.001"])
    ddp = wrap_ddp(config, [model], params, table, ctx, grad_dtype=torch.float32)
    assert type(ddp) is ShardedDDP
    return ddp


def step_with_late_gathers(uncalled: bool) -> tuple[list[int], bool]:
    """Bytes gathered by the time that the first layer runs, and whether the second forward saw the new weights."""
    ctx = ParallelContext.create(Grid(dp=2), torch.device("cpu"), timeout_seconds=60)
    model = Uncalled() if uncalled else nn.Sequential(Uncalled().first, nn.Linear(16, 32, bias=False))
    ddp = engine_of(model, ctx)
    table = {name: ParamMeta(tuple(p.shape), Shard(), "normal") for name, p in model.named_parameters()}
    optimizer = MixedPrecisionOptimizer(table, ddp, ConstantScaler(), load_config(None).optim, ctx)
    log: list[int] = []
    late = lambda flat, own, group, async_op: Later(log, flat, own, group)
    with mock.patch.object(sharded, "all_gather_single", late):
        ddp.zero_grad()
        ddp.begin_backward(0, is_last=True)
        ddp.module(0)(torch.ones(2, 16)).sum().backward()
        finalize_grads(ddp, table, ctx)
        optimizer.step(lr=0.1)
        assert log == []
        waited: list[int] = []
        first = model.first if uncalled else model[0]
        first.register_forward_hook(lambda *_: waited.extend(log if not waited else ()))
        before = ddp.module(0)(torch.ones(2, 16))
        ddp.wait_for_params()
    return waited, torch.equal(before, model(torch.ones(2, 16)))


def test_the_next_forward_waits_for_a_parameter_only_just_before_it_uses_it(ranks):
    """Waiting for all of them first would hide no communication; too late would compute with the weights of before."""
    for waited, fresh in ranks(2, step_with_late_gathers, uncalled=False):
        assert waited == [256] and fresh


def test_a_parameter_used_without_a_call_of_its_module_is_up_to_date(ranks):
    for waited, fresh in ranks(2, step_with_late_gathers, uncalled=True):
        assert sorted(waited) == [256, 256] and fresh


def mix_number_formats() -> None:
    ctx = ParallelContext.create(Grid(dp=2), torch.device("cpu"), timeout_seconds=60)
    engine_of(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).double()), ctx)


def test_parameters_of_several_number_formats_are_refused(ranks):
    with pytest.raises(
        RanksFailed, match=r"optim.distributed needs parameters of one number format, but the model has "
    ):
        ranks(2, mix_number_formats)
