"""Attention where each rank of cp has s/cp tokens of a sequence, in zig-zag order (`parallel/zigzag.py`).

Everything else in a model treats tokens one by one, so attention alone communicates. It does so in one of three modes.
For a micro-batch with k bytes of local keys and values, q bytes of local queries and N ranks, a rank sends:

    ring        (N-1) k forward; (N-1) k and N gradients of k backward, in fp32. Keys and values travel around a ring,
                and a rank computes with one block while it sends it on.
    all_gather  (N-1) k forward; (N-1) k and (N-1) gradients of k, in fp32, backward. All keys exist on each rank while
                it computes a layer.
    ulysses     (N-1)/N of q, k and the output, forward and backward. An all-to-all gives each rank the full sequence
                for n/N heads, and any implementation of attention computes it.

ring and all_gather keep only local tensors for backward.
Sources: Liu et al., Ring Attention, arXiv 2310.01889; Dubey et al., Llama 3, arXiv 2407.21783, section 3.3.2, for
all_gather; Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.model.attention_parts import PARTS, Part, Sum
from megatron_lite.model.core_attention import IMPLEMENTATIONS, Attention
from megatron_lite.model.masks import Mask
from megatron_lite.parallel.collectives import all_gather, all_to_all_between_regions, reduce_scatter_async, shift_async
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.zigzag import in_rank_order, in_sequence_order, positions


def context_attention(mode: str, implementation: str, cp: Group) -> Attention:
    """Attention of the local tokens to the full sequence, by the implementation and mode of these names.

    Its arguments are those of `Attention`, with s/cp queries, keys and values; `mask` is that of the full sequence.
    """
    if mode == "ulysses":
        return partial(_ulysses, IMPLEMENTATIONS[implementation], cp)
    return partial(_by_parts, _Ring if mode == "ring" else _AllGather, PARTS[implementation], cp)


class _Call(NamedTuple):
    """All arguments but the tensors."""

    part: Part
    cp: Group
    mask: Mask
    scale: float
    softcap: float

    def mask_of(self, source: int, length: int) -> Mask:
        """The mask of local queries and the keys of one rank. `length` is s/cp."""
        rank, size = self.cp.rank, self.cp.size

        def part() -> Mask:
            queries, keys = (positions(length * size, of, size) for of in (rank, source))
            return self.mask.part(queries[None], keys)

        return self.mask.cached(f"keys of rank {source}", (length, rank, size), part)

    def forward(self, total: Sum, query: Tensor, block: Tensor, source: int) -> None:
        """Add attention to the keys and values of one rank."""
        mask = self.mask_of(source, query.shape[2])
        if _sees(mask, query):
            total.add(*self.part.forward(query, *block, mask=mask, scale=self.scale, softcap=self.softcap))

    def backward(self, saved: tuple[Tensor, ...], block: Tensor, source: int, grad_query: Tensor, grad: Tensor) -> None:
        """Add the gradients of queries, and of the keys and values of one rank."""
        mask = self.mask_of(source, saved[1].shape[2])
        if _sees(mask, saved[1]):
            before, after = saved[:2], saved[2:]  # gradient of the output and queries; output and lse
            options = {"mask": mask, "scale": self.scale, "softcap": self.softcap}
            of_query, *of_block = self.part.backward(*before, *block, *after, **options)
            grad_query += of_query
            for place, found in zip(grad, of_block, strict=True):
                place += found


def _sees(mask: Mask, query: Tensor) -> bool:
    """Whether a query sees a key. True is a safe answer; on a GPU the right one would have to wait for the ids."""
    if {"documents", "lengths"} & set(mask.kinds) and query.device.type != "cpu":
        return True
    length = query.shape[2]

    def some() -> bool:
        first, end = mask.ranges(length, length, torch.device("cpu"))
        return bool((end > first).any())

    return mask.cached("sees", (length,), some)


def _by_parts(
    function: type[torch.autograd.Function],
    part: Part,
    cp: Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    scale: float,
    dropout: float,
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    assert dropout == 0, "config/validate.py excludes it"
    out, lse = function.apply(query, key, value, _Call(part, cp, mask, scale, softcap))  # type: ignore[misc]
    return out, lse


class _Ring(torch.autograd.Function):
    """Step t computes with the keys of rank r - t, while they travel on to rank r + 1."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        """Output and lse [b, n/tp, s/cp] of queries [b, n/tp, s/cp, d] and keys and values [b, g/tp, s/cp, d]."""
        cp, total, block = call.cp, Sum(query), torch.stack((key, value))
        for step in range(cp.size):
            following, wait = shift_async(block, cp, tag=0) if step < cp.size - 1 else (block, lambda: None)
            call.forward(total, query, block, (cp.rank - step) % cp.size)
            wait()
            block = following
        return _saved(ctx, call, query, key, value, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        """The same ring. The gradient of a block follows it, one step behind, and ends at the block's own rank."""
        call, (query, key, value, out, lse) = ctx.call, ctx.saved_tensors
        cp, block = call.cp, torch.stack((key, value))
        grad_query, arriving = torch.zeros_like(query, dtype=lse.dtype), torch.zeros_like(block, dtype=lse.dtype)
        wait_for_grad = lambda: None
        for step in range(cp.size):
            following, wait = shift_async(block, cp, tag=0) if step < cp.size - 1 else (block, lambda: None)
            own = torch.zeros_like(arriving)
            call.backward((grad, query, out, lse), block, (cp.rank - step) % cp.size, grad_query, own)
            wait_for_grad()
            arriving, wait_for_grad = shift_async(own.add_(arriving), cp, tag=1)
            wait()
            block = following
        wait_for_grad()
        return grad_query.to(query.dtype), *arriving.to(key.dtype), None


