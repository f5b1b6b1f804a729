"""Random tensors and linear layers sharded over a tensor-parallel group, for comparison with full layers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.linear import ColumnParallelLinear, RowParallelLinear

LAYERS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
IN, OUT = 12, 16


def world_group() -> Group:
    """The tensor-parallel group of all ranks."""
    size = dist.get_world_size()
    return Group("tp", tuple(range(size)), dist.get_rank(), dist.group.WORLD)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random values, drawn in fp64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_linear(
    kind: str,
    tp: Group,
    *,
    in_features: int = IN,
    out_features: int = OUT,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> ColumnParallelLinear | RowParallelLinear:
    """A layer of LAYERS with this rank's shards of full random tensors."""
    layer = LAYERS[kind](
        in_features, out_features, tp=tp, bias=bias, init_std=0.02, dtype=dtype, device=torch.device("cpu"), **options
    )
    for seed, parameter in enumerate(layer.parameters()):
        full = draw(*parameter.meta.shape, seed=seed, dtype=dtype)
        parameter.data.copy_(parameter.meta.shard.split(full, tp.rank, tp.size))
    return layer


def output_gradient(out_features: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A gradient [4, 2, out_features] that is not contiguous, as after a transpose in the attention."""
    return draw(out_features, 2, 4, seed=11, dtype=dtype).permute(2, 1, 0)
