"""The optimizer over tensor- and data-parallel ranks trains as plain PyTorch does on full tensors."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import OptimConfig
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.optim.clip import grad_sums, norm_of
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer, StepOutcome
from megatron_lite.optim.scaler import DynamicLossScaler, LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, Shard
from tests.helpers.toy import TABLE, ToyModel, full_tensor

SAMPLES = range(8)
STEPS = 4
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5)
LAYOUTS = [Grid(), Grid(dp=2), Grid(tp=2), Grid(tp=2, dp=2)]


def on_cpu(grid: Grid) -> ParallelContext:
    return ParallelContext.create(grid, torch.device("cpu"), timeout_seconds=60)


class Training:
    """This rank's part of a run of the toy model."""

    def __init__(self, grid: Grid, kind, dtype: torch.dtype, scaler: LossScaler):
        self.ctx, self.scaler = on_cpu(grid), scaler
        self.model = ToyModel(self.ctx, dtype)
        self.params = self.model.named()
        grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        chosen = "optim.distributed=true" if kind == "distributed" else f"parallel.ddp={kind}"
        config = load_config(None, [chosen, "parallel.bucket_mb=1e-4"])
        self.ddp = wrap_ddp(config, [self.model], self.params, TABLE, self.ctx, grad_dtype=grad_dtype)
        self.optimizer = MixedPrecisionOptimizer(TABLE, self.ddp, scaler, OPTIM, self.ctx)

    def step(self, number: int, infinite: tuple[str, int] | None = None) -> StepOutcome:
        """Take one step; `infinite` names a parameter and the rank on which its summed gradient gets an inf."""
        samples = [sample + number for sample in SAMPLES][self.ctx.dp.rank :: self.ctx.dp.size]
        microbatches = [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
        self.ddp.zero_grad()
        for microbatch in microbatches:
            loss = self.ddp.module(0)(microbatch, strength=self.scaler.scale / len(SAMPLES))
            self.ddp.begin_backward(0, is_last=microbatch is microbatches[-1])
            loss.backward()
        finalize_grads(self.ddp, TABLE, self.ctx)
        if infinite is not None and infinite[1] == self.ctx.rank:
            self.ddp.main_grads[infinite[0]].view(-1)[-1] = math.inf
        return self.optimizer.step(lr=1e-2)

    def full_state(self) -> dict[str, Tensor]:
        """Copies of parameters, optimizer state and step count."""
        state = {
            f"{name} {kind}": local.values
            for name, kinds in self.optimizer.state().items()
            for kind, local in kinds.items()
        }
        state |= {f"{name} parameter": parameter.detach() for name, parameter in self.params.items()}
        state["steps"] = torch.tensor(self.optimizer.step_count)
        return {name: tensor.clone() for name, tensor in state.items()}


def train(grid: Grid, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    training = Training(grid, kind, torch.float64, LossScaler())
    norms = [training.step(number).grad_norm for number in range(STEPS)]
    return norms, {name: parameter.detach().clone() for name, parameter in training.params.items()}


def train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    """Norms and final weights of full tensors trained with torch's AdamW and torch's clipping."""
    weights = {name: nn.Parameter(full_tensor(name, seed=0)) for name in TABLE}
    adam = torch.optim.AdamW(
        [
            {"params": [w for name, w in weights.items() if TABLE[name].decay], "weight_decay": 0.1},
            {"params": [w for name, w in weights.items() if not TABLE[name].decay], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    norms = []
    for number in range(STEPS):
        adam.zero_grad()
        losses = [
            (weight - full_tensor(name, seed=1 + sample + number)).square().sum()
            for sample in SAMPLES
            for name, weight in weights.items()
        ]
        (0.5 * torch.stack(losses).sum() / len(SAMPLES)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), OPTIM.clip_grad).item())
        adam.step()
    return norms, {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize("kind", ["local", "torch"])
@pytest.mark.parametrize("grid", LAYOUTS, ids=str)
def test_every_layout_trains_as_plain_pytorch_does(ranks, grid, kind):
    """A wrong norm, clip coefficient or decay group would change the weights. fp64: only the order of sums differs."""
    norms, weights = train_plainly()
    assert min(norms) > OPTIM.clip_grad, "no gradient is clipped"
    for rank, (found_norms, found) in enumerate(ranks(grid.world_size, train, grid, kind)):
        assert found_norms == pytest.approx(norms, rel=1e-12)
        for name, weight in weights.items():
            shard = TABLE[name].shard.split(weight, grid.coordinates(rank)["tp"], grid.tp)
            torch.testing.assert_close(found[name], shard, rtol=1e-12, atol=1e-13)


def norm_with_a_tied_copy(grid: Grid, dtype: torch.dtype) -> float:
    """Norm of the full toy tensors as gradients; the last pipeline stage has a tied copy of the embedding."""
    ctx = on_cpu(grid)
    grads = {
        name: meta.shard.split(full_tensor(name, seed=4), ctx.tp.rank, ctx.tp.size).to(dtype)
        for number, (name, meta) in enumerate(TABLE.items())
        if number % grid.pp == ctx.pp.rank
    }
    table = dict(TABLE)
    if ctx.pp.rank > 0:
        table["copy"] = ParamMeta((16, 6), Shard(0), "normal", tied=True, tied_to="original")
        grads["copy"] = (
            table["copy"].shard.split(full_tensor("embedding.weight", seed=4), ctx.tp.rank, ctx.tp.size).to(dtype)
        )
    return norm_of(grad_sums(grads, table, ctx).tolist())


@pytest.mark.parametrize("grid", [*LAYOUTS, Grid(pp=2), Grid(tp=2, pp=2)], ids=str)
def test_the_gradient_norm_counts_every_parameter_once(ranks, grid):
    """If replicated parameters counted tp times, a larger tp would clip more. fp32 rounds squares: 1e-6."""
    params = [nn.Parameter(torch.zeros(meta.shape, dtype=torch.float64)) for meta in TABLE.values()]
    for name, parameter in zip(TABLE, params, strict=True):
        parameter.grad = full_tensor(name, seed=4)
    expected = torch.nn.utils.clip_grad_norm_(params, 1.0).item()
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        found = ranks(grid.world_size, norm_with_a_tied_copy, grid, dtype)
        assert found == pytest.approx([expected] * grid.world_size, rel=tolerance)
        assert len(set(found)) == 1, "ranks would clip differently"


def step_with_overflow(grid: Grid, infinite: tuple[str, int], dtype: torch.dtype) -> dict[str, object]:
    scaler = DynamicLossScaler(1024.0, min_scale=1.0, growth_interval=100, hysteresis=1)
    training = Training(grid, "local", dtype, scaler if dtype == torch.float16 else LossScaler())
    training.step(0)
    before = training.full_state()
    outcome = training.step(1, infinite)
    after = training.full_state()
    following = training.step(1)
    return {
        "outcome": outcome,
        "unchanged": all(torch.equal(after[name], before[name]) for name in before),
        "scale": training.scaler.scale,
        "following": following,
        "steps": training.optimizer.step_count,
    }


# A sharded parameter, a replicated one on a tp rank that does not count it, and a parameter on another dp replica.
INFINITE = [("row.weight", 3), ("norm.weight", 1), ("fused.bias", 2)]


@pytest.mark.parametrize("infinite", INFINITE)
def test_an_overflow_on_one_rank_skips_the_step_on_every_rank(ranks, infinite):
    """A rank that steps while others skip trains another model from then on."""
    for found in ranks(4, step_with_overflow, Grid(tp=2, dp=2), infinite, torch.float16):
        assert found["outcome"].skipped and not math.isfinite(found["outcome"].grad_norm)
        assert found["unchanged"] and found["scale"] == 512.0
        assert not found["following"].skipped and found["steps"] == 2


def test_without_loss_scale_an_infinite_gradient_changes_no_rank(ranks):
    """All ranks must get the infinite norm; otherwise some would stop training and others hang."""
    for found in ranks(4, step_with_overflow, Grid(tp=2, dp=2), ("norm.weight", 1), torch.float32):
        assert not found["outcome"].skipped and not math.isfinite(found["outcome"].grad_norm)
        assert found["unchanged"] and found["following"].grad_norm > 0
