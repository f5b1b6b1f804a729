"""checkpoint/reshard.py: any layout's files fill the shards of any other layout."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpoint import reshard
from megatron_lite.checkpoint.layout import StoredSlice, TensorLayout
from megatron_lite.checkpoint.reshard import moves, rectangles
from megatron_lite.parallel.shard import Shard

SIZES = (1, 2, 3, 4)
PARTS = 12  # divisible by every tensor-parallel size


@st.composite
def tensors(draw) -> TensorLayout:
    """A shape and a Shard of it that divides over up to four ranks."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    if not shape or draw(st.booleans()):
        return TensorLayout(shape=tuple(shape), shard=Shard(), values={})
    dim = draw(st.integers(0, len(shape) - 1))
    parts = draw(st.lists(st.sampled_from([PARTS, 2 * PARTS]), min_size=1, max_size=3))
    shape[dim] = sum(parts)
    parts = tuple(parts) if len(parts) > 1 else ()
    # One unit: every rank holds a copy of the part.
    units = tuple(draw(st.sampled_from([1, PARTS])) for _ in parts) if dim == 0 and draw(st.booleans()) else ()
    return TensorLayout(shape=tuple(shape), shard=Shard(dim, parts, units), values={})


def ranges(draw, numel: int) -> list[tuple[int, int]]:
    """Consecutive ranges of any size that cover a flat shard."""
    ends = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
    return list(zip([0, *ends], [*ends, numel], strict=True))


@settings(max_examples=300)
@given(tensor=tensors(), source=st.sampled_from(SIZES), target=st.sampled_from(SIZES), data=st.data())
def test_any_range_of_any_layout_is_filled_from_the_slices_of_any_other_layout(tensor, source, target, data):
    """The reference is plain slicing of the full tensor. A wrong place would mix weights without an error."""
    full = torch.arange(prod(tensor.shape)).view(tensor.shape)
    stored: dict[tuple[int, int], torch.Tensor] = {}
    slices = []
    for rank in range(source if tensor.shard.is_split else 1):
        flat = tensor.shard.split(full, rank, source).flatten()
        for start, end in ranges(data.draw, flat.numel()):
            stored[rank, start] = flat[start:end].clone()
            slices.append(StoredSlice(file="mp_rank_00/x.safetensors", key="x", tp=rank, pp=0, start=start, end=end))
    for rank in range(target):
        shard = tensor.shard.split(full, rank, target).flatten()
        for start, end in ranges(data.draw, shard.numel()):
            wanted = rectangles(tensor.shape, tensor.shard, rank, target, start, end)
            filled = torch.full((end - start,), -1)
            found = moves(tensor, slices, source, wanted)
            for move in found:
                move.target.of(filled).copy_(move.source.of(stored[move.stored.tp, move.stored.start]))
            assert torch.equal(filled, shard[start:end])
            assert sum(move.target.numel for move in found) == end - start, "an element was copied twice"


def test_a_large_move_is_divided_into_blocks_of_few_bytes(monkeypatch):
    """Otherwise loading would need the memory of a full embedding."""
    monkeypatch.setattr(reshard, "BLOCK", 40)
    for tensor in (
        TensorLayout(shape=(50, 32), shard=Shard(1), values={}),
        TensorLayout(shape=(300, 3), shard=Shard(0), values={}),
        TensorLayout(shape=(500,), shard=Shard(), values={}),
    ):
        full = torch.arange(prod(tensor.shape)).view(tensor.shape)
        slice_ = StoredSlice(file="mp_rank_00/x.safetensors", key="x", tp=0, pp=0, start=0, end=full.numel())
        (move,) = moves(tensor, [slice_], 1, rectangles(tensor.shape, tensor.shard, 1, 2))
        shard = tensor.shard.split(full, 1, 2).flatten()
        filled, blocks = torch.full((shard.numel(),), -1), list(move.blocks())
        for block in blocks:
            assert block.source.end - block.source.offset <= 40
            block.target.of(filled).copy_(block.source.of(full.flatten()))
        assert torch.equal(filled, shard) and len(blocks) >= shard.numel() / 40
