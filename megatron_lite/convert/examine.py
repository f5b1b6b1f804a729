"""Statistics of the values in a checkpoint, and differences between two of any layout, in little memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_lite.checkpoint.layout import Layout, StoredSlice, TensorLayout, Value
from megatron_lite.checkpoint.reshard import Move, Rectangle, find_moves, rectangles
from megatron_lite.checkpoint.store import Opened


@dataclass
class Statistics:
    """The L2 norm of a tensor's finite elements, and the count of the others."""

    norm: float = 0.0
    not_finite: int = 0


@dataclass
class Difference:
    """How two tensors differ: the count of elements with other bits, the largest distance and the largest magnitude.

    A NaN on one side alone has an infinite distance. Two NaNs with the same bits are equal.
    """

    differing: int = 0
    largest: float = 0.0
    scale: float = 0.0


def statistics(opened: Opened, name: str, kind: str) -> Statistics:
    """The statistics of a full tensor. Where values differ between data-parallel ranks, those of the first rank."""
    total, found = 0.0, Statistics()
    tensor = opened.layout.tensors[name]
    for stored in opened.layout.slices_for(name, kind, tp=0, pp=0, dp=0):
        for block in _blocks(opened.layout, tensor, stored):
            values = opened.view(block.stored, block.source).double()
            finite = values.isfinite()
            found.not_finite += int(values.numel() - finite.sum())
            total += float(values[finite].square().sum())
    found.norm = math.sqrt(total)
    return found


def difference(a: Opened, b: Opened, name: str, kind: str) -> Difference | str:
    """The difference of a tensor in two checkpoints, or a text where they cannot be compared."""
    tensors = {side: opened.layout.tensors.get(name) for side, opened in (("A", a), ("B", b))}
    missing = [side for side, tensor in tensors.items() if tensor is None or kind not in tensor.values]
    if missing:
        return f"not in {' and '.join(missing)}"
    in_a, in_b = tensors["A"], tensors["B"]
    assert in_a is not None and in_b is not None
    if (in_a.shape, in_a.shard) != (in_b.shape, in_b.shard):
        return f"{list(in_a.shape)} split as {in_a.shard} in A, {list(in_b.shape)} split as {in_b.shard} in B"
    found = Difference()
    replicas = [_replicas(tensor.values[kind]) for tensor in (in_a, in_b)]
    if replicas[0] != replicas[1]:
        return "not of the same data-parallel ranks in A and B"
    for dp in replicas[0]:
        place = {"tp": 0, "pp": 0, "dp": dp or 0}
        pairs = [
            (stored, move)
            for stored in a.layout.slices_for(name, kind, **place)
            for move in find_moves(b.layout, name, kind, _rectangles(in_a, a.layout, stored), **place)
        ]
        if (common := sum(move.target.numel for _, move in pairs)) != prod(in_a.shape):
            return f"only {common:,} of {prod(in_a.shape):,} elements are in both"
        for stored, move in pairs:
            for block in move.blocks():
                _count(found, a.view(stored, block.target), b.view(block.stored, block.source))
    return found


def names_and_kinds(*layouts: Layout) -> list[tuple[str, str]]:
    """The name and kind of each value in any of the layouts, without copies of other tensors."""
    found: dict[tuple[str, str], None] = {}
    for layout in layouts:
        for name, tensor in layout.tensors.items():
            if not tensor.copy_of:
                found |= {(name, kind): None for kind in tensor.values}
    return list(found)


def _count(found: Difference, a: Tensor, b: Tensor) -> None:
    wide_a, wide_b = a.double(), b.double()
    unequal = wide_a != wide_b
    if a.dtype == b.dtype:
        unequal &= _bits(a) != _bits(b)  # a NaN never equals a NaN
    distance = (wide_a - wide_b).abs().nan_to_num(math.inf)[unequal]
    found.differing += int(unequal.sum())
    found.largest = max(found.largest, float(distance.max()) if distance.numel() else 0.0)
    found.scale = max(found.scale, float(torch.maximum(wide_a.abs(), wide_b.abs()).nan_to_num(0.0).max()))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _replicas(value: Value) -> set[int | None]:
    """The data-parallel ranks with values of their own; None where all have equal values."""
    listed = {stored.dp for stored in value.slices}
    return listed.union(*(range(*rule.dp) if rule.dp else {None} for rule in value.rules))


def _rectangles(tensor: TensorLayout, layout: Layout, stored: StoredSlice) -> list[Rectangle]:
    place = stored.tp, layout.grid.tp, stored.start, stored.end
    return rectangles(tensor.shape, tensor.shard, *place, copies=False)


def _blocks(layout: Layout, tensor: TensorLayout, stored: StoredSlice) -> Iterator[Move]:
    for rectangle in _rectangles(tensor, layout, stored):
        yield from Move(stored, rectangle, rectangle).blocks()