class _AllGather(torch.autograd.Function):
    """One all-gather brings the keys of all ranks; a rank computes with them block by block."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        """As `_Ring.forward`."""
        total = Sum(query)
        for source, block in enumerate(all_gather(torch.stack((key, value))[None], call.cp, dim=0)):
            call.forward(total, query, block, source)
        return _saved(ctx, call, query, key, value, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        """Gathers the keys again, and sums their gradients to the ranks that own them."""
        call, (query, key, value, out, lse) = ctx.call, ctx.saved_tensors
        blocks = all_gather(torch.stack((key, value))[None], call.cp, dim=0)
        grad_query, grad_blocks = torch.zeros_like(query, dtype=lse.dtype), torch.zeros_like(blocks, dtype=lse.dtype)
        for source, block in enumerate(blocks):
            call.backward((grad, query, out, lse), block, source, grad_query, grad_blocks[source])
        (local,), wait = reduce_scatter_async(grad_blocks, call.cp)
        wait()
        return grad_query.to(query.dtype), *local.to(key.dtype), None


def _saved(ctx, call: _Call, query: Tensor, key: Tensor, value: Tensor, total: Sum) -> tuple[Tensor, Tensor]:
    """Output and lse of a forward; local tensors are kept for backward."""
    out = total.out.to(query.dtype)
    ctx.call = call
    ctx.save_for_backward(query, key, value, out, total.lse)
    ctx.mark_non_differentiable(total.lse)
    return out, total.lse


def _ulysses(
    attend: Attention, cp: Group, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, **options: float
) -> tuple[Tensor, None]:
    if key.shape[1] < cp.size:  # each rank needs a group; a group's gradient is the sum over its copies
        key, value = (x.repeat_interleave(cp.size // x.shape[1], 1) for x in (key, value))
    out, _ = attend(*(_to_heads(x, cp) for x in (query, key, value)), mask=mask, **options)
    return _to_tokens(out, cp), None


def _to_heads(x: Tensor, cp: Group) -> Tensor:
    """`[b, n, s/cp, d]` to `[b, n/cp, s, d]`."""
    parts = x.unflatten(1, (cp.size, -1)).permute(1, 3, 0, 2, 4)  # [cp, s/cp, b, n/cp, d]
    full = all_to_all_between_regions(parts, cp).flatten(0, 1)
    return in_sequence_order(full, cp.size, 0).permute(1, 2, 0, 3)


def _to_tokens(x: Tensor, cp: Group) -> Tensor:
    """`[b, n/cp, s, d]` to `[b, n, s/cp, d]`."""
    parts = in_rank_order(x.permute(2, 0, 1, 3), cp.size, 0).unflatten(0, (cp.size, -1))  # [cp, s/cp, b, n/cp, d]
    return all_to_all_between_regions(parts, cp).permute(2, 0, 3, 1, 4).flatten(1, 2)
