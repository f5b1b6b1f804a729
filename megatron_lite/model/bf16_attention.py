"""Causal attention in bf16 on the CPU. Its forward is torch's fused kernel, and its backward is batched products.

The backward of torch's kernel multiplies small tiles. Here one product has a block of keys and all queries that see
them, which is closer to the rate of large bf16 products.
Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2, with the letters of the paper.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST_WITH_DROPOUT = 512  # tokens, because all probabilities are kept
CACHED_SCORES = 2**22  # elements of a block of scores, to stay in the L3 cache
# P is stored as 2**4 P, the exponential of the score - (lse - 4 log 2). bf16 rounds exponents near 0 least: without the
# shift that is a key with all of a query's probability, with it one with a sixteenth.
SHIFT = 4


def can_compute(query: Tensor, dropout: float) -> bool:
    """Whether `attention` is for these tensors and this machine. Without bf16 units, torch's kernel is faster."""
    is_short = query.shape[2] <= LONGEST_WITH_DROPOUT
    return (
        query.device.type == "cpu" and query.dtype == torch.bfloat16 and has_bf16_units() and (not dropout or is_short)
    )


@cache
def has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 numbers, as far as torch tells: on x86."""
    return torch.cpu._is_avx512_bf16_supported()


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Causal attention of [b, n, s, d], for which `can_compute` is true."""
    Q, K, V = (x.flatten(0, 1) for x in (query, key, value))
    if not dropout:
        return _Attention.apply(Q, K, V, scale).view_as(query)  # type: ignore[union-attr]
    # As torch without a fused kernel, which takes longer: scores and probabilities in bf16, the softmax in fp32.
    future = Q.new_full((Q.shape[1], K.shape[1]), -torch.inf).triu(1)
    scores = torch.baddbmm(future, Q, K.mT, alpha=scale)
    return (F.dropout(scores.softmax(dim=-1), dropout) @ V).view_as(query)


class _Attention(torch.autograd.Function):
    """Tensors are [b*n, s, d]."""

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, scale: float) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(Q[None], K[None], V[None], 0.0, True, scale=scale)
        ctx.save_for_backward(Q, K, V, out[0], lse[0])
        ctx.scale = scale
        return out[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        Q, K, V, out, lse = ctx.saved_tensors
        count, length, _ = Q.shape
        dQ, dK, dV = (torch.empty(x.shape, dtype=x.dtype) for x in (Q, K, V))
        # The products subtract lse and D in fp32, before they round their results.
        D = (dO.float() * out.float()).sum(-1)
        Q_lse, K_1 = _with_columns(Q, (lse - SHIFT * math.log(2)) / ctx.scale), _with_columns(K)
        dO_D, V_1 = _with_columns(dO, D), _with_columns(V)
        # Keys of a block: smaller ones skip more of the hidden scores, larger ones need fewer sums into dQ.
        block = min(length, 128 if length <= 512 else 256 if length <= 2048 else 512)
        heads_at_once = min(count, max(torch.get_num_threads(), CACHED_SCORES // (block * length)))
        memory = Q.new_empty(2, heads_at_once * block * length)
        for first in range(0, count, heads_at_once):
            heads = slice(first, first + heads_at_once)
            of_queries = torch.zeros(Q[heads].shape)
            for start in range(0, length, block):
                rows, later = slice(start, start + block), slice(start, None)  # keys, and the queries that see them
                Q_i, dO_i, K_j = Q[heads, later], dO[heads, later], K[heads, rows]
                shape = len(K_j), K_j.shape[1], Q_i.shape[1]
                P, dS = (x[: math.prod(shape)].view(shape) for x in memory)
                _multiply(K_1[heads, rows], Q_lse[heads, later].mT, P, ctx.scale).exp_()
                P[:, :, : shape[1]].triu_()
                _multiply(P, dO_i, dV[heads, rows], 2.0**-SHIFT)
                _multiply(V_1[heads, rows], dO_D[heads, later].mT, dS).mul_(P)
                _multiply(dS, Q_i, dK[heads, rows], ctx.scale * 2.0**-SHIFT)
                of_queries[:, later] += dS.mT @ K_j
            dQ[heads] = of_queries.mul_(ctx.scale * 2.0**-SHIFT)
        return dQ, dK, dV, None


def _multiply(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _with_columns(x: Tensor, values: Tensor | None = None) -> Tensor:
    """x with two more columns: fp32 values as a sum of two bf16 ones, or -1. The product of both kinds subtracts."""
    if values is None:
        columns = x.new_full((*x.shape[:2], 2), -1.0)
    else:
        high = values.to(x.dtype)
        columns = torch.stack((high, (values - high).to(x.dtype)), dim=-1)
    return torch.cat((x, columns), dim=-1)
