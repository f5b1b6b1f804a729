"""Gradients of LocalDDP and torch's DDP on real ranks, compared with plain autograd in one process."""

import pytest
import torch
from torch import nn

from megatron_lite.config.load import load_config
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard

SAMPLES = 12


def on_cpu(grid: Grid) -> ParallelContext:
    return ParallelContext.create(grid, torch.device("cpu"), timeout_seconds=60)


def full_table(model: nn.Module, sequence_parallel: tuple[str, ...] = ()) -> ParamTable:
    return {
        name: ParamMeta(tuple(p.shape), Shard(), "normal", sequence_parallel=name in sequence_parallel, name=name)
        for name, p in model.named_parameters()
    }


def wrap(model: nn.Module, ctx: ParallelContext, kind, bucket_mb: float, grad_dtype=torch.float64) -> DataParallel:
    params = dict(model.named_parameters())
    config = load_config(None, [f"parallel.ddp={kind}", f"parallel.bucket_mb={bucket_mb}"])
    return wrap_ddp(config, [model], params, full_table(model), ctx, grad_dtype=grad_dtype)


class TinyLanguageModel(nn.Module):
    """A tied embedding, a norm and a linear layer; the embedding gets gradients twice."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        nn.init.normal_(self.norm.bias)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(self.norm(self.embedding(tokens))))
        return nn.functional.cross_entropy(
            (hidden @ self.embedding.weight.t()).transpose(1, 2), tokens, reduction="none"
        )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and masks [samples, 5]; the number of targets differs from sample to sample."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(11, (SAMPLES, 5), generator=generator)
    return tokens, (torch.arange(5) <= torch.arange(SAMPLES)[:, None] % 5).double()


def masked_loss(module: nn.Module, tokens: torch.Tensor, mask: torch.Tensor, step: int) -> torch.Tensor:
    return ((step + 1) * module(tokens) * mask).sum() / batch()[1].sum()


def gradients_of_steps(kind: str, num_microbatches: int, bucket_mb: float, dtype: torch.dtype, steps: int):
    """main_grads after each step; this rank's part of the batch is split into `num_microbatches`."""
    dp = torch.distributed.get_world_size()
    ctx = on_cpu(Grid(dp=dp))
    model = TinyLanguageModel(dtype)
    ddp = wrap(model, ctx, kind, bucket_mb, torch.float64 if dtype == torch.float64 else torch.float32)
    tokens, mask = (x.chunk(dp)[ctx.dp.rank].chunk(num_microbatches) for x in batch())
    found = []
    for step in range(steps):
        ddp.zero_grad()
        for number in range(num_microbatches):
            loss = masked_loss(ddp.module(0), tokens[number], mask[number], step)
            ddp.begin_backward(0, is_last=number == num_microbatches - 1)
            loss.backward()
        finalize_grads(ddp, full_table(model), ctx)
        found.append({name: grad.clone() for name, grad in ddp.main_grads.items()})
    return found


@pytest.mark.parametrize("kind", ["local", "torch"])
@pytest.mark.parametrize(("dp", "num_microbatches", "bucket_mb"), [(2, 1, 25.0), (2, 3, 1e-4), (4, 3, 1e-4)])
def test_summed_gradients_equal_those_of_one_large_batch(ranks, kind, dp, num_microbatches, bucket_mb):
    """A mean instead of a sum, a gradient left from the previous step or a bucket reduced twice would change the sums.

    fp64: only the order of additions differs. Three steps, because torch's DDP rebuilds its buckets after the first.
    """
    model = TinyLanguageModel(torch.float64)
    results = ranks(dp, gradients_of_steps, kind, num_microbatches, bucket_mb, torch.float64, 3)
    for step in range(3):
        model.zero_grad()
        masked_loss(model, *batch(), step).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(results[0][step][name], parameter.grad, rtol=1e-12, atol=1e-14)
            for other in results[1:]:
                assert torch.equal(other[step][name], results[0][step][name]), "replicas would drift apart"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_engines_give_the_same_low_precision_gradients(ranks, dtype):
    """With two ranks and one micro-batch, both engines add the same two low-precision values in fp32."""
    local, torchs = (ranks(2, gradients_of_steps, kind, 1, 25.0, dtype, 2)[0] for kind in ("local", "torch"))
    for step in range(2):
        for name, grad in local[step].items():
            assert grad.dtype == torch.float32 and grad.abs().max() > 0
            assert torch.equal(grad, torchs[step][name]), name


