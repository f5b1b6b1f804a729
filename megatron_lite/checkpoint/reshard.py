"""Copies between a checkpoint of any layout and a rank of any other: intersections of rectangles.

A tensor is seen as a matrix. Its rows are the dimensions before the sharded one; its columns are the sharded one and
the rest. A tensor-parallel shard has all rows of a few column ranges, one for each fused part. A range of a flattened
shard, which one data-parallel rank owns, is at most three rectangles: the rest of a first row, full rows, the start of
a last row. So every local shard and every stored slice is a few rectangles of the same matrix.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from torch import Tensor

from megatron_lite.checkpoint.layout import Layout, StoredSlice, TensorLayout
from megatron_lite.parallel.shard import Shard

BLOCK = 2 << 20  # elements that are read at a time


Box = Sequence[tuple[int, int]]  # a half-open range for each dimension


def tile(boxes: Iterable[Box], whole: Iterable[Box]) -> bool:
    """Whether `boxes` have each element of the boxes `whole` once and no other: then their signed corners cancel."""
    corners: dict[tuple[int, ...], int] = defaultdict(int)
    for sign, part in ((1, boxes), (-1, whole)):
        for box in part:
            for corner in product(*(((start, 1), (end, -1)) for start, end in box)):
                corners[tuple(at for at, _ in corner)] += sign * prod(each for _, each in corner)
    return not any(corners.values())


@dataclass(frozen=True)
class Rectangle:
    """Rows `top` to `bottom` and columns `left` to `right` of a tensor's matrix, and their place in flat memory."""

    top: int
    bottom: int
    left: int
    right: int
    offset: int  # of the first element
    stride: int  # from one row to the next

    @property
    def numel(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    @property
    def end(self) -> int:
        """The offset after the last element."""
        return self.offset + (self.bottom - self.top - 1) * self.stride + self.right - self.left

    def within(self, other: "Rectangle") -> "Rectangle":
        """The intersection with the rows and columns of `other`, in this memory; it may be empty."""
        top, bottom = max(other.top, self.top), min(other.bottom, self.bottom)
        left, right = max(other.left, self.left), min(other.right, self.right)
        if top >= bottom or left >= right:
            return replace(self, bottom=self.top, right=self.left)
        offset = self.offset + (top - self.top) * self.stride + left - self.left
        return Rectangle(top, bottom, left, right, offset, self.stride)

    @property
    def box(self) -> Box:
        """Its ranges of rows and columns."""
        return (self.top, self.bottom), (self.left, self.right)

    def of(self, flat: Tensor) -> Tensor:
        """A view `[rows, columns]` of its elements in the flat memory."""
        shape = (self.bottom - self.top, self.right - self.left)
        return flat.as_strided(shape, (self.stride, 1), flat.storage_offset() + self.offset)


def rectangles(
    shape: Sequence[int],
    shard: Shard,
    tp_rank: int,
    tp_size: int,
    start: int = 0,
    end: int | None = None,
    *,
    copies: bool = True,
) -> list[Rectangle]:
    """Elements `start` to `end` of a tensor-parallel rank's flattened shard, in memory that begins at `start`.

    Without `copies`, ranges that an earlier rank holds too are left out.
    """
    left_out = [] if copies else [(c.start, c.end) for c in shard.copied(shape, tp_rank, tp_size) if not c.is_first]
    if shard.dim is None:
        rows, ranges = 1, [(0, prod(shape))]
    else:
        rows, unit = prod(shape[: shard.dim]), prod(shape[shard.dim + 1 :])
        ranges = [(a * unit, b * unit) for a, b in shard.ranges(shape[shard.dim], tp_rank, tp_size)]
    width = sum(b - a for a, b in ranges)
    position, end = start, rows * width if end is None else end
    found = []
    while position < end:
        row, left = divmod(position, width)
        full_rows = 0 if left else (end - position) // width
        bottom, right = (row + full_rows, width) if full_rows else (row + 1, min(width, left + end - position))
        column = 0  # of the shard, where a range begins
        for a, b in ranges:
            first, last = max(left, column), min(right, column + b - a)
            if first < last and not any(begin <= row * width + first < stop for begin, stop in left_out):
                offset = row * width + first - start
                found.append(Rectangle(row, bottom, a + first - column, a + last - column, offset, width))
            column += b - a
        position += (bottom - row) * (right - left)
    return found


@dataclass(frozen=True)
class Move:
    """One rectangle of a tensor, in a stored slice and in the memory to fill."""

    stored: StoredSlice
    source: Rectangle
    target: Rectangle

    def blocks(self) -> Iterator["Move"]:
        """The move in steps that each span at most about BLOCK elements of the file."""
        full = self.source
        rows = max(1, BLOCK // full.stride)
        for top in range(full.top, full.bottom, rows):
            for left in range(full.left, full.right, BLOCK):
                block = full.within(replace(full, top=top, bottom=top + rows, left=left, right=left + BLOCK))
                yield Move(self.stored, block, self.target.within(block))


def moves(
    tensor: TensorLayout, slices: Sequence[StoredSlice], tp_size: int, targets: Sequence[Rectangle]
) -> list[Move]:
    """The moves that fill the targets from slices that `tp_size` tensor-parallel ranks have saved."""
    found = []
    for stored in slices:
        place = stored.tp, tp_size, stored.start, stored.end
        for source in rectangles(tensor.shape, tensor.shard, *place, copies=False):
            for target in targets:
                if (shared := source.within(target)).numel:
                    found.append(Move(stored, shared, target.within(shared)))
    return found


def find_moves(
    layout: Layout, name: str, kind: str, targets: Sequence[Rectangle], *, tp: int, pp: int, dp: int
) -> list[Move]:
    """The moves that fill the targets from a value of a checkpoint, for the reader of `Layout.slices_for`.

    Only slices that the targets need are looked at, however many there are.
    """
    tensor, size = layout.tensors[name], layout.grid.tp

    def wanted(rank: int) -> tuple[int, int]:
        if not tensor.shard.is_split and rank != tp % size:
            return 0, 0
        sources = rectangles(tensor.shape, tensor.shard, rank, size, copies=False)
        shared = [both for source in sources for target in targets if (both := source.within(target)).numel]
        return min((each.offset for each in shared), default=0), max((each.end for each in shared), default=0)

    return moves(tensor, layout.slices_for(name, kind, wanted, tp=tp, pp=pp, dp=dp), size, targets)
