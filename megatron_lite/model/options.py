"""What all layers of this rank are built with, whatever their kind and size."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.random import RngTracker


@dataclass(frozen=True)
class LayerOptions:
    """Groups, random numbers, where parameters live, and what is kept between forward and backward."""

    tp: Group
    sequence: Group  # tp under sequence parallelism; otherwise a group of one: each rank has the whole sequence
    rng: RngTracker
    dtype: torch.dtype
    device: torch.device
    fused: bool  # elementwise chains compiled to one kernel each
    selective_recompute: bool = False  # core attention
    full_recompute_layers: float = 0  # the first blocks of a stage
    offload_activations: bool = False

    @property
    def where(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    @property
    def split(self) -> dict[str, Any]:
        """Keywords of a layer of `megatron_lite.parallel`."""
        return {"tp": self.tp, "sequence_parallel": self.sequence_parallel, **self.where}

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence.size > 1

    def share(self, x: Tensor) -> Tensor:
        """`[s, ...]` to what this rank has of it between tensor-parallel regions, `[s', ...]`."""
        return x.chunk(self.sequence.size)[self.sequence.rank]

    def dropout_stream(self, dropout: float) -> AbstractContextManager[None]:
        """Around dropout between tensor-parallel regions: ranks with tokens of their own must drop other units."""
        return self.rng.fork() if self.sequence_parallel and dropout > 0 else nullcontext()
