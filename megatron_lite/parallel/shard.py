"""Sharding of tensors, fused ones included, over tensor-parallel ranks.

A fused weight, such as query, key and value stacked in one matrix, is sharded part by part: each rank has its share of
the queries, of the keys and of the values. Equal slices of the stack would give one rank only queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A tensor sharded along `dim`; `parts` are the full sizes of fused blocks along it, empty for one block.

    `Shard()` is a replicated tensor.
    """

    dim: int | None = None
    parts: tuple[int, ...] = ()

    @property
    def is_split(self) -> bool:
        return self.dim is not None

    def local_shape(self, full: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of one rank's shard of a tensor of shape `full` over `size` ranks."""
        if self.dim is None:
            return tuple(full)
        self._check(tuple(full), size)
        return (*full[: self.dim], full[self.dim] // size, *full[self.dim + 1 :])

    def ranges(self, full_size: int, rank: int, size: int) -> list[tuple[int, int]]:
        """The half-open ranges along `dim` of the full tensor that form this rank's shard, in order."""
        ranges, start = [], 0
        for part in self.parts or (full_size,):
            share = part // size
            ranges.append((start + rank * share, start + (rank + 1) * share))
            start += part
        return ranges

    def split(self, full: Tensor, rank: int, size: int) -> Tensor:
        """This rank's shard of the full tensor; a view if it is one range."""
        if self.dim is None or size == 1:
            return full
        self._check(tuple(full.shape), size)
        slices = [full.narrow(self.dim, a, b - a) for a, b in self.ranges(full.shape[self.dim], rank, size)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from every rank's shard, in rank order; the inverse of `split`."""
        if self.dim is None or len(shards) == 1:
            return shards[0]
        sizes = [part // len(shards) for part in self.parts] or [shards[0].shape[self.dim]]
        by_part = zip(*(shard.split(sizes, dim=self.dim) for shard in shards), strict=True)
        return torch.cat([block for part in by_part for block in part], dim=self.dim)

    def _check(self, full: tuple[int, ...], size: int) -> None:
        assert self.dim is not None
        if not 0 <= self.dim < len(full):
            raise ValueError(f"there is no dim {self.dim} in {full}")
        if self.parts and sum(self.parts) != full[self.dim]:
            raise ValueError(f"parts {self.parts} of dim {self.dim} do not add up to its size in {full}")
        for part in self.parts or (full[self.dim],):
            if part % size:
                raise ValueError(f"a block of {part} along dim {self.dim} of {full} does not divide over {size} ranks")


@dataclass(frozen=True)
class ParamMeta:
    """The description of a parameter."""

    shape: tuple[int, ...]  # of the full tensor
    shard: Shard
    init: Literal["normal", "zeros", "ones"]
    std: float = 0.0  # of init="normal"
    decay: bool = True  # weight decay applies
    tied: bool = False  # on two pipeline stages, like a tied embedding; their gradients are summed
    tied_to: str = ""  # name of the original, on the copy only; copies are not counted
    sequence_parallel: bool = False  # replicated over tp, with a gradient from s/tp tokens
    name: str = ""  # set by get_model; layers are numbered over the full model


ParamTable = dict[str, ParamMeta]


def declare(parameter: torch.nn.Parameter, meta: ParamMeta) -> torch.nn.Parameter:
    """The parameter with its description, for `get_model` to collect."""
    parameter.meta = meta  # type: ignore[attr-defined]
    return parameter


def allocate(meta: ParamMeta, tp_size: int, **factory: Any) -> torch.nn.Parameter:
    """This rank's shard of a new parameter, described and without values; `factory` is dtype and device."""
    return declare(torch.nn.Parameter(torch.empty(meta.shard.local_shape(meta.shape, tp_size), **factory)), meta)
