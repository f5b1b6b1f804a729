# ruff: noqa: E741 - O and l are letters of the paper
# Triton's annotations describe its compiler, where True is a constexpr and static_range is a loop.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""FlashAttention 2 as Triton kernels: forward, dK with dV, dQ, and the gradient of a bias.

A program owns a tile of queries and loops over keys (forward, dQ), or owns a tile of keys and loops over queries (dK,
dV), or owns a tile of the bias and loops over all that share it. Its results stay in registers until they are final. No
other program adds to them, so two runs give the same bits.

A mask is a range of columns for each row. Queries have ranges of keys (`Mask.ranges`). These do not decrease, so keys
have ranges of queries. The first and the last row of a tile bound the columns of all its rows. Tiles of columns that
all rows see need no mask arithmetic, and have a loop without it.

The letters are those of the paper: tiles of B_r queries, numbered by i, and of B_c keys, numbered by j; maximum m, sum
l, log-sum-exp L, D = rowsum(dO * O). GPUs compute exp2 but not exp, so scores, softcap and m are divided by ln 2.
Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.errors import ConfigError
from megatron_lite.model.masks import KeyRanges, Mask

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError(
        "model.attention is triton, and Python cannot import it; pip install triton, or choose another model.attention"
    ) from error

from megatron_lite.model.flash_triton_tiles import (
    LN_2,
    biased,
    column,
    columns,
    dot,
    dropped,
    load,
    load_vector,
    p_and_ds,
    scores,
    store,
    visible,
)

LOWEST = tl.constexpr(-3.4e38)  # about the smallest fp32; differences of -inf would be nan


