"""The options that all layers of this rank share."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.model.fusion import Fusion
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.random import RngTracker


@dataclass(frozen=True)
class LayerOptions:
    """Groups, random streams, placement of parameters, and activations kept for backward."""

    tp: Group
    sequence: Group  # tp under sequence parallelism, else a group of one
    context: Group  # cp: its ranks have different tokens of a sequence
    rng: RngTracker
    dtype: torch.dtype
    device: torch.device
    fusion: Fusion  # of the operations between matrix products
    context_mode: str = "ring"
    activation_recompute: bool = False  # the MLP's
    selective_recompute: bool = False  # core attention
    full_recompute_layers: float = 0  # in the first blocks of a stage
    recompute_group: int = 0  # blocks that are recomputed together; 0: none
    recompute_stage: bool = False  # the full stage
    head_chunk: int = 0  # positions whose logits exist at a time; 0: all
    offload_activations: bool = False

    @property
    def adds_bias_later(self) -> bool:
        """True where a kernel after a product adds its bias."""
        return self.fusion != "off"

    @property
    def layer_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the layers of `megatron_lite.parallel`."""
        return {"tp": self.tp, "sequence_parallel": self.sequence_parallel, "dtype": self.dtype, "device": self.device}

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence.size > 1

    def sequence_slice(self, x: Tensor) -> Tensor:
        """This rank's `[s', ...]` of x `[s, ...]`."""
        return x.chunk(self.sequence.size)[self.sequence.rank] if self.sequence_parallel else x

    def dropout_stream(self, dropout: float) -> AbstractContextManager[None]:
        """A context for dropout between tensor-parallel regions: ranks with different tokens drop different units."""
        return self.rng.fork() if self.sequence_parallel and dropout > 0 else nullcontext()
