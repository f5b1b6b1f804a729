"""What the numbers in a checkpoint are, and how those of two differ, in little memory and for any layout."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_lite.checkpoint.layout import Layout, Piece, TensorLayout
from megatron_lite.checkpoint.reshard import Move, moves, rectangles
from megatron_lite.checkpoint.store import Opened


@dataclass
class Numbers:
    """Of all of a tensor's numbers: the L2 norm of the finite ones, and how many are not."""

    norm: float = 0.0
    not_finite: int = 0


@dataclass
class Difference:
    """Between two tensors: how many numbers have other bits, how far they are apart at most, and the largest number.

    A NaN on one side only is infinitely far; on both sides it is no difference if its bits are the same.
    """

    differing: int = 0
    largest: float = 0.0
    scale: float = 0.0


def numbers(opened: Opened, name: str, kind: str) -> Numbers:
    """Of the whole tensor; of the first data-parallel rank's, where each has its own."""
    total, found = 0.0, Numbers()
    tensor = opened.layout.tensors[name]
    for piece in _pieces(opened.layout, tensor, kind, 0):
        for block in _blocks(opened.layout, tensor, piece):
            values = opened.view(block.piece, block.source).double()
            finite = values.isfinite()
            found.not_finite += int(values.numel() - finite.sum())
            total += float(values[finite].square().sum())
    found.norm = math.sqrt(total)
    return found


def difference(a: Opened, b: Opened, name: str, kind: str) -> Difference | str:
    """Between what two checkpoints hold of a tensor; a text where they cannot be compared number by number."""
    tensors = [opened.layout.tensors.get(name) for opened in (a, b)]
    here = ["A", "B"]
    missing = [side for side, tensor in zip(here, tensors, strict=True) if tensor is None or kind not in tensor.values]
    if missing:
        return f"not in {' and '.join(missing)}"
    in_a, in_b = tensors
    assert in_a is not None and in_b is not None
    if (in_a.shape, in_a.shard) != (in_b.shape, in_b.shard):
        return f"{list(in_a.shape)} cut as {in_a.shard} in A, {list(in_b.shape)} cut as {in_b.shard} in B"
    found = Difference()
    replicas = [{piece.dp for piece in tensor.values[kind].pieces} for tensor in (in_a, in_b)]
    if replicas[0] != replicas[1]:
        return "not of the same data-parallel ranks in A and B"
    for dp in replicas[0]:
        others = _pieces(b.layout, in_b, kind, dp or 0)
        pairs = [
            (piece, move)
            for piece in _pieces(a.layout, in_a, kind, dp or 0)
            for move in moves(
                in_b,
                others,
                b.layout.grid.tp,
                rectangles(in_a.shape, in_a.shard, piece.tp, a.layout.grid.tp, piece.start, piece.end),
            )
        ]
        if (shared := sum(move.target.numel for _, move in pairs)) != prod(in_a.shape):
            return f"only {shared:,} of {prod(in_a.shape):,} numbers are in both"
        for piece, move in pairs:
            for block in move.blocks():
                _count(found, a.view(piece, block.target), b.view(block.piece, block.source))
    return found


def names_and_kinds(*layouts: Layout) -> list[tuple[str, str]]:
    """What is in any of these, but for copies of other tensors."""
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
        unequal &= _bits(a) != _bits(b)  # NaNs are not equal to themselves
    distance = (wide_a - wide_b).abs().nan_to_num(math.inf)[unequal]
    found.differing += int(unequal.sum())
    found.largest = max(found.largest, float(distance.max()) if distance.numel() else 0.0)
    found.scale = max(found.scale, float(torch.maximum(wide_a.abs(), wide_b.abs()).nan_to_num(0.0).max()))


def _bits(x: Tensor) -> Tensor:
    """The numbers as integers."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _pieces(layout: Layout, tensor: TensorLayout, kind: str, dp: int) -> list[Piece]:
    return tensor.values[kind].pieces_for(tensor.shard, 0, 0, dp, layout.grid.tp)


def _blocks(layout: Layout, tensor: TensorLayout, piece: Piece) -> Iterator[Move]:
    for rectangle in rectangles(tensor.shape, tensor.shard, piece.tp, layout.grid.tp, piece.start, piece.end):
        yield from Move(piece, rectangle, rectangle).blocks()
