"""Models with given weights on any number of tensor-parallel ranks, for tests to compare with plain references."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.schema import Config, ModelConfig, ParallelConfig
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.model.masks import Mask
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from megatron_lite.parallel.shard import ParamTable


@dataclass
class ModelRun:
    """Results on one rank: its shard of the logits, the per-token loss, and its shard of each gradient."""

    logits: Tensor  # [s, b, v/tp]
    loss: Tensor  # [s, b]
    grads: dict[str, Tensor]
    table: ParamTable


def tiny(**fields) -> Config:
    """A model of 2 layers with sizes that are all different, an odd vocabulary and no dropout."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 101, "max_position_embeddings": 24}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return Config(model=ModelConfig(**{**sizes, **quiet, **fields}))


def with_sequence_parallelism(config: Config, tp: int) -> Config:
    return config.model_copy(update={"parallel": ParallelConfig(tensor=tp, sequence=True)})


def context(tp: int) -> ParallelContext:
    return ParallelContext.create(Grid(tp=tp), torch.device("cpu"), timeout_seconds=60)


def layer_options(dtype: torch.dtype, ctx: ParallelContext | None = None, **changes) -> LayerOptions:
    """Options of a layer on a real device (not meta); on one rank unless `changes` pass groups."""
    plain = {
        "tp": solo(),
        "sequence": solo(),
        "context": solo(),
        "rng": seed_everything(3, ctx or context(1)),
        "fusion": "off",
    }
    return LayerOptions(**{**plain, "dtype": dtype, "device": torch.device("cpu"), **changes})


def random_weights(config: Config, dtype: torch.dtype, seed: int = 0, std: float = 0.2) -> dict[str, Tensor]:
    """Full tensors by name; biases and norms are random too, because zeros and ones would hide mistakes."""
    ctx = ParallelContext.at(Grid(), 0)
    table = param_table(get_model(config, ctx, seed_everything(0, ctx), dtype=dtype))
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(meta.shape, generator=generator) * std for name, meta in table.items()}
    return {name: (x + 1 if table[name].init == "ones" else x).to(dtype) for name, x in drawn.items()}


def random_tokens(config: Config, batch: int = 3, length: int = 17) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each [b, s]."""
    drawn = torch.randint(config.model.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def loss_weights(loss: Tensor) -> Tensor:
    """A different weight for each token; with equal weights, a gradient of the wrong token would go unnoticed."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(loss.shape, generator=generator, dtype=torch.float64).to(loss.dtype)


def run_model(
    config: Config,
    weights: dict[str, Tensor],
    tokens: Tensor,
    labels: Tensor,
    *,
    tp: int,
    train: bool = False,
    documents: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> ModelRun:
    """Forward and backward of sum(loss * loss_weights) on this rank of `tp` ranks."""
    ctx = context(tp)
    dtype = next(iter(weights.values())).dtype
    chunks = get_model(config, ctx, seed_everything(5, ctx), dtype=dtype)
    params, table = named_params(chunks), param_table(chunks)
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(table[name].shard.split(weights[name], ctx.tp.rank, ctx.tp.size))
    model = chunks[0].train(train)
    packing = {"position_ids": position_ids, "mask": Mask(documents=documents)}
    logits = model(tokens, **packing).detach()
    loss = model(tokens, labels, **packing)
    (loss * loss_weights(loss)).sum().backward()
    grads = {name: parameter.grad for name, parameter in params.items() if parameter.grad is not None}
    grads = {name: all_reduce(x, ctx.tp) if table[name].sequence_parallel else x for name, x in grads.items()}
    return ModelRun(logits, loss.detach(), grads, table)


def joined_grads(runs: list[ModelRun]) -> dict[str, Tensor]:
    """Full gradients from every rank's shards; those of replicated parameters must be equal on every rank."""
    for name, meta in runs[0].table.items():
        if not meta.shard.is_split:
            for run in runs[1:]:
                torch.testing.assert_close(run.grads[name], runs[0].grads[name], msg=f"{name} differs over tp")
    return {name: meta.shard.join([run.grads[name] for run in runs]) for name, meta in runs[0].table.items()}


def joined_logits(runs: list[ModelRun]) -> Tensor:
    return torch.cat([run.logits for run in runs], dim=-1)


def assert_grads_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """The names agree, and each error is at most `tolerance` times the largest value of its reference."""
    assert set(got) == set(want)
    for name, reference in want.items():
        error = (got[name] - reference).abs().max().item()
        limit = tolerance * reference.abs().max().item()
        assert error <= limit, f"{name}: off by {error:.3g}, allowed {limit:.3g}"
