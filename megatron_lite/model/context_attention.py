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

from collections.abc import Callable
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

    def options(self, mask: Mask) -> dict[str, object]:
        """Keyword arguments of the functions of a part."""
        return {"mask": mask, "scale": self.scale, "softcap": self.softcap}

    def mask_of(self, length: int, source: int | None) -> Mask:
        """The mask of local queries and the keys of one rank, or None for all keys. `length` is s/cp."""

        def part() -> Mask:
            full, size = length * self.cp.size, self.cp.size
            keys = None if source is None else positions(full, source, size)
            return self.mask.part(positions(full, self.cp.rank, size)[None], keys)

        return self.mask.cached(f"keys of rank {source}", (length, self.cp), part)

    def sees(self, mask: Mask, length: int, device: torch.device) -> bool:
        """Whether a local query sees a key of this part. The answer can be True for nothing: on a GPU it would have to
        wait for the document ids."""
        if mask.documents is not None and device.type != "cpu":
            return True
        first, end = mask.ranges(length, length, torch.device("cpu"))
        return mask.cached("sees", (length,), lambda: bool((end > first).any()))


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
    assert dropout == 0, "config/attention.py excludes it"
    out, lse = function.apply(query, key, value, _Call(part, cp, mask, scale, softcap))  # type: ignore[misc]
    return out, lse


class _Ring(torch.autograd.Function):
    """Step t computes with the keys of rank r - t, while they travel on to rank r + 1."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        length, cp, total = query.shape[2], call.cp, Sum(query)
        block = torch.stack((key, value))
        for step in range(cp.size):
            mask = call.mask_of(length, (cp.rank - step) % cp.size)
            following, wait = shift_async(block, cp, tag=0) if step < cp.size - 1 else (block, lambda: None)
            if call.sees(mask, length, query.device):
                total.add(*call.part.forward(query, *block, **call.options(mask)))
            wait()
            block = following
        out = total.out.to(query.dtype)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, total.lse)
        ctx.mark_non_differentiable(total.lse)
        return out, total.lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        """The same ring. The gradient of a block follows it, one step behind, and ends at the block's own rank."""
        call, (query, key, value, out, lse) = ctx.call, ctx.saved_tensors
        length, cp = query.shape[2], call.cp
        block = torch.stack((key, value))
        grad_query, grad_block = torch.zeros_like(query, dtype=lse.dtype), torch.zeros_like(block, dtype=lse.dtype)
        wait_for_grad: Callable[[], object] = lambda: None
        for step in range(cp.size):
            mask = call.mask_of(length, (cp.rank - step) % cp.size)
            following, wait = shift_async(block, cp, tag=0) if step < cp.size - 1 else (block, lambda: None)
            found = None
            if call.sees(mask, length, query.device):
                found = call.part.backward(grad, query, *block, out, lse, **call.options(mask))
            wait_for_grad()
            if found is not None:
                grad_query += found[0]
                grad_block[0] += found[1]
                grad_block[1] += found[2]
            grad_block, wait_for_grad = shift_async(grad_block, cp, tag=1)
            wait()
            block = following
        wait_for_grad()
        return grad_query.to(query.dtype), *grad_block.to(key.dtype), None


class _AllGather(torch.autograd.Function):
    """All keys at once; backward gathers them again."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        options = call.options(call.mask_of(query.shape[2], None))
        out, lse = call.part.forward(query, *_gathered(key, value, call.cp), **options)
        out = out.to(query.dtype)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        call, (query, key, value, out, lse) = ctx.call, ctx.saved_tensors
        options = call.options(call.mask_of(query.shape[2], None))
        keys = _gathered(key, value, call.cp)
        grad_query, *of_keys = call.part.backward(grad, query, *keys, out, lse, **options)
        full = torch.stack(of_keys).to(lse.dtype).permute(3, 0, 1, 2, 4)
        local, wait = reduce_scatter_async(in_rank_order(full, call.cp.size, 0), call.cp)
        wait()
        grad_key, grad_value = local.permute(1, 2, 3, 0, 4).to(key.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, None


def _gathered(key: Tensor, value: Tensor, cp: Group) -> tuple[Tensor, Tensor]:
    """Keys and values of the full sequence, [b, g, s, d], in its order."""
    local = torch.stack((key, value)).permute(3, 0, 1, 2, 4)
    full = in_sequence_order(all_gather(local, cp, dim=0), cp.size, dim=0).permute(1, 2, 3, 0, 4)
    return full[0], full[1]


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
