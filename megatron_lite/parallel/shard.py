"""How a tensor is cut over tensor-parallel ranks, including fused ones.

A fused weight, such as query, key and value stacked in one matrix, is cut part by part: each rank gets its
share of the queries, of the keys and of the values, stacked again. Cutting the stack in equal runs instead
would give one rank only queries, the classic resharding mistake.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Cut along `dim`; `parts` are the full sizes of fused blocks along it, empty when there is one block.

    `Shard()` is a tensor that every rank holds whole.
    """

    dim: int | None = None
    parts: tuple[int, ...] = ()

    @property
    def is_split(self) -> bool:
        return self.dim is not None

    def local_shape(self, full: Sequence[int], size: int) -> tuple[int, ...]:
        """Shape of one rank's piece of a tensor of shape `full`, cut over `size` ranks."""
        shape = tuple(full)
        if self.dim is None:
            return shape
        self._check(shape, size)
        return (*shape[: self.dim], shape[self.dim] // size, *shape[self.dim + 1 :])

    def ranges(self, full_size: int, rank: int, size: int) -> list[tuple[int, int]]:
        """The half-open runs along `dim` of the whole tensor that make up this rank's piece, in order."""
        runs, start = [], 0
        for part in self.parts or (full_size,):
            share = part // size
            runs.append((start + rank * share, start + (rank + 1) * share))
            start += part
        return runs

    def split(self, full: Tensor, rank: int, size: int) -> Tensor:
        """This rank's piece of the whole tensor; a view where one run is enough."""
        if self.dim is None or size == 1:
            return full
        self._check(tuple(full.shape), size)
        pieces = [full.narrow(self.dim, a, b - a) for a, b in self.ranges(full.shape[self.dim], rank, size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor from every rank's piece, in rank order; the inverse of `split`."""
        if self.dim is None or len(pieces) == 1:
            return pieces[0]
        size = len(pieces)
        shares = [part // size for part in self.parts] or [pieces[0].shape[self.dim]]
        by_part = zip(*(piece.split(shares, dim=self.dim) for piece in pieces), strict=True)
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
    """What everyone needs to know about a parameter beyond its values."""

    shape: tuple[int, ...]  # of the whole tensor
    shard: Shard
    init: Literal["normal", "zeros", "ones"]
    std: float = 0.0  # of a normal start
    decay: bool = True  # weight decay applies
    tied: bool = False  # two stages of a pipeline hold it, as the embedding of a tied head: their gradients are summed
    tied_to: str = ""  # name of the original, on the copy alone: a copy is not counted
    sequence_parallel: bool = False  # held whole by each tp rank, but with a gradient from its s/tp only
    name: str = ""  # given by get_model; layer numbers in it do not depend on the pipeline stage


ParamTable = dict[str, ParamMeta]


def declare(parameter: torch.nn.Parameter, meta: ParamMeta) -> torch.nn.Parameter:
    """The parameter with its description attached, for `get_model` to collect by name."""
    parameter.meta = meta  # type: ignore[attr-defined]
    return parameter
