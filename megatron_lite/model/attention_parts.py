"""Attention of some queries and some keys, and the sum of such parts: what context parallelism computes on one rank.

A part is attention over its keys alone, with the log-sum-exp of its scores, lse. The output over all keys is the mean
of the parts' outputs, weighted by exp(lse). Backward needs no partial results: with the output and the lse over all
keys, a part finds its share of every gradient.
Sources: Dao, FlashAttention-2, arXiv 2307.08691, section 3.1; Liu et al., Ring Attention, arXiv 2310.01889, section 3.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.model.core_attention import math_attention, repeated, tiled_attention, triton_attention
from megatron_lite.model.masks import Mask, Rectangle


class Part(NamedTuple):
    """An implementation for parts.

    forward    (query, key, value, *, mask, scale, softcap) -> out, lse, as of `Attention`; `mask` is a `Mask.part`
    backward   (grad, query, key, value, out, lse, *, mask, scale, softcap) -> gradients of query, key and value
    grad, out  [b, n/tp, s_q, d]   of the output over all keys, as is lse [b, n/tp, s_q]
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class Sum:
    """Output and lse over the keys of all parts so far, in fp32 (fp64 for fp64)."""

    def __init__(self, query: Tensor):
        self.out = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        self.lse = self.out.new_full(query.shape[:3], -torch.inf)

    def add(self, out: Tensor, lse: Tensor, rows: slice = slice(None), queries: slice = slice(None)) -> None:
        """Add a part for these rows of the batch and these queries."""
        old_out, old_lse = self.out[rows, :, queries], self.lse[rows, :, queries]
        total = torch.logaddexp(old_lse, lse)
        finite = total.clamp(min=torch.finfo(total.dtype).min)  # a query without keys so far has -inf
        old_weight, weight = ((x - finite).exp()[..., None] for x in (old_lse, lse))
        old_out.mul_(old_weight).add_(out * weight)
        old_lse.copy_(total)


def _math_backward(*tensors: Tensor, mask: Mask, scale: float, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2, algorithm 2, in one tile."""
    grad, query, key, value, out, lse = tensors
    groups, work = key.shape[1], lse.dtype
    grad, query, out = (x.to(work) for x in (grad, query, out))
    keys, values = (x.to(work) for x in repeated(query, key, value))
    scores = scale * query @ keys.mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = mask.dense(query.shape[2], key.shape[2], query.device)
    weights = (scores - lse[..., None].clamp(min=torch.finfo(work).min)).exp().masked_fill(~visible, 0.0)
    grad_scores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True))
    if softcap:
        grad_scores = grad_scores * (1 - (scores / softcap) ** 2)
    of_heads = scale * grad_scores.mT @ query, weights.mT @ grad
    grad_key, grad_value = (x.unflatten(1, (groups, -1)).sum(2) for x in of_heads)
    return scale * grad_scores @ keys, grad_key, grad_value


def _tiled_backward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    from megatron_lite.model.flash_tiled import backward_of_part

    return backward_of_part(*tensors, **options)


def _triton_backward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    from megatron_lite.model.flash_triton import backward_of_part

    return backward_of_part(*tensors, **options)


def _sdpa_forward(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """torch's fused kernels, one call for each rectangle of the mask."""
    assert softcap == 0, "config/attention.py excludes it"
    total = Sum(query)
    for rows, queries, keys, causal in _areas(mask, query, key):
        q, k, v = query[rows, :, queries], key[rows, :, keys], value[rows, :, keys]
        out, lse, *_ = _kernel(q, k, v, causal, scale)
        total.add(out, lse, rows, queries)
    return total.out, total.lse


def _sdpa_backward(*tensors: Tensor, mask: Mask, scale: float, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value, out, lse = tensors
    grads = tuple(torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))
    for rows, queries, keys, causal in _areas(mask, query, key):
        of_area = [x[rows, :, queries] for x in (grad, query, out, lse)]
        of_area += [x[rows, :, keys] for x in (key, value)]
        found = _kernel_backward(of_area, causal, scale)
        for total, place, part in zip(grads, (queries, keys, keys), found, strict=True):
            total[rows, :, place] += part
    return grads  # type: ignore[return-value]


def _areas(mask: Mask, query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, slice, bool]]:
    """Rows of the batch, queries and keys of each call of the kernel, and whether it is causal."""

    def area(rows: slice, of: Rectangle) -> tuple[slice, slice, slice, bool]:
        return rows, slice(of.q0, of.q1), slice(of.k0, of.k1), of.causal

    rows = mask.rectangles(query.shape[2], key.shape[2], query.device)
    for at, row in enumerate(rows):
        here = slice(at, at + 1) if len(rows) > 1 else slice(None)
        yield from (area(here, found) for found in row if found.k1 > found.k0)


def _kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    """Output, lse and on a GPU the kernel's other results. torch has no public function that returns the lse."""
    ops = torch.ops.aten
    if query.device.type == "cpu":
        return ops._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return ops._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)


def _kernel_backward(tensors: list[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, out, lse, key, value = tensors
    ops, tensors = torch.ops.aten, [grad, query, key, value, out.to(query.dtype), lse.contiguous()]
    if query.device.type == "cpu":
        return ops._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)
    # Without dropout the state of the random generator is not read.
    seed, offset = (torch.empty(0, dtype=torch.int64, device=query.device) for _ in range(2))
    lengths = (None, None, query.shape[2], key.shape[2])
    return ops._scaled_dot_product_flash_attention_backward(*tensors, *lengths, 0.0, causal, seed, offset, scale=scale)


PARTS: dict[str, Part] = {
    "math": Part(partial(math_attention, dropout=0.0), _math_backward),
    "tiled": Part(partial(tiled_attention, dropout=0.0), _tiled_backward),
    "triton": Part(partial(triton_attention, dropout=0.0), _triton_backward),
    "sdpa": Part(_sdpa_forward, _sdpa_backward),
}
