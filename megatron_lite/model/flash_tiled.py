# ruff: noqa: E741 - O and l are letters of the papers
"""FlashAttention 1 and 2 in plain torch: a softmax over all keys can be computed one tile of keys at a time.

A softmax needs the maximum m and the sum l of the exponentials of a row. A further tile of keys updates both, and
exp(m_old - m_new) rescales results with the old maximum. So s x s scores never exist, and a GPU moves only tiles
between its slow memory (HBM) and the fast memory of a multiprocessor. In this file slow memory is the tensors that a
`Traffic` loads and stores. Fast memory is the local variables of a step, and a tile of scores is in registers.

The letters are those of the papers: T_r tiles of B_r queries, numbered by i, and T_c tiles of B_c keys, numbered by j;
head size d, and M bytes of fast memory. Batch and heads are independent, so they are axes of every tile.
Sources: FlashAttention, arXiv 2205.14135, algorithms 1, 2 and 4; FlashAttention-2, arXiv 2307.08691, algorithms 1, 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.model.masks import Mask

A100_BYTES = 192 * 1024  # fast memory of one multiprocessor of an A100
SMALLEST_TILE = 16  # the smallest side of a product on tensor cores
# Rows of a tile if M is not given. On a CPU smaller tiles lose time between products, and with larger ones the scores
# leave the cache and a causal mask skips less. Measured: 192 and 256 are fastest for 2,048 tokens, 128 for 512.
DEFAULT_TILE = 256


@dataclass
class Traffic:
    """Bytes that move between slow and fast memory, in both directions, without the ranges of the mask.

    A kernel computes the ranges of a causal mask, and those of other masks are 8 bytes for each query.
    """

    num_bytes: int = 0

    def load(self, tile: Tensor) -> Tensor:
        """A tile in fast memory, where 16-bit values become fp32."""
        self.num_bytes += tile.nbytes
        return tile.to(torch.promote_types(tile.dtype, torch.float32))

    def store(self, tile: Tensor, value: Tensor | float) -> None:
        """Write to a tile of slow memory."""
        self.num_bytes += tile.nbytes
        tile[...] = value


class TileGrid:
    """T_r x T_c tiles of scores, and what a mask leaves of each.

    Ranges of keys do not decrease along the queries, so the first and the last query of a tile bound those of all.
    """

    def __init__(self, mask: Mask, num_queries: int, num_keys: int, B_r: int, B_c: int, device: torch.device):
        self.first, self.end = first, end = mask.ranges(num_queries, num_keys, device)
        self.rows = [slice(start, min(start + B_r, num_queries)) for start in range(0, num_queries, B_r)]
        self.columns = [slice(start, min(start + B_c, num_keys)) for start in range(0, num_keys, B_c)]
        starts, lasts = [rows.start for rows in self.rows], [rows.stop - 1 for rows in self.rows]
        self._some = list(zip(first[:, starts].amin(0).tolist(), end[:, lasts].amax(0).tolist(), strict=True))
        self._all = list(zip(first[:, lasts].amax(0).tolist(), end[:, starts].amin(0).tolist(), strict=True))

    def kind(self, i: int, j: int) -> Literal["skipped", "partial", "full"]:
        """Whether queries of tile i see no keys of tile j, some, or all of them."""
        keys, some, every = self.columns[j], self._some[i], self._all[i]
        if keys.stop <= some[0] or keys.start >= some[1]:
            return "skipped"
        return "full" if every[0] <= keys.start and keys.stop <= every[1] else "partial"

    def columns_of(self, i: int) -> list[tuple[int, slice]]:
        """Tiles of keys that some query of tile i sees."""
        return [(j, columns) for j, columns in enumerate(self.columns) if self.kind(i, j) != "skipped"]

    def rows_of(self, j: int) -> list[tuple[int, slice]]:
        """Tiles of queries that see some key of tile j."""
        return [(i, rows) for i, rows in enumerate(self.rows) if self.kind(i, j) != "skipped"]

    def masked(self, S: Tensor, i: int, j: int) -> Tensor:
        """Scores of tile i, j, with -inf where a query does not see a key."""
        if self.kind(i, j) == "full":
            return S
        key = torch.arange(self.columns[j].start, self.columns[j].stop, device=S.device)
        first, end = (x[:, self.rows[i], None] for x in (self.first, self.end))
        return S.masked_fill(((key < first) | (key >= end))[:, None, None], -torch.inf)


@dataclass(frozen=True)
class _Call:
    """All arguments but the tensors."""

    grid: TileGrid
    scale: float
    dropout: float
    softcap: float
    seed: Tensor | int
    traffic: Traffic

    def scores(self, Q_i: Tensor, K_j: Tensor) -> Tensor:
        """S before bias and mask, [b, g, n/g, B_r, B_c]."""
        S = (self.scale * Q_i) @ K_j.mT
        return S.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else S

    def masked(self, S: Tensor, bias: Tensor | None, i: int, j: int) -> Tensor:
        """S with its bias, and -inf where a query does not see a key."""
        tile = _tile(bias, self.grid.rows[i], self.grid.columns[j])
        return self.grid.masked(S if tile is None else S + self.traffic.load(tile).to(S.dtype), i, j)

    def kept(self, P: Tensor, i: int, j: int) -> Tensor | float:
        """Z: 0 for dropped probabilities, 1 / (1 - dropout) for the others. A hash of seed, head, query and key
        decides, so backward finds the same Z, in tiles of any size."""
        if self.dropout == 0:
            return 1.0
        query, key = (torch.arange(x.start, x.stop, device=P.device) for x in (self.grid.rows[i], self.grid.columns[j]))
        head = torch.arange(P.shape[:3].numel(), device=P.device).view(*P.shape[:3], 1, 1)  # of all rows of the batch
        hashed = _hash(_hash(_hash(head ^ self.seed) ^ query[:, None]) ^ _hash(key))
        return (hashed >= int(self.dropout * 2**32)).to(P.dtype).div_(1 - self.dropout)


def _tile(bias: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    """The biases [1 or b, 1 or g, 1 or n/g, 1 or B_r, B_c] of a tile."""
    return None if bias is None else bias[..., rows if bias.shape[-2] > 1 else slice(None), columns]


def _hash(x: Tensor) -> Tensor:
    """32 mixed bits for each int64 below 2**32: the finalizer of MurmurHash3."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