@triton.jit
def _forward(
    Q, K, V, O, L, first, end, q_strides, k_strides, v_strides, o_strides, range_stride, N_q, N_k, r, scale,
    bias, bias_strides, seed, threshold: tl.constexpr,
    softcap: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    """One step of the outer loop of algorithm 1: a tile of queries."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # last queries first: with a causal mask they have the most keys
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q0, first, end = i * B_r, first + batch * range_stride, end + batch * range_stride
    K += batch * k_strides[0] + head // r * k_strides[1]
    V += batch * v_strides[0] + head // r * v_strides[1]
    Q_i = load(Q + batch * q_strides[0] + head * q_strides[1], q_strides[2], q0, N_q, d, WIDTH, B_r, True)
    first_i, end_i = load_vector(first, q0, N_q, B_r), load_vector(end, q0, N_q, B_r)
    low, num_left, num_full, num_border = columns(first, end, q0, N_q, B_r, B_c)
    O_i, l_i = tl.zeros([B_r, WIDTH], tl.float32), tl.zeros([B_r], tl.float32)
    m_i = tl.full([B_r], LOWEST, tl.float32)
    of_batch, query = batch * tl.num_programs(1) + head, (q0 + tl.arange(0, B_r))[:, None]
    for MASKED in tl.static_range(2):  # unrolled: a loop over full tiles, then one over those at the borders
        for step in range(num_border if MASKED else num_full):
            k0 = column(step, low, num_left, num_full, B_c, MASKED)
            K_j = load(K, k_strides[2], k0, N_k, d, WIDTH, B_c, MASKED)
            V_j = load(V, v_strides[2], k0, N_k, d, WIDTH, B_c, MASKED)
            key = (k0 + tl.arange(0, B_c))[None, :]
            S = biased(scores(Q_i, K_j, scale, softcap), bias, bias_strides, batch, head, query, key, N_q, N_k)
            if MASKED:
                S = tl.where(visible(first_i, end_i, k0, B_c), S, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(S, 1))
            P, old = tl.exp2(S - m_new[:, None]), tl.exp2(m_i - m_new)
            l_i = old * l_i + tl.sum(P, 1)
            P = dropped(P, seed, of_batch, query, key, threshold)
            O_i = dot(P.to(V_j.dtype), V_j, O_i * old[:, None])
            m_i = m_new
    has_keys = l_i != 0
    l_i = tl.where(has_keys, l_i, 1.0)
    L_i = tl.where(has_keys, (m_i + tl.log2(l_i)) * LN_2, float("-inf"))
    store(O + batch * o_strides[0] + head * o_strides[1], o_strides[2], q0, N_q, O_i / l_i[:, None], d, WIDTH, B_r)
    row = q0 + tl.arange(0, B_r)
    tl.store(L + (batch * tl.num_programs(1) + head) * N_q + row, L_i, mask=row < N_q)


@triton.jit
def _dk_dv(
    Q, K, V, dO, L, D, dK, dV, first, end, q_strides, k_strides, v_strides, do_strides, dk_strides, range_stride,
    N_q, N_k, r, scale, bias, bias_strides, seed, threshold: tl.constexpr,
    softcap: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    """One step of the outer loop of algorithm 2, without dQ: a tile of keys, with the r query heads of its group.
    `first` and `end` are ranges of queries, and S, P, dP and dS are transposed: keys are rows."""
    group, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k0, first, end = tl.program_id(0) * B_c, first + batch * range_stride, end + batch * range_stride
    K_j = load(K + batch * k_strides[0] + group * k_strides[1], k_strides[2], k0, N_k, d, WIDTH, B_c, True)
    V_j = load(V + batch * v_strides[0] + group * v_strides[1], v_strides[2], k0, N_k, d, WIDTH, B_c, True)
    first_j, end_j = load_vector(first, k0, N_k, B_c), load_vector(end, k0, N_k, B_c)
    low, num_left, num_full, num_border = columns(first, end, k0, N_k, B_c, B_r)
    key = (k0 + tl.arange(0, B_c))[:, None]
    dK_j, dV_j = tl.zeros([B_c, WIDTH], tl.float32), tl.zeros([B_c, WIDTH], tl.float32)
    for member in range(r):
        head = group * r + member
        Q_h = Q + batch * q_strides[0] + head * q_strides[1]
        dO_h = dO + batch * do_strides[0] + head * do_strides[1]
        of_batch = batch * tl.num_programs(1) * r + head
        vector = of_batch * N_q
        for MASKED in tl.static_range(2):
            for step in range(num_border if MASKED else num_full):
                q0 = column(step, low, num_left, num_full, B_r, MASKED)
                Q_i = load(Q_h, q_strides[2], q0, N_q, d, WIDTH, B_r, MASKED)
                dO_i = load(dO_h, do_strides[2], q0, N_q, d, WIDTH, B_r, MASKED)
                L_i, D_i = load_vector(L + vector, q0, N_q, B_r), load_vector(D + vector, q0, N_q, B_r)
                S, dP = scores(K_j, Q_i, scale, softcap), dot(V_j, tl.trans(dO_i), None)
                query = (q0 + tl.arange(0, B_r))[None, :]
                biased_S = biased(S, bias, bias_strides, batch, head, query, key, N_q, N_k)
                dP, seen = dropped(dP, seed, of_batch, query, key, threshold), visible(first_j, end_j, q0, B_r)
                P, dS = p_and_ds(S, biased_S, dP, L_i[None, :], D_i[None, :], seen, softcap, MASKED)
                P = dropped(P, seed, of_batch, query, key, threshold)
                dV_j = dot(P.to(dO_i.dtype), dO_i, dV_j)
                dK_j = dot(dS.to(Q_i.dtype), Q_i, dK_j)
    at = batch * dk_strides[0] + group * dk_strides[1]
    store(dK + at, dk_strides[2], k0, N_k, dK_j * (scale * LN_2), d, WIDTH, B_c)
    store(dV + at, dk_strides[2], k0, N_k, dV_j, d, WIDTH, B_c)


@triton.jit
def _dq(
    Q, K, V, dO, L, D, dQ, first, end, q_strides, k_strides, v_strides, do_strides, dq_strides, range_stride,
    N_q, N_k, r, scale, bias, bias_strides, seed, threshold: tl.constexpr,
    softcap: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    """dQ of algorithm 2, for a tile of queries. The paper adds to dQ in memory; this computes S and dP once more."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q0, first, end = i * B_r, first + batch * range_stride, end + batch * range_stride
    K += batch * k_strides[0] + head // r * k_strides[1]
    V += batch * v_strides[0] + head // r * v_strides[1]
    Q_i = load(Q + batch * q_strides[0] + head * q_strides[1], q_strides[2], q0, N_q, d, WIDTH, B_r, True)
    dO_i = load(dO + batch * do_strides[0] + head * do_strides[1], do_strides[2], q0, N_q, d, WIDTH, B_r, True)
    of_batch, query = batch * tl.num_programs(1) + head, (q0 + tl.arange(0, B_r))[:, None]
    vector = of_batch * N_q
    L_i, D_i = load_vector(L + vector, q0, N_q, B_r), load_vector(D + vector, q0, N_q, B_r)
    first_i, end_i = load_vector(first, q0, N_q, B_r), load_vector(end, q0, N_q, B_r)
    low, num_left, num_full, num_border = columns(first, end, q0, N_q, B_r, B_c)
    dQ_i = tl.zeros([B_r, WIDTH], tl.float32)
    for MASKED in tl.static_range(2):
        for step in range(num_border if MASKED else num_full):
            k0 = column(step, low, num_left, num_full, B_c, MASKED)
            K_j = load(K, k_strides[2], k0, N_k, d, WIDTH, B_c, MASKED)
            V_j = load(V, v_strides[2], k0, N_k, d, WIDTH, B_c, MASKED)
            S, dP = scores(Q_i, K_j, scale, softcap), dot(dO_i, tl.trans(V_j), None)
            key = (k0 + tl.arange(0, B_c))[None, :]
            biased_S = biased(S, bias, bias_strides, batch, head, query, key, N_q, N_k)
            dP, seen = dropped(dP, seed, of_batch, query, key, threshold), visible(first_i, end_i, k0, B_c)
            _, dS = p_and_ds(S, biased_S, dP, L_i[:, None], D_i[:, None], seen, softcap, MASKED)
            dQ_i = dot(dS.to(K_j.dtype), K_j, dQ_i)
    at = batch * dq_strides[0] + head * dq_strides[1]
    store(dQ + at, dq_strides[2], q0, N_q, dQ_i * (scale * LN_2), d, WIDTH, B_r)


@triton.jit
def _dbias(
    Q, K, V, dO, L, D, dB, first, end, q_strides, k_strides, v_strides, do_strides, range_stride,
    N_q, N_k, r, scale, bias, bias_strides, seed, threshold: tl.constexpr,
    softcap: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
    num_heads, sums_heads, sums_tiles, num_tiles, SHARED: tl.constexpr,
):  # fmt: skip
    """dS summed over the rows of the batch, heads and queries that share a bias, for a tile of the bias: keys, and
    queries unless the bias is SHARED by all of them. It has `num_heads`. Of `num_tiles` that a program sums, each row
    of the batch has `sums_heads` heads times `sums_tiles` tiles of queries."""
    k0, owner = tl.program_id(0) * B_c, tl.program_id(2).to(tl.int64)
    key, dB_i = (k0 + tl.arange(0, B_c))[None, :], tl.zeros([B_r, B_c], tl.float32)
    for step in range(num_tiles):
        batch = owner // num_heads + step // (sums_heads * sums_tiles)
        head = owner % num_heads + step // sums_tiles % sums_heads
        q0 = (tl.program_id(1) + step % sums_tiles) * B_r
        first_b, end_b, last = first + batch * range_stride, end + batch * range_stride, tl.minimum(q0 + B_r, N_q) - 1
        if (tl.load(first_b + q0) < k0 + B_c) & (tl.load(end_b + last) > k0):  # else all pairs are hidden
            Q_h = Q + batch * q_strides[0] + head * q_strides[1]
            dO_h = dO + batch * do_strides[0] + head * do_strides[1]
            K_h = K + batch * k_strides[0] + head // r * k_strides[1]
            V_h = V + batch * v_strides[0] + head // r * v_strides[1]
            Q_i = load(Q_h, q_strides[2], q0, N_q, d, WIDTH, B_r, True)
            dO_i = load(dO_h, do_strides[2], q0, N_q, d, WIDTH, B_r, True)
            S = scores(Q_i, load(K_h, k_strides[2], k0, N_k, d, WIDTH, B_c, True), scale, softcap)
            dP = dot(dO_i, tl.trans(load(V_h, v_strides[2], k0, N_k, d, WIDTH, B_c, True)), None)
            of_batch, query = batch * num_heads * sums_heads + head, (q0 + tl.arange(0, B_r))[:, None]
            L_i = load_vector(L + of_batch * N_q, q0, N_q, B_r)[:, None]
            D_i = load_vector(D + of_batch * N_q, q0, N_q, B_r)[:, None]
            biased_S = biased(S, bias, bias_strides, batch, head, query, key, N_q, N_k)
            dP = dropped(dP, seed, of_batch, query, key, threshold)
            seen = visible(load_vector(first_b, q0, N_q, B_r), load_vector(end_b, q0, N_q, B_r), k0, B_c)
            _, dS = p_and_ds(S, biased_S, dP, L_i, D_i, seen, 0, True)  # 0: the bias is added after the softcap
            dB_i += dS
    if SHARED:
        tl.store(dB + owner * N_k + key, tl.sum(dB_i, 0)[None, :], mask=key < N_k)
    else:
        query = (tl.program_id(1) * B_r + tl.arange(0, B_r))[:, None]
        tl.store(dB + (owner * N_q + query) * N_k + key, dB_i, mask=(query < N_q) & (key < N_k))


class Tiles(NamedTuple):
    """The sides of a tile of scores, the warps of a program, and the buffers for tiles that the loop loads ahead."""

    B_r: int
    B_c: int
    num_warps: int = 4
    num_stages: int = 2


# By bytes of a value and largest head size: the tiles of _forward, _dk_dv and _dq. They are chosen by compilation for
# A100 and H100: few values leave the registers, and shared memory is below the 99 KB of smaller GPUs.
TILES = {
    (2, 64): (Tiles(128, 64, 4, 3), Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
    (2, 128): (Tiles(128, 64, 8, 2), Tiles(32, 128, 8, 2), Tiles(128, 32, 8, 2)),
    (2, 256): (Tiles(64, 32, 4, 2), Tiles(16, 64, 8, 2), Tiles(64, 16, 8, 2)),
    (4, 64): (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    (4, 128): (Tiles(32, 16, 4, 2), Tiles(16, 32, 8, 2), Tiles(32, 16, 4, 1)),
    (4, 256): (Tiles(32, 16, 8, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
# The loop loads tiles of a bias ahead too, in fp32 if that is its dtype.
TILES_WITH_BIAS = TILES | {
    (2, 64): (Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
    (2, 128): (Tiles(64, 64, 4, 2), Tiles(16, 128, 8, 2), Tiles(64, 32, 4, 2)),
    (2, 256): (Tiles(64, 16, 4, 2), Tiles(16, 32, 4, 2), Tiles(32, 16, 4, 2)),
}


class _Call(NamedTuple):
    """All arguments but the tensors."""

    mask: Mask
    scale: float
    softcap: float
    tiles: tuple[Tiles, Tiles, Tiles]  # of _forward, _dk_dv and _dq
    threshold: int = 0  # dropout * 2**32
    seed: Tensor | None = None  # of dropout; on the GPU, which the host need not wait for

    def launch(
        self,
        kernel: Any,
        tiles: Tiles,
        grid: tuple,
        ranges: KeyRanges,
        tensors: tuple,
        strided: tuple,
        bias: Tensor | None,
        *more: int,
    ) -> None:
        """Start a program for each element of `grid`. `tensors` begin with Q and K; `strided` are in kernel order."""
        (b, n, N_q, d), (_, g, N_k, _) = tensors[0].shape, tensors[1].shape
        strides, range_stride = [x.stride()[:3] for x in strided], ranges.first.stride(0) * (len(ranges.first) > 1)
        numbers = range_stride, N_q, N_k, n // g, self.scale / log(2)
        added = bias, None if bias is None else bias.expand(b, n, N_q, N_k).stride()  # 0 where it is broadcast
        constants = self.threshold, self.softcap / log(2), d, triton.next_power_of_2(d), tiles.B_r, tiles.B_c
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True}
        kernel[grid](*tensors, *ranges, *strides, *numbers, *added, self.seed, *constants, *more, **options)


class FlashAttention(torch.autograd.Function):
    """Output and log-sum-exp; the second has no gradient."""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        """Algorithm 1."""
        Q, K, V = (_with_plain_rows(x) for x in (query, key, value))
        (b, n, N_q, _), tiles = Q.shape, call.tiles[0]
        O, L = _new(Q), Q.new_empty(b, n, N_q, dtype=torch.float32)
        grid, ranges = (triton.cdiv(N_q, tiles.B_r), n, b), call.mask.ranges(N_q, K.shape[2], Q.device)
        call.launch(_forward, tiles, grid, ranges, (Q, K, V, O, L), (Q, K, V, O), bias)
        ctx.call = call
        ctx.save_for_backward(Q, K, V, O, L, bias)
        ctx.mark_non_differentiable(L)
        return O, L

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_backward(ctx.call, grad, *ctx.saved_tensors, has_dbias=ctx.needs_input_grad[3]), None


def _backward(
    call: _Call,
    grad: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    L: Tensor,
    bias: Tensor | None,
    *,
    has_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Algorithm 2; gradients of query, key, value and bias."""
    (b, n, N_q, _), (_, g, N_k, _) = Q.shape, K.shape
    dO, dQ, dK, dV = _with_plain_rows(grad), _new(Q), _new(K), _new(K)
    D = (dO.float() * O).sum(-1).contiguous()
    inputs, strided = (Q, K, V, dO, L, D), (Q, K, V, dO)
    _, tiles_dk_dv, tiles_dq = call.tiles
    ranges = call.mask.ranges(N_q, N_k, Q.device)
    grid = triton.cdiv(N_k, tiles_dk_dv.B_c), g, b
    of_keys = call.mask.cached("ranges of keys", (N_q, N_k, Q.device), lambda: _transposed(ranges, N_k))
    call.launch(_dk_dv, tiles_dk_dv, grid, of_keys, (*inputs, dK, dV), (*strided, dK), bias)
    rows = triton.cdiv(N_q, tiles_dq.B_r)
    call.launch(_dq, tiles_dq, (rows, n, b), ranges, (*inputs, dQ), (*strided, dQ), bias)
    if bias is None or not has_dbias:
        return dQ, dK, dV, None
    dB = torch.empty_like(bias, memory_format=torch.contiguous_format)
    bias_b, bias_n, bias_q, _ = bias.shape
    sums_heads, sums_tiles = n // bias_n, rows if bias_q == 1 else 1
    grid = triton.cdiv(N_k, tiles_dq.B_c), rows // sums_tiles, bias_b * bias_n
    sums = bias_n, sums_heads, sums_tiles, b // bias_b * sums_heads * sums_tiles, bias_q == 1
    call.launch(_dbias, tiles_dq, grid, ranges, (*inputs, dB), strided, bias, *sums)
    return dQ, dK, dV, dB


def _new(x: Tensor) -> Tensor:
    """A new [b, n, s, d] tensor that is [s, b, n, d] in memory, the order of the model's activations."""
    b, n, s, d = x.shape
    return x.new_empty(s, b, n, d).permute(1, 2, 0, 3)


def _with_plain_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy if the last axis is not contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def _transposed(ranges: KeyRanges, num_keys: int) -> KeyRanges:
    """The range of queries that see each key: those with end > key and first <= key."""
    key = torch.arange(num_keys, dtype=torch.int32, device=ranges.first.device).repeat(len(ranges.first), 1)
    return KeyRanges(*(torch.searchsorted(x, key, right=True, out_int32=True) for x in (ranges.end, ranges.first)))


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    scale: float,
    dropout: float,
    softcap: float,
    bias: Tensor | None = None,
    tiles: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as of `core_attention.Attention`, which checks them, and the tables of `config/attention.py` have the
    limits. `tiles` are B_r and B_c of all kernels, or None for those of `TILES`."""
    call = _call(query, mask, scale, softcap, tiles, TILES if bias is None else TILES_WITH_BIAS)
    if dropout:
        seed = torch.randint(2**32, (), device=query.device)
        call = call._replace(threshold=int(dropout * 2**32), seed=seed)
    return FlashAttention.apply(query, key, value, bias, call)


def _call(
    query: Tensor, mask: Mask, scale: float, softcap: float, tiles: tuple[int, int] | None, table: dict = TILES
) -> _Call:
    width = max(64, triton.next_power_of_2(query.shape[3]))
    return _Call(mask, scale, softcap, table[query.element_size(), width] if tiles is None else 3 * (Tiles(*tiles),))


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
    Q, K, V = (_with_plain_rows(x) for x in (query, key, value))
    call = _call(query, mask, scale, softcap, None)
    return _backward(call, grad, Q, K, V, out, lse.contiguous(), None, has_dbias=False)[:3]
