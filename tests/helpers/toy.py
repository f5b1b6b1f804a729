"""A model small enough to check by hand, with sharded, fused and sharded, and replicated parameters.

Its loss is separable: sum over samples and parameters of 0.5 * |w - target|^2 * strength. So the gradient of a shard is
the shard of the gradient, and any layout can be compared with plain PyTorch on the full tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard, declare

TABLE: ParamTable = {
    "embedding.weight": ParamMeta((16, 6), Shard(0), "normal", name="embedding.weight"),
    "fused.weight": ParamMeta((12, 6), Shard(0, parts=(8, 4)), "normal", name="fused.weight"),
    "fused.bias": ParamMeta((12,), Shard(0, parts=(8, 4)), "zeros", decay=False, name="fused.bias"),
    "row.weight": ParamMeta((6, 12), Shard(1), "normal", name="row.weight"),
    "row.bias": ParamMeta((6,), Shard(), "zeros", decay=False, name="row.bias"),
    "norm.weight": ParamMeta((6,), Shard(), "ones", decay=False, name="norm.weight"),
}


def full_tensor(name: str, seed: int) -> Tensor:
    """Random fp64 values for the full tensor."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(name.encode()))
    return torch.randn(TABLE[name].shape, generator=generator, dtype=torch.float64)


class ToyModel(nn.Module):
    """This rank's shards of the parameters in TABLE."""

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype):
        super().__init__()
        self.tp = ctx.tp
        self.shards = nn.ParameterList(
            declare(nn.Parameter(self.shard_of(name, seed=0).to(dtype)), meta) for name, meta in TABLE.items()
        )

    def shard_of(self, name: str, seed: int) -> Tensor:
        return TABLE[name].shard.split(full_tensor(name, seed), self.tp.rank, self.tp.size).clone()

    def named(self) -> dict[str, nn.Parameter]:
        return dict(zip(TABLE, self.shards, strict=True))

    def forward(self, samples: Sequence[int], strength: float) -> Tensor:
        """Scalar: this rank's share of the loss over the samples."""
        losses = [
            (parameter - self.shard_of(name, seed=1 + sample).to(parameter.dtype)).square().sum()
            for sample in samples
            for name, parameter in self.named().items()
        ]
        return 0.5 * strength * torch.stack(losses).sum()
