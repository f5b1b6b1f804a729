"""Sharding of tensors, fused ones included, over tensor-parallel ranks.

A fused weight, such as query, key and value stacked in one matrix, is sharded part by part: each rank has its share of
the queries, of the keys and of the values. Equal slices of the stack would give one rank only queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


class Copied(NamedTuple):
    """A range of a rank's flattened shard that neighbouring ranks hold too."""

    start: int
    end: int
    slot: int  # the number of this range among the `num_slots` different ones
    num_slots: int
    is_first: bool  # no earlier rank holds it


@dataclass(frozen=True)
class Shard:
    """A tensor sharded along `dim`; `parts` are the full sizes of fused blocks along it, empty for one block.

    A part consists of `units`, such as key/value groups, which are not divided. With more ranks than units,
    neighbouring ranks hold copies of one unit. Without `units` every part divides over all ranks.

    `Shard()` is a replicated tensor.
    """

    dim: int | None = None
    parts: tuple[int, ...] = ()
    units: tuple[int, ...] = field(
        default=(), compare=False, repr=False
    )  # for each part; older checkpoints do not have them

    @property
    def is_split(self) -> bool:
        return self.dim is not None

    def local_shape(self, full: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of one rank's shard of a tensor of shape `full` over `size` ranks."""
        if self.dim is None:
            return tuple(full)
        self._check(tuple(full), size)
        local = sum(part // ways for part, ways in self._ways(full[self.dim], size))
        return (*full[: self.dim], local, *full[self.dim + 1 :])

    def ranges(self, full_size: int, rank: int, size: int) -> list[tuple[int, int]]:
        """The half-open ranges along `dim` of the full tensor that form this rank's shard, in order."""
        ranges, start = [], 0
        for part, ways in self._ways(full_size, size):
            share, slot = part // ways, rank * ways // size
            ranges.append((start + slot * share, start + (slot + 1) * share))
            start += part
        return ranges

    def copied(self, full: Sequence[int], rank: int, size: int) -> list[Copied]:
        """The ranges of a rank's flattened shard, of a tensor of shape `full`, that other ranks hold too."""
        if self.dim is None or not self.units:
            return []
        assert self.dim == 0, "only column-parallel layers have units"
        found, start, row = [], 0, prod(full[1:])
        for part, ways in self._ways(full[0], size):
            end = start + part // ways * row
            if ways < size:
                found.append(Copied(start, end, rank * ways // size, ways, is_first=rank % (size // ways) == 0))
            start = end
        return found

    def split(self, full: Tensor, rank: int, size: int) -> Tensor:
        """This rank's shard of the full tensor; a view if it is one range."""
        if self.dim is None or size == 1:
            return full
        self._check(tuple(full.shape), size)
        slices = [full.narrow(self.dim, a, b - a) for a, b in self.ranges(full.shape[self.dim], rank, size)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from every rank's shard, in rank order; the inverse of `split`."""
        size = len(shards)
        if self.dim is None or size == 1:
            return shards[0]
        by_part = self._ways(shards[0].shape[self.dim] * size, size)
        of_ranks = [shard.split([part // ways for part, ways in by_part], dim=self.dim) for shard in shards]
        joined = [ranks[index] for index, (_, ways) in enumerate(by_part) for ranks in of_ranks[:: size // ways]]
        return torch.cat(joined, dim=self.dim)

    def _ways(self, full_size: int, size: int) -> list[tuple[int, int]]:
        """The size of each part, and the number of different shards that `size` ranks hold of it."""
        parts = self.parts or (full_size,)
        return [(part, min(size, units)) for part, units in zip(parts, self.units or (size,) * len(parts), strict=True)]

    def _check(self, full: tuple[int, ...], size: int) -> None:
        assert self.dim is not None
        if not 0 <= self.dim < len(full):
            raise ValueError(f"there is no dim {self.dim} in {full}")
        are_sizes = min(self.parts, default=0) >= 0 and (not self.units or (self.dim == 0 and min(self.units) >= 1))
        if not are_sizes or (self.parts and sum(self.parts) != full[self.dim]):
            raise ValueError(f"parts {self.parts} of dim {self.dim} do not add up to its size in {full}")
        for part, ways in self._ways(full[self.dim], size):
            if part % ways or size % ways:
                raise ValueError(f"a block of {part} along dim {self.dim} of {full} does not divide over {size} ranks")


@dataclass(frozen=True)
class ParamMeta:
    """The description of a parameter."""

    shape: tuple[int, ...]  # of the full tensor
    shard: Shard
    init: Literal["normal", "zeros", "ones"] | Callable[[Tensor], Any]  # a function sets the full tensor, in fp32
    std: float = 0.0  # of init="normal"
    decay: bool = True  # weight decay applies
    tied: bool = False  # on two pipeline stages, like a tied embedding; their gradients are summed
    tied_to: str = ""  # name of the original, on the copy only; copies are not counted
    sequence_parallel: bool = False  # replicated over tp, with a gradient from s/tp tokens or n/tp heads
    name: str = ""  # set by get_model; layers are numbered over the full model


ParamTable = dict[str, ParamMeta]


def tied_names(table: ParamTable) -> list[str]:
    """The tied parameters, in the order of collectives over embd on both stages: that of the originals' names."""
    return sorted((name for name, meta in table.items() if meta.tied), key=lambda name: table[name].tied_to or name)


def declare(parameter: torch.nn.Parameter, meta: ParamMeta) -> torch.nn.Parameter:
    """The parameter with its description, for `get_model` to collect."""
    parameter.meta = meta  # type: ignore[attr-defined]
    return parameter


def allocate(meta: ParamMeta, tp_size: int, **factory: Any) -> torch.nn.Parameter:
    """This rank's shard of a new parameter, described and without values; `factory` is dtype and device."""
    return declare(torch.nn.Parameter(torch.empty(meta.shard.local_shape(meta.shape, tp_size), **factory)), meta)
