"""The optimizer over tensor- and data-parallel ranks: the same training as plain PyTorch on whole tensors."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import OptimConfig
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.optim.clip import global_grad_norm
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer, StepOutcome
from megatron_lite.optim.scaler import DynamicLossScaler, LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, Shard
from tests.helpers.toy import TABLE, ToyModel, whole

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

    def step(self, number: int, spoil: tuple[str, int] | None = None) -> StepOutcome:
        """`spoil` is a parameter and the rank on which its summed gradient gets an inf."""
        mine = [sample + number for sample in SAMPLES][self.ctx.dp.rank :: self.ctx.dp.size]
        portions = [mine[: len(mine) // 2], mine[len(mine) // 2 :]]
        self.ddp.zero_grad()
        for portion in portions:
            loss = self.ddp.module(0)(portion, strength=self.scaler.scale / len(SAMPLES))
            self.ddp.begin_backward(0, is_last=portion is portions[-1])
            loss.backward()
        finalize_grads(self.ddp, TABLE, self.ctx)
        if spoil is not None and spoil[1] == self.ctx.rank:
            self.ddp.main_grads[spoil[0]].view(-1)[-1] = math.inf
        return self.optimizer.step(lr=1e-2)

    def everything(self) -> dict[str, Tensor]:
        state = {
            f"{name} {kind}": held.values
            for name, kinds in self.optimizer.state().items()
            for kind, held in kinds.items()
        }
        state |= {f"{name} parameter": parameter.detach() for name, parameter in self.params.items()}
        state["steps"] = torch.tensor(self.optimizer.step_count)
        return {name: tensor.clone() for name, tensor in state.items()}


def train(grid: Grid, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    training = Training(grid, kind, torch.float64, LossScaler())
    norms = [training.step(number).grad_norm for number in range(STEPS)]
    return norms, {name: parameter.detach().clone() for name, parameter in training.params.items()}


def train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    """Whole tensors, torch's AdamW and torch's clip."""
    weights = {name: nn.Parameter(whole(name, seed=0)) for name in TABLE}
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
            (weight - whole(name, seed=1 + sample + number)).square().sum()
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
    """Norm, clip, decay groups, cut and whole parameters together. fp64: only the order of additions differs."""
    norms, weights = train_plainly()
    assert min(norms) > OPTIM.clip_grad, "clipping must have something to do"
    for rank, (found_norms, found) in enumerate(ranks(grid.world_size, train, grid, kind)):
        assert found_norms == pytest.approx(norms, rel=1e-12)
        for name, weight in weights.items():
            piece = TABLE[name].shard.split(weight, grid.coordinates(rank)["tp"], grid.tp)
            torch.testing.assert_close(found[name], piece, rtol=1e-12, atol=1e-13)


def norm_with_a_tied_copy(grid: Grid, dtype: torch.dtype) -> float:
    """Norm of the whole toy tensors as gradients, the last pipeline stage holding a copy of the embedding."""
    ctx = on_cpu(grid)
    grads = {
        name: meta.shard.split(whole(name, seed=4), ctx.tp.rank, ctx.tp.size).to(dtype)
        for number, (name, meta) in enumerate(TABLE.items())
        if number % grid.pp == ctx.pp.rank
    }
    table = dict(TABLE)
    if ctx.pp.rank > 0:
        table["copy"] = ParamMeta((16, 6), Shard(0), "normal", tied=True, tied_to="original")
        grads["copy"] = table["copy"].shard.split(whole("embedding.weight", seed=4), ctx.tp.rank, ctx.tp.size).to(dtype)
    return global_grad_norm(grads, table, ctx)


@pytest.mark.parametrize("grid", [*LAYOUTS, Grid(pp=2), Grid(tp=2, pp=2)], ids=str)
def test_the_norm_counts_every_parameter_once(ranks, grid):
    """Replicated parameters counted tp times would clip more the larger tp is. fp32 rounds squares: 1e-6."""
    params = [nn.Parameter(torch.zeros(meta.shape, dtype=torch.float64)) for meta in TABLE.values()]
    for name, parameter in zip(TABLE, params, strict=True):
        parameter.grad = whole(name, seed=4)
    expected = torch.nn.utils.clip_grad_norm_(params, 1.0).item()
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        found = ranks(grid.world_size, norm_with_a_tied_copy, grid, dtype)
        assert found == pytest.approx([expected] * grid.world_size, rel=tolerance)
        assert len(set(found)) == 1, "ranks would clip differently"


def overflow_on_one_rank(grid: Grid, spoil: tuple[str, int], dtype: torch.dtype) -> dict[str, object]:
    scaler = DynamicLossScaler(1024.0, min_scale=1.0, growth_interval=100, hysteresis=1)
    training = Training(grid, "local", dtype, scaler if dtype == torch.float16 else LossScaler())
    training.step(0)
    before = training.everything()
    outcome = training.step(1, spoil)
    after = training.everything()
    following = training.step(1)
    return {
        "outcome": outcome,
        "unchanged": all(torch.equal(after[name], before[name]) for name in before),
        "scale": training.scaler.scale,
        "following": following,
        "steps": training.optimizer.step_count,
    }


# A cut parameter, one that only tp rank 0 counts spoiled where it does not count, and one on another replica.
SPOILED = [("row.weight", 3), ("norm.weight", 1), ("fused.bias", 2)]


@pytest.mark.parametrize("spoil", SPOILED)
def test_one_ranks_overflow_skips_the_step_on_every_rank(ranks, spoil):
    """A rank that stepped while others skipped would train another model from then on."""
    for found in ranks(4, overflow_on_one_rank, Grid(tp=2, dp=2), spoil, torch.float16):
        assert found["outcome"].skipped and not math.isfinite(found["outcome"].grad_norm)
        assert found["unchanged"] and found["scale"] == 512.0
        assert not found["following"].skipped and found["steps"] == 2


def test_one_ranks_bad_gradient_without_loss_scale_stops_every_rank_unchanged(ranks):
    """All ranks must see a norm that is not finite, so that all stop."""
    for found in ranks(4, overflow_on_one_rank, Grid(tp=2, dp=2), ("norm.weight", 1), torch.float32):
        assert not found["outcome"].skipped and not math.isfinite(found["outcome"].grad_norm)
        assert found["unchanged"] and found["following"].grad_norm > 0
