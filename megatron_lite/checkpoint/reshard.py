"""Where a rank's numbers lie in a checkpoint of any layout: rectangles that overlap.

A tensor is seen as a matrix whose columns are what tensor parallelism cuts: the dimensions up to the cut one count its
rows, that one and what follows its columns. A rank's cut is then all rows of a few runs of columns, one for each fused
part. A run of a flattened cut, as data-parallel ranks share it out, is at most three rectangles of the cut: the rest of
a first row, whole rows, the start of a last one. So whatever a rank holds of a tensor, and whatever piece of it a file
holds, is a few rectangles of the same matrix; and what has to be copied are their intersections.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from megatron_lite.checkpoint.layout import Piece, TensorLayout
from megatron_lite.parallel.shard import Shard

BLOCK = 2 << 20  # elements that are read at a time


@dataclass(frozen=True)
class Rectangle:
    """Rows `top` to `bottom` and columns `left` to `right` of a tensor's matrix, and where they lie in flat memory."""

    top: int
    bottom: int
    left: int
    right: int
    offset: int  # of the first number
    stride: int  # from one row to the next

    @property
    def numel(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    @property
    def end(self) -> int:
        """Offset after the last number."""
        return self.offset + (self.bottom - self.top - 1) * self.stride + self.right - self.left

    def within(self, top: int, bottom: int, left: int, right: int) -> "Rectangle":
        """What is also in these rows and columns; empty where nothing is."""
        top, bottom = max(top, self.top), min(bottom, self.bottom)
        left, right = max(left, self.left), min(right, self.right)
        if top >= bottom or left >= right:
            return replace(self, bottom=self.top, right=self.left)
        offset = self.offset + (top - self.top) * self.stride + left - self.left
        return Rectangle(top, bottom, left, right, offset, self.stride)

    def of(self, flat: Tensor) -> Tensor:
        """Its numbers in the flat memory, `[rows, columns]`; shares that memory."""
        shape = (self.bottom - self.top, self.right - self.left)
        return flat.as_strided(shape, (self.stride, 1), flat.storage_offset() + self.offset)


def rectangles(
    shape: Sequence[int], shard: Shard, tp_rank: int, tp_size: int, start: int = 0, end: int | None = None
) -> list[Rectangle]:
    """Elements `start` to `end` of the flattened cut of a tensor-parallel rank, in memory that begins at `start`."""
    if shard.dim is None:
        rows, runs = 1, [(0, prod(shape))]
    else:
        rows, unit = prod(shape[: shard.dim]), prod(shape[shard.dim + 1 :])
        runs = [(a * unit, b * unit) for a, b in shard.ranges(shape[shard.dim], tp_rank, tp_size)]
    width = sum(b - a for a, b in runs)
    at, end = start, rows * width if end is None else end
    found = []
    while at < end:
        row, left = divmod(at, width)
        whole_rows = 0 if left else (end - at) // width
        bottom, right = (row + whole_rows, width) if whole_rows else (row + 1, min(width, left + end - at))
        place = 0  # of a run in the cut's columns
        for a, b in runs:
            first, last = max(left, place), min(right, place + b - a)
            if first < last:
                offset = row * width + first - start
                found.append(Rectangle(row, bottom, a + first - place, a + last - place, offset, width))
            place += b - a
        at += (bottom - row) * (right - left)
    return found


@dataclass(frozen=True)
class Move:
    """The same rectangle of a tensor in a stored piece and in the memory to fill."""

    piece: Piece
    source: Rectangle
    target: Rectangle

    def blocks(self) -> Iterator["Move"]:
        """The move in steps that span few numbers of the file each."""
        whole = self.source
        rows = max(1, BLOCK // whole.stride)
        for top in range(whole.top, whole.bottom, rows):
            for left in range(whole.left, whole.right, BLOCK):
                part = (top, min(top + rows, whole.bottom), left, min(left + BLOCK, whole.right))
                yield Move(self.piece, self.source.within(*part), self.target.within(*part))


def moves(tensor: TensorLayout, pieces: Sequence[Piece], tp_size: int, targets: Sequence[Rectangle]) -> list[Move]:
    """What fills the targets from these pieces, which were cut over `tp_size` ranks."""
    found = []
    for piece in pieces:
        for source in rectangles(tensor.shape, tensor.shard, piece.tp, tp_size, piece.start, piece.end):
            for target in targets:
                shared = source.within(target.top, target.bottom, target.left, target.right)
                if shared.numel:
                    bounds = (shared.top, shared.bottom, shared.left, shared.right)
                    found.append(Move(piece, shared, target.within(*bounds)))
    return found
