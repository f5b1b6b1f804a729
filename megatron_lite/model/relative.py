"""T5's relative positions: a learned bias of each attention score, by head and by distance of query and key.

Near distances have a bias each. Farther ones share biases, in ranges that grow with the logarithm of the distance. All
blocks of a stack share one table.
Source: Raffel et al., T5, arXiv 1910.10683, section 2.1.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.shard import ParamMeta, Shard, allocate


class RelativeBias(nn.Module):
    """The table of a stack; each rank has the columns of its heads."""

    def __init__(self, config: ModelConfig, options: LayerOptions):
        super().__init__()
        shape = (config.relative_buckets, config.num_heads)
        meta = ParamMeta(shape, Shard(1), "normal", std=config.init_std)
        self.weight = allocate(meta, options.tp.size, dtype=options.dtype, device=options.device)


def scores_bias(table: Tensor, config: ModelConfig, length: int, *, bidirectional: bool) -> Tensor:
    """The biases of the scores of a sequence of `length`.

    table    [buckets, n/tp]
    returns  [1, n/tp, s, s]
    """
    position = torch.arange(length, device=table.device)
    rows = buckets(position[None] - position[:, None], config, bidirectional=bidirectional)
    # Contiguous: kernels read neighbouring keys together, and all layers share this copy.
    return F.embedding(rows, table).permute(2, 0, 1)[None].contiguous()


def buckets(distance: Tensor, config: ModelConfig, *, bidirectional: bool) -> Tensor:
    """The row of the table for each distance, key position - query position.

    Half of the rows are for keys after the query if those are seen (`bidirectional`). Of the rows of one direction,
    half have one distance each.
    """
    size = config.relative_buckets
    start = torch.zeros_like(distance)
    if bidirectional:
        size //= 2
        start = size * (distance > 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = size // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(config.relative_max_distance / exact)
    far = (exact + (growth * (size - exact)).long()).clamp(max=size - 1)
    return start + torch.where(distance < exact, distance, far)