def sum_small_onto_large(kind: str) -> list[float]:
    """Rank 0 has gradients 256, 1, 1; rank 1 has 1, 1, 1."""
    ctx = on_cpu(Grid(dp=2))

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x):
            return (self.weight * x).sum()

    model = Scale()
    ddp = wrap(model, ctx, kind, 25.0, torch.float32)
    sizes = torch.tensor([[256.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.bfloat16)[ctx.rank]
    for number, size in enumerate(sizes):
        loss = ddp.module(0)(size)
        ddp.begin_backward(0, is_last=number == 2)
        loss.backward()
    ddp.finish_grad_sync()
    return ddp.main_grads["weight"].tolist()


@pytest.mark.parametrize("kind", ["local", "torch"])
def test_bf16_gradients_are_summed_over_microbatches_and_ranks_in_fp32(ranks, kind):
    """In bf16, 256 + 1 is 256 and 256 + 3 is 260; a sum in bf16 could not give 261."""
    assert ranks(2, sum_small_onto_large, kind) == [[261.0] * 3] * 2


def use_different_parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients of two backward passes; each rank skips a different parameter and uses the others in another order."""
    ctx = on_cpu(Grid(dp=2))
    model = nn.ParameterDict({name: torch.ones(size, dtype=dtype) for size, name in enumerate("abcd", start=1)})
    ddp = wrap(model, ctx, "local", 1e-9)
    found = {}
    for _ in range(2):
        ddp.zero_grad()
        ddp.begin_backward(0, is_last=True)
        used = ("a", "b", "c") if ctx.rank == 0 else ("d", "c", "a")
        for name in used:
            (model[name] * (10.0 + ctx.rank)).sum().backward()
        ddp.finish_grad_sync()
        found = {name: grad.clone() for name, grad in ddp.main_grads.items()}
    return found


def test_a_parameter_unused_on_one_rank_gets_the_sum_of_the_others(ranks):
    """Buckets reduced in different orders would hang or add gradients of different parameters."""
    for found in ranks.within(30)(2, use_different_parameters, torch.float64):
        for name, expected in {"a": 21.0, "b": 10.0, "c": 21.0, "d": 11.0}.items():
            assert (found[name] == expected).all(), name


def train_torch_ddp_with_an_unused_parameter() -> None:
    ctx = on_cpu(Grid(dp=2))
    model = TinyLanguageModel(torch.float32)
    model.extra = nn.Linear(2, 2)
    ddp = wrap(model, ctx, "torch", 25.0, torch.float32)
    loss = ddp.module(0)(batch()[0]).sum()
    ddp.begin_backward(0, is_last=True)
    loss.backward()
    ddp.finish_grad_sync()


def test_torch_ddp_raises_an_error_that_names_an_unused_parameter(ranks):
    """The bucket of an unused parameter never completes, so the optimizer would use gradients that are not summed."""
    with pytest.raises(RanksFailed, match=r"parallel\.ddp=torch: \d of 7 .* extra\.weight; use every parameter in"):
        ranks(2, train_torch_ddp_with_an_unused_parameter)


def sum_sequence_parallel() -> dict[str, torch.Tensor]:
    """main_grads over two tp ranks when every local gradient is rank + 1."""
    ctx = on_cpu(Grid(tp=2))
    model = nn.ParameterDict({"norm": torch.ones(2, 3), "bias": torch.ones(4), "matrix": torch.ones(5)})
    params, table = dict(model.named_parameters()), full_table(model, sequence_parallel=("norm", "bias"))
    ddp = wrap_ddp(load_config(None), [model], params, table, ctx, grad_dtype=torch.float32)
    ddp.begin_backward(0, is_last=True)
    torch.stack([parameter.sum() * (ctx.rank + 1) for parameter in params.values()]).sum().backward()
    finalize_grads(ddp, table, ctx)
    return {name: grad.clone() for name, grad in ddp.main_grads.items()}


def test_only_sequence_parallel_gradients_are_summed_over_tp(ranks):
    """Each rank computes its slice of the sequence; without the sum, norms would drift apart between tp ranks."""
    for rank, found in enumerate(ranks(2, sum_sequence_parallel)):
        assert (found["norm"] == 3).all() and (found["bias"] == 3).all()
        assert (found["matrix"] == rank + 1).all()
