"""Training with and without recomputation, and the bytes that a block saves for backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.config.schema import ParallelConfig, TrainConfig
from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.build import get_model, named_params
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.random import seed_everything
from megatron_lite.parallel.weight_grads import deferred, split_backward
from tests.helpers.model_runs import context, layer_options, random_tokens, tiny
from tests.helpers.plain_codegeex import CODEGEEX

KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "codegeex": CODEGEEX,
    "llama": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rotary",
        "bias": False,
        "tie_embeddings": False,
        "num_query_groups": 2,
    },
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


class Trained(NamedTuple):
    """Results of two micro-batches."""

    losses: list[Tensor]
    grads: dict[str, Tensor | None]
    draws: list[Tensor]  # the next values of the default and of the tensor-parallel random stream
    num_jobs: int  # deferred weight gradients


def train(
    fields: dict[str, Any],
    *,
    recompute: str,
    dtype: torch.dtype,
    halves: bool = False,
    tp: int = 1,
    sequence: bool = False,
) -> Trained:
    """Train with dropout on two micro-batches. Both forwards precede the backwards, as in a pipeline."""
    sections = {"train": TrainConfig(recompute=recompute), "parallel": ParallelConfig(tensor=tp, sequence=sequence)}
    config = tiny(**DROPOUT | fields).model_copy(update=sections)
    ctx = context(tp)
    rng = seed_everything(7, ctx)
    model = get_model(config, ctx, rng, dtype=dtype)[0].train()
    losses, jobs = [], []
    for at in range(2):
        tokens, labels = (x[at : at + 2] for x in random_tokens(config, length=16))
        with split_backward(halves):
            losses.append(model(tokens, labels).mean())
    for loss in losses:
        with deferred() as new_jobs:
            loss.backward()
        jobs += new_jobs.values()
    for job in jobs:
        job()
    grads = {name: parameter.grad for name, parameter in named_params([model]).items()}
    draws = [torch.rand(4)]
    with rng.fork():
        draws.append(torch.rand(4))
    return Trained([loss.detach() for loss in losses], grads, draws, len(jobs))


def assert_same_bits(got: Trained, want: Trained) -> None:
    """Losses, gradients and random draws are bitwise equal."""
    for one, other in zip(got.losses + got.draws, want.losses + want.draws, strict=True):
        assert torch.equal(one, other)
    different = [name for name in want.grads if not torch.equal(got.grads[name], want.grads[name])]
    assert different == [] and list(got.grads) == list(want.grads)


S, B, H, HEADS = 64, 2, 64, 4


def saved_bytes(ctx: ParallelContext | None = None, **options: Any) -> float:
    """Bytes that one block of size S, B, H saves for backward besides its parameters, divided by S * B * H."""
    config = tiny(hidden_size=H, num_heads=HEADS, max_position_embeddings=S, attention="math", **DROPOUT)
    common = layer_options(torch.bfloat16, ctx, **options)
    block = TransformerBlock(config.model, common, place=0)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved = {}

    def save(x):
        saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    x = torch.randn(S // common.sequence.size, B, H, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors_hooks(save, lambda x: x):
        y = block(x)
    assert y.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in parameters) / (S * B * H)