class FlashAttention1(torch.autograd.Function):
    """Version 1: the outer loop is over keys, so each step loads and stores O, l and m of its queries."""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        """Algorithms 1 and 2. O is normalised after every step. A query without keys has l = 0; other l are at least 1,
        since the largest score adds exp(0)."""
        load, store, grid = call.traffic.load, call.traffic.store, call.grid
        Q, K, V = _grouped(key, query, key, value)
        O, l, m, lse = _accumulators(Q, Q.shape[-1], 1, 1, 1)
        lowest = torch.finfo(O.dtype).min  # with -inf, differences would be nan
        for x, first_value in ((O, 0.0), (l, 0.0), (m, lowest)):
            store(x, first_value)
        for j, columns in enumerate(grid.columns):
            K_j, V_j = load(K[..., columns, :]), load(V[..., columns, :])
            for i, rows in grid.rows_of(j):
                Q_i, O_i, l_i, m_i = (load(x[..., rows, :]) for x in (Q, O, l, m))
                S = call.masked(call.scores(Q_i, K_j), bias, i, j)
                m_ij = S.amax(-1, keepdim=True).clamp(min=lowest)
                P = torch.exp(S - m_ij)
                m_new = torch.maximum(m_i, m_ij)
                old, new = torch.exp(m_i - m_new), torch.exp(m_ij - m_new)
                l_new = old * l_i + new * P.sum(-1, keepdim=True)
                O_new = (old * l_i * O_i + new * ((P * call.kept(P, i, j)) @ V_j)) / l_new.clamp(min=1)
                for x, x_new in ((O, O_new), (l, l_new), (m, m_new)):
                    store(x[..., rows, :], x_new)
        store(lse, load(m) + load(l).log())  # for the caller; backward loads m and l
        ctx.call, out = call, _rounded(O, query, call.traffic)
        ctx.save_for_backward(query, key, value, out, l, m, bias)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Algorithm 4. Each step loads O, l and m, and computes D again."""
        query, key, value, out, l, m, bias = ctx.saved_tensors  # once: recomputation allows no second access

        def probabilities(S: Tensor, dO_i: Tensor, O_i: Tensor, l_i: Tensor, m_i: Tensor) -> tuple[Tensor, Tensor]:
            return torch.exp(S - m_i) / l_i.clamp(min=1), (dO_i * O_i).sum(-1, keepdim=True)

        saved, has_dbias = (*_grouped(key, out), l, m), ctx.needs_input_grad[3]
        return *_backward(ctx.call, query, key, value, bias, grad, saved, probabilities, has_dbias), None


class FlashAttention2(torch.autograd.Function):
    """Version 2: the outer loop of forward is over queries, so O, l and m stay in fast memory until they are final."""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        """Algorithm 1. O is divided by l once, and L = m + log l is all that backward needs of both."""
        load, store, grid = call.traffic.load, call.traffic.store, call.grid
        Q, K, V = _grouped(key, query, key, value)
        O, (L,) = torch.empty_like(Q, memory_format=torch.contiguous_format), _accumulators(Q, 1)
        for i, rows in enumerate(grid.rows):
            Q_i = load(Q[..., rows, :])
            O_i, l_i = torch.zeros_like(Q_i), torch.zeros_like(Q_i[..., :1])
            m_i = torch.full_like(l_i, torch.finfo(l_i.dtype).min)  # with -inf, differences would be nan
            for j, columns in grid.columns_of(i):
                K_j, V_j = load(K[..., columns, :]), load(V[..., columns, :])
                S = call.masked(call.scores(Q_i, K_j), bias, i, j)
                m_new = torch.maximum(m_i, S.amax(-1, keepdim=True))
                P, old = torch.exp(S - m_new), torch.exp(m_i - m_new)
                l_i = old * l_i + P.sum(-1, keepdim=True)
                O_i = old * O_i + (P * call.kept(P, i, j)) @ V_j
                m_i = m_new
            store(O[..., rows, :], O_i / l_i.clamp(min=1))
            store(L[..., rows, :], m_i + l_i.log())
        ctx.call, out = call, O.flatten(1, 2)
        ctx.save_for_backward(query, key, value, out, L, bias)
        return out, L

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_backward_2(ctx.call, grad, *ctx.saved_tensors, has_dbias=ctx.needs_input_grad[3]), None


def _backward_2(
    call: _Call,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    L: Tensor,
    bias: Tensor | None,
    *,
    has_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Algorithm 2. D = rowsum(dO * O) is computed once, so that no step loads O."""
    load, store = call.traffic.load, call.traffic.store
    O, dO = _grouped(key, out, grad)
    D = torch.empty_like(L)
    for rows in call.grid.rows:
        store(D[..., rows, :], (load(dO[..., rows, :]) * load(O[..., rows, :])).sum(-1, keepdim=True))

    def probabilities(S: Tensor, _: Tensor, L_i: Tensor, D_i: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(S - L_i.clamp(min=torch.finfo(L_i.dtype).min)), D_i

    return _backward(call, query, key, value, bias, grad, (L, D), probabilities, has_dbias)


def _backward(
    call: _Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    saved: tuple[Tensor, ...],
    probabilities: Callable[..., tuple[Tensor, Tensor]],
    has_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The loops of both backwards. The outer one is over keys, so dK and dV stay in fast memory, and dQ does not. Each
    step computes S again. `probabilities` returns P and D from S, dO and the saved values of the step's queries."""
    grid, load, store = call.grid, call.traffic.load, call.traffic.store
    Q, K, V, dO = _grouped(key, query, key, value, grad)
    (dQ,), dK, dV = _accumulators(Q, Q.shape[-1]), torch.empty_like(K), torch.empty_like(V)
    store(dQ, 0.0)
    dB = None if bias is None or not has_dbias else torch.zeros_like(bias, dtype=dQ.dtype)
    for j, columns in enumerate(grid.columns):
        K_j, V_j = load(K[..., columns, :]), load(V[..., columns, :])
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
        for i, rows in grid.rows_of(j):
            Q_i, dO_i, dQ_i, *saved_i = (load(x[..., rows, :]) for x in (Q, dO, dQ, *saved))
            S = call.scores(Q_i, K_j)
            P, D_i = probabilities(call.masked(S, bias, i, j), dO_i, *saved_i)
            Z = call.kept(P, i, j)
            dV_j += ((P * Z).mT @ dO_i).sum(2, keepdim=True)  # over the heads of the group
            dP = (dO_i @ V_j.mT) * Z
            dS = P * (dP - D_i)
            if (dB_ij := _tile(dB, rows, columns)) is not None:  # over all that share a bias
                store(dB_ij, load(dB_ij) + dS.sum_to_size(dB_ij.shape))
            if call.softcap:  # the derivative of softcap * tanh(x / softcap) is 1 - tanh(x / softcap)**2
                dS = dS * (1 - (S / call.softcap) ** 2)
            store(dQ[..., rows, :], dQ_i + call.scale * (dS @ K_j))
            dK_j += call.scale * (dS.mT @ Q_i).sum(2, keepdim=True)
        store(dK[..., columns, :], dK_j)
        store(dV[..., columns, :], dV_j)
    return _rounded(dQ, query, call.traffic), dK.flatten(1, 2), dV.flatten(1, 2), dB


def _grouped(key: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Views [b, g, n/g, s, d] of [b, n, s, d]. A group has n/g heads of queries, and one of keys and values."""
    return [x.unflatten(1, (key.shape[1], -1)) for x in tensors]


def _accumulators(Q: Tensor, *widths: int) -> list[Tensor]:
    """New tensors [b, g, n/g, N_q, width] in slow memory, in the dtype of accumulators."""
    return [Q.new_empty(*Q.shape[:-1], width, dtype=torch.promote_types(Q.dtype, torch.float32)) for width in widths]


def _rounded(x: Tensor, query: Tensor, traffic: Traffic) -> Tensor:
    """An accumulator in the shape and dtype of the query, after one more pass through fast memory."""
    rounded = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    traffic.store(rounded, traffic.load(x).flatten(1, 2))
    return rounded


class Sizes(NamedTuple):
    """One group of heads, and closed forms of the bytes that it moves with a full and with a causal mask."""

    N_q: int
    N_k: int
    d: int
    r: int  # query heads of the group
    e: int  # bytes of a value of Q, K, V or O
    a: int  # bytes of an accumulator
    M: int
    causal: bool

    def tiles(self, version: int) -> tuple[int, int]:
        """B_r and B_c: tiles of Q, K, V and O fit into M. In version 1 a tile of scores is not larger than those."""
        B = self.M / (4 * self.d * self.e)
        B_r, B_c = (min(ceil(B), self.d), ceil(B)) if version == 1 else (int(B), int(B))
        return min(max(B_r, SMALLEST_TILE), self.N_q), min(max(B_c, SMALLEST_TILE), self.N_k)

    def _query_rows(self, version: int) -> int:
        """Rows of Q in all steps of an outer loop over keys: T_c N_q for a full mask."""
        B_r, B_c = self.tiles(version)
        return sum(self.N_q - (start // B_r * B_r if self.causal else 0) for start in range(0, self.N_k, B_c))

    def bytes_math(self) -> int:
        """Forward of the standard algorithm: S and P are stored and loaded; Q, K, V and O move once."""
        return 4 * self.r * self.N_q * self.N_k * self.e + 2 * (self.r * self.N_q + self.N_k) * self.d * self.e

    def bytes_v1(self) -> tuple[int, int]:
        """Forward and backward. Forward has first values, log-sum-exp and rounding, and steps of Q, 2 O, 2 l and 2 m;
        backward has first values and rounding of dQ, and steps of Q, dO, O, 2 dQ, l and m."""
        N_q, N_k, d, r, e, a, *_ = self
        forward = N_q * (d * (2 * a + e) + 5 * a) + self._query_rows(1) * (d * (e + 2 * a) + 4 * a)
        backward = N_q * d * (2 * a + e) + self._query_rows(1) * (d * (3 * e + 2 * a) + 2 * a)
        return 2 * N_k * d * e + r * forward, 4 * N_k * d * e + r * backward

    def bytes_v2(self) -> tuple[int, int]:
        """Forward and backward. Forward has Q, O and L, and steps of K and V; backward has O, dO and D, first values
        and rounding of dQ, and steps of Q, dO, 2 dQ, L and D."""
        N_q, N_k, d, r, e, a, *_ = self
        B, T_r = self.tiles(2)[0], ceil(N_q / self.tiles(2)[0])
        key_rows = B * T_r * (T_r - 1) // 2 + N_k if self.causal else T_r * N_k
        forward = r * N_q * (2 * d * e + a) + key_rows * 2 * d * e
        backward = N_q * (d * (3 * e + 2 * a) + a) + self._query_rows(2) * (d * (2 * e + 2 * a) + 2 * a)
        return forward, 4 * N_k * d * e + r * backward


def _call(query: Tensor, key: Tensor, version: int, fast_bytes: int, mask: Mask, **rest: Any) -> _Call:
    """The tiles of a call. `fast_bytes` is M, or 0 for DEFAULT_TILE rows."""
    d, e = query.shape[3], query.element_size()
    M, r = fast_bytes or 4 * DEFAULT_TILE * d * e, query.shape[1] // key.shape[1]
    sizes = Sizes(query.shape[2], key.shape[2], d, r=r, e=e, a=max(e, 4), M=M, causal=mask.causal)
    return _Call(TileGrid(mask, sizes.N_q, sizes.N_k, *sizes.tiles(version), query.device), **rest)


def _attend(
    version: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    scale: float,
    dropout: float,
    softcap: float,
    bias: Tensor | None = None,
    fast_bytes: int = 0,
    traffic: Traffic | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as of `core_attention.Attention`; M, or 0 for DEFAULT_TILE rows; a counter of bytes."""
    seed = torch.randint(2**32, (), device=query.device) if dropout else 0
    options = {"scale": scale, "dropout": dropout, "softcap": softcap, "seed": seed, "traffic": traffic or Traffic()}
    call = _call(query, key, version, fast_bytes, mask, **options)
    if bias is not None:  # as `_grouped`, with one group where heads share it
        bias = bias.unflatten(1, (1, 1) if bias.shape[1] == 1 else (key.shape[1], -1))
    out, lse = (FlashAttention1 if version == 1 else FlashAttention2).apply(query, key, value, bias, call)
    return out, lse.detach().squeeze(-1).flatten(1, 2)


def backward_of_part(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Mask,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `attention_parts.Part`."""
    call = _call(query, key, 2, 0, mask, scale=scale, dropout=0.0, softcap=softcap, seed=0, traffic=Traffic())
    (L,) = _grouped(key, lse[..., None])
    return _backward_2(call, grad, query, key, value, out, L, None, has_dbias=False)[:3]


tiled_attention = partial(_attend, 2)  # what `model.attention: tiled` runs
tiled_attention_v1 = partial(_attend, 1)
