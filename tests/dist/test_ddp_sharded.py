"""The distributed optimizer on real ranks trains bitwise as LocalDDP does; one rank updates each parameter element."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.load import load_config
from megatron_lite.ddp import sharded
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.ddp.sharded import ShardedDDP
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard
from tests.helpers.tiny import train_tiny

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


# Other layouts have each of their features.
IN_SOAK = ("dp 2", "pp 2, dp 2, tied, bf16")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name in IN_SOAK)) for name in LAYOUTS])
def test_ten_steps_equal_those_of_the_replicated_optimizer_bitwise(ranks, name):
    """A wrong shard border, decay group or clip coefficient would change a weight. Sizes do not divide by dp, and some
    biases have fewer elements than ranks. Exact: gloo sums in the same order either way, and shards end where vector
    kernels end.

    The norm is an fp64 sum over other slices, so it may differ in its last bits; the clip coefficient rounds to the
    same fp32 value.
    """
    size, changes = LAYOUTS[name]
    changes = {
        "model": "gpt",
        "train__iterations": STEPS,
        "train__micro_batch_size": 1,
        "optim__hysteresis": 1,
    } | changes
    results = [ranks(size, train_tiny, optim__distributed=choice, **changes) for choice in ("false", "true")]
    for plain, sharded_run in zip(*results, strict=True):
        assert torch.equal(sharded_run["loss"], plain["loss"])
        assert (sharded_run["grad_norm"] / plain["grad_norm"] - 1).abs().nan_to_num().max() < 1e-13
        assert plain["grad_norm"].isfinite().sum() >= 3 and (plain["grad_norm"].isfinite().all() or "fp16" in name)
        for key, weight in plain["weights"].items():
            assert torch.equal(sharded_run["weights"][key], weight), key


class ReadsForeignParameter(nn.Module):
    """Reads a parameter of a submodule that it calls afterwards or, without `calls`, never."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 64, bias=False)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.second.weight.sum(0)
        return self.second(x) if self.calls else x


class DeferredGather:
    """A gather that runs in `wait`, and not before."""

    def __init__(self, log: list[int], flat: Tensor, own: Tensor, group):
        self.log, self.flat, self.own, self.group = log, flat, own, group

    def wait(self) -> None:
        self.log.append(self.flat.numel())
        GATHER(self.flat, self.own, group=self.group)


GATHER = sharded.all_gather_single


def engine_of(model: nn.Module, ctx: ParallelContext) -> ShardedDDP:
    params = dict(model.named_parameters())
    config = load_config(None, ["optim.distributed=true", "parallel.bucket_mb=0.001"])
    ddp = wrap_ddp(config, [model], params, table_of(model), ctx, grad_dtype=torch.float32)
    assert type(ddp) is ShardedDDP
    return ddp


def table_of(model: nn.Module) -> ParamTable:
    return {name: ParamMeta(tuple(p.shape), Shard(), "normal") for name, p in model.named_parameters()}


def step_with_deferred_gathers(model: nn.Module) -> dict[str, Any]:
    """The order of events after a step whose gathers run only when they are waited for."""
    ctx = ParallelContext.create(Grid(dp=2), torch.device("cpu"), timeout_seconds=60)
    ddp = engine_of(model, ctx)
    optimizer = MixedPrecisionOptimizer(table_of(model), ddp, LossScaler(), load_config(None).optim, ctx)
    waited: list[int] = []
    started: list[int] = []
    groups = []

    def defer(flat: Tensor, own: Tensor, group: Any, async_op: bool) -> DeferredGather:
        started.append(flat.numel())
        groups.append(group)
        return DeferredGather(waited, flat, own, group)

    x = torch.ones(2, 32)
    with mock.patch.object(sharded, "all_gather_single", defer):
        ddp.zero_grad()
        ddp.begin_backward(0, is_last=True)
        ddp.module(0)(x).sum().backward()
        finalize_grads(ddp, table_of(model), ctx)
        optimizer.step(lr=0.1)
        at_return = list(waited)
        by_first: list[int] = []
        hook = next(model.children()).register_forward_hook(lambda *_: by_first.extend(waited))
        output = ddp.module(0)(x)
        hook.remove()
        optimizer.step(lr=0.1)
        saved = {name: local.values.clone() for name, local in optimizer.weights().items()}
    return {
        "started": started,
        "at_return": at_return,
        "by_first": by_first,
        "output": output.detach(),
        "saved": saved,
        "separate_group": all(group is not ctx.dp.pg for group in groups),
    }


def step_of_two_layers() -> dict[str, Any]:
    torch.manual_seed(0)
    return step_with_deferred_gathers(nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 64, bias=False)))


def step_with_foreign_read(calls: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    return step_with_deferred_gathers(ReadsForeignParameter(calls))


def test_forward_waits_for_a_parameter_just_before_its_use(ranks):
    """Waiting for all gathers first would hide no communication. Gathers start in the order of use, in a separate
    group, so that small all-reduces do not queue behind them."""
    for got in ranks(2, step_of_two_layers):
        assert got["at_return"] == [] and got["by_first"] == [1024]
        assert got["started"][:2] == [1024, 2048] and got["separate_group"]


@pytest.mark.parametrize("calls", [True, False])
def test_a_parameter_read_outside_its_module_is_up_to_date(ranks, calls):
    """The forward hook of its module runs too late or never: training would use the previous step's weights."""
    for got in ranks(2, step_with_foreign_read, calls):
        assert got["at_return"] == []
        fresh = ranks(1, adamw_step_in_one_process, calls)[0]
        torch.testing.assert_close(got["output"], fresh, rtol=1e-6, atol=1e-6)


def adamw_step_in_one_process(calls: bool) -> Tensor:
    """The output after one step of plain AdamW on the two ranks' summed gradient."""
    torch.manual_seed(0)
    model, optim = ReadsForeignParameter(calls), load_config(None).optim
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=optim.weight_decay, betas=(0.9, 0.999))
    (2 * model(torch.ones(2, 32)).sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
    adam.step()
    return model(torch.ones(2, 32)).detach()


def test_saved_weights_are_those_after_the_step_on_all_ranks(ranks):
    """A checkpoint written while gathers are in flight would mix new weights with old ones."""
    first, second = ranks(2, step_of_two_layers)
    for name, weight in first["saved"].items():
        assert torch.equal(weight, second["saved"][name])


def mix_dtypes() -> None:
    ctx = ParallelContext.create(Grid(dp=2), torch.device("cpu"), timeout_seconds=60)
    engine_of(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).double()), ctx)


def test_parameters_of_several_dtypes_raise_an_error(ranks):
    """A bucket has one dtype; parameters of another dtype would be converted silently."""
    with pytest.raises(RanksFailed, match=r"optim.distributed: got parameters of .*; needs one dtype; use "):
        ranks(2, mix_dtypes)
