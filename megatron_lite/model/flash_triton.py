# ruff: noqa: E741 - O and l are letters of the paper
# Triton's annotations describe its compiler, where True is a constexpr and static_range is a loop.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""FlashAttention 2 as three Triton kernels: forward, dK with dV, and dQ.

A program owns a tile of queries and loops over keys (forward, dQ), or owns a tile of keys and loops over queries (dK,
dV). Its results stay in registers until they are final. No other program adds to them, so two runs give the same bits.

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

LN_2 = tl.constexpr(log(2))
LOWEST = tl.constexpr(-3.4e38)  # about the smallest fp32; differences of -inf would be nan


@triton.jit
def _load(X, stride, start, num_rows, d: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """ROWS rows of X from row `start`, with zeros after the last row and after column d."""
    row, column = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + row.to(tl.int64)[:, None] * stride + column[None, :]
    if not CHECKED and d == WIDTH:
        return tl.load(pointers)
    return tl.load(pointers, mask=(row < num_rows)[:, None] & (column < d)[None, :], other=0.0)


@triton.jit
def _store(X, stride, start, num_rows, value, d: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The counterpart of `_load`."""
    row, column = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(pointers, value.to(X.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < d)[None, :])


@triton.jit
def _load_vector(x, start, num_rows, ROWS: tl.constexpr):
    """ROWS elements of x from `start`, with zeros after the last. So rows after the last have an empty range."""
    row = start + tl.arange(0, ROWS)
    return tl.load(x + row, mask=row < num_rows, other=0)


@triton.jit
def _columns(first, end, start, num_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tiles of columns that a tile of rows needs. All rows see the full tiles, some rows see those at the borders.
    Returns the first column, and the numbers of tiles on the left of the full ones, of full ones, and at borders."""
    last = tl.minimum(start + ROWS, num_rows) - 1
    low, high = tl.load(first + start) // COLUMNS, tl.cdiv(tl.load(end + last), COLUMNS)
    full, full_end = tl.cdiv(tl.load(first + last), COLUMNS), tl.load(end + start) // COLUMNS
    num_full = tl.maximum(full_end - full, 0)
    num_left = tl.where(num_full > 0, full - low, 0)
    return low * COLUMNS, num_left, num_full, high - low - num_full


@triton.jit
def _column(step, low, num_left, num_full, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """The first column of the tile of a step: a tile at the borders if MASKED, else a full one."""
    skipped = tl.where(step < num_left, 0, num_full) if MASKED else num_left
    return low + (step + skipped) * COLUMNS


@triton.jit
def _visible(first, end, start, COLUMNS: tl.constexpr):
    """True where a row sees a column."""
    column = (start + tl.arange(0, COLUMNS))[None, :]
    return (first[:, None] <= column) & (column < end[:, None])


@triton.jit
def _dot(a, b, c):
    """a b + c. Without "ieee", fp32 inputs would be rounded to TF32."""
    return tl.dot(a, b, acc=c, input_precision="ieee")


@triton.jit
def _scores(a, b, scale, softcap: tl.constexpr):
    """S / ln 2, without the mask; `scale` and `softcap` are divided by ln 2."""
    S = _dot(a, tl.trans(b), None) * scale
    if softcap > 0:
        S = softcap * (1 - 2 / (1 + tl.exp2(S * (2 / (softcap * LN_2)))))  # tanh x = 1 - 2 / (1 + exp 2x)
    return S


@triton.jit
def _forward(
    Q, K, V, O, L, first, end, q_strides, k_strides, v_strides, o_strides, range_stride, N_q, N_k, r, scale,
    softcap: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    """One step of the outer loop of algorithm 1: a tile of queries."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # last queries first: with a causal mask they have the most keys
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q0, first, end = i * B_r, first + batch * range_stride, end + batch * range_stride
    K += batch * k_strides[0] + head // r * k_strides[1]
    V += batch * v_strides[0] + head // r * v_strides[1]
    Q_i = _load(Q + batch * q_strides[0] + head * q_strides[1], q_strides[2], q0, N_q, d, WIDTH, B_r, True)
    first_i, end_i = _load_vector(first, q0, N_q, B_r), _load_vector(end, q0, N_q, B_r)
    low, num_left, num_full, num_border = _columns(first, end, q0, N_q, B_r, B_c)
    O_i, l_i = tl.zeros([B_r, WIDTH], tl.float32), tl.zeros([B_r], tl.float32)
    m_i = tl.full([B_r], LOWEST, tl.float32)
    for MASKED in tl.static_range(2):  # unrolled: a loop over full tiles, then one over those at the borders
        for step in range(num_border if MASKED else num_full):
            k0 = _column(step, low, num_left, num_full, B_c, MASKED)
            K_j = _load(K, k_strides[2], k0, N_k, d, WIDTH, B_c, MASKED)
            V_j = _load(V, v_strides[2], k0, N_k, d, WIDTH, B_c, MASKED)
            S = _scores(Q_i, K_j, scale, softcap)
            if MASKED:
                S = tl.where(_visible(first_i, end_i, k0, B_c), S, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(S, 1))
            P, old = tl.exp2(S - m_new[:, None]), tl.exp2(m_i - m_new)
            l_i = old * l_i + tl.sum(P, 1)
            O_i = _dot(P.to(V_j.dtype), V_j, O_i * old[:, None])
            m_i = m_new
    has_keys = l_i != 0
    l_i = tl.where(has_keys, l_i, 1.0)
    L_i = tl.where(has_keys, (m_i + tl.log2(l_i)) * LN_2, float("-inf"))
    _store(O + batch * o_strides[0] + head * o_strides[1], o_strides[2], q0, N_q, O_i / l_i[:, None], d, WIDTH, B_r)
    row = q0 + tl.arange(0, B_r)
    tl.store(L + (batch * tl.num_programs(1) + head) * N_q + row, L_i, mask=row < N_q)


@triton.jit
def _p_and_ds(S, dP, L, D, visible, softcap: tl.constexpr, MASKED: tl.constexpr):
    """Lines 11 and 14 of algorithm 2: P and dS of a tile, or of its transpose."""
    P = tl.exp2(S - L / LN_2)
    if MASKED:
        P = tl.where(visible, P, 0.0)  # L may be -inf where nothing is visible
    dS = P * (dP - D)
    if softcap > 0:  # the derivative of tanh is 1 - tanh^2
        dS *= 1 - (S / softcap) * (S / softcap)
    return P, dS


@triton.jit
def _dk_dv(
    Q, K, V, dO, L, D, dK, dV, first, end, q_strides, k_strides, v_strides, do_strides, dk_strides, range_stride,
    N_q, N_k, r, scale,
    softcap: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    """One step of the outer loop of algorithm 2, without dQ: a tile of keys, with the r query heads of its group.
    `first` and `end` are ranges of queries, and S, P, dP and dS are transposed: keys are rows."""
    group, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k0, first, end = tl.program_id(0) * B_c, first + batch * range_stride, end + batch * range_stride
    K_j = _load(K + batch * k_strides[0] + group * k_strides[1], k_strides[2], k0, N_k, d, WIDTH, B_c, True)
    V_j = _load(V + batch * v_strides[0] + group * v_strides[1], v_strides[2], k0, N_k, d, WIDTH, B_c, True)
    first_j, end_j = _load_vector(first, k0, N_k, B_c), _load_vector(end, k0, N_k, B_c)
    low, num_left, num_full, num_border = _columns(first, end, k0, N_k, B_c, B_r)
    dK_j, dV_j = tl.zeros([B_c, WIDTH], tl.float32), tl.zeros([B_c, WIDTH], tl.float32)
    for member in range(r):
        head = group * r + member
        Q_h = Q + batch * q_strides[0] + head * q_strides[1]
        dO_h = dO + batch * do_strides[0] + head * do_strides[1]
        vector = (batch * tl.num_programs(1) * r + head) * N_q
        for MASKED in tl.static_range(2):
            for step in range(num_border if MASKED else num_full):
                q0 = _column(step, low, num_left, num_full, B_r, MASKED)
                Q_i = _load(Q_h, q_strides[2], q0, N_q, d, WIDTH, B_r, MASKED)
                dO_i = _load(dO_h, do_strides[2], q0, N_q, d, WIDTH, B_r, MASKED)
                L_i, D_i = _load_vector(L + vector, q0, N_q, B_r), _load_vector(D + vector, q0, N_q, B_r)
                S, dP = _scores(K_j, Q_i, scale, softcap), _dot(V_j, tl.trans(dO_i), None)
                visible = _visible(first_j, end_j, q0, B_r)
                P, dS = _p_and_ds(S, dP, L_i[None, :], D_i[None, :], visible, softcap, MASKED)
                dV_j = _dot(P.to(dO_i.dtype), dO_i, dV_j)
                dK_j = _dot(dS.to(Q_i.dtype), Q_i, dK_j)
    at = batch * dk_strides[0] + group * dk_strides[1]
    _store(dK + at, dk_strides[2], k0, N_k, dK_j * (scale * LN_2), d, WIDTH, B_c)
    _store(dV + at, dk_strides[2], k0, N_k, dV_j, d, WIDTH, B_c)


@triton.jit
def _dq(
    Q, K, V, dO, L, D, dQ, first, end, q_strides, k_strides, v_strides, do_strides, dq_strides, range_stride,
    N_q, N_k, r, scale,
    softcap: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    """dQ of algorithm 2, for a tile of queries. The paper adds to dQ in memory; this computes S and dP once more."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q0, first, end = i * B_r, first + batch * range_stride, end + batch * range_stride
    K += batch * k_strides[0] + head // r * k_strides[1]
    V += batch * v_strides[0] + head // r * v_strides[1]
    Q_i = _load(Q + batch * q_strides[0] + head * q_strides[1], q_strides[2], q0, N_q, d, WIDTH, B_r, True)
    dO_i = _load(dO + batch * do_strides[0] + head * do_strides[1], do_strides[2], q0, N_q, d, WIDTH, B_r, True)
    vector = (batch * tl.num_programs(1) + head) * N_q
    L_i, D_i = _load_vector(L + vector, q0, N_q, B_r), _load_vector(D + vector, q0, N_q, B_r)
    first_i, end_i = _load_vector(first, q0, N_q, B_r), _load_vector(end, q0, N_q, B_r)
    low, num_left, num_full, num_border = _columns(first, end, q0, N_q, B_r, B_c)
    dQ_i = tl.zeros([B_r, WIDTH], tl.float32)
    for MASKED in tl.static_range(2):
        for step in range(num_border if MASKED else num_full):
            k0 = _column(step, low, num_left, num_full, B_c, MASKED)
            K_j = _load(K, k_strides[2], k0, N_k, d, WIDTH, B_c, MASKED)
            V_j = _load(V, v_strides[2], k0, N_k, d, WIDTH, B_c, MASKED)
            S, dP = _scores(Q_i, K_j, scale, softcap), _dot(dO_i, tl.trans(V_j), None)
            visible = _visible(first_i, end_i, k0, B_c)
            _, dS = _p_and_ds(S, dP, L_i[:, None], D_i[:, None], visible, softcap, MASKED)
            dQ_i = _dot(dS.to(K_j.dtype), K_j, dQ_i)
    at = batch * dq_strides[0] + head * dq_strides[1]
    _store(dQ + at, dq_strides[2], q0, N_q, dQ_i * (scale * LN_2), d, WIDTH, B_r)


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


class _Call(NamedTuple):
    """All arguments but the tensors."""

    mask: Mask
    scale: float
    softcap: float
    tiles: tuple[Tiles, Tiles, Tiles]  # of _forward, _dk_dv and _dq

    def launch(self, kernel: Any, tiles: Tiles, grid: tuple, ranges: KeyRanges, tensors: tuple, strided: tuple) -> None:
        """Start a program for each element of `grid`. `tensors` begin with Q and K; `strided` are in kernel order."""
        (_, n, N_q, d), (_, g, N_k, _) = tensors[0].shape, tensors[1].shape
        strides, range_stride = [x.stride()[:3] for x in strided], ranges.first.stride(0) * (len(ranges.first) > 1)
        numbers = range_stride, N_q, N_k, n // g, self.scale / log(2), self.softcap / log(2), d
        widths = triton.next_power_of_2(d), tiles.B_r, tiles.B_c
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True}
        kernel[grid](*tensors, *ranges, *strides, *numbers, *widths, **options)


class FlashAttention(torch.autograd.Function):
    """Output and log-sum-exp; the second has no gradient."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        """Algorithm 1."""
        Q, K, V = (_with_plain_rows(x) for x in (query, key, value))
        (b, n, N_q, _), tiles = Q.shape, call.tiles[0]
        O, L = _new(Q), Q.new_empty(b, n, N_q, dtype=torch.float32)
        grid, ranges = (triton.cdiv(N_q, tiles.B_r), n, b), call.mask.ranges(N_q, K.shape[2], Q.device)
        call.launch(_forward, tiles, grid, ranges, (Q, K, V, O, L), (Q, K, V, O))
        ctx.call = call
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.mark_non_differentiable(L)
        return O, L

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_backward(ctx.call, grad, *ctx.saved_tensors), None


def _backward(
    call: _Call, grad: Tensor, Q: Tensor, K: Tensor, V: Tensor, O: Tensor, L: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2."""
    (b, n, N_q, _), (_, g, N_k, _) = Q.shape, K.shape
    dO, dQ, dK, dV = _with_plain_rows(grad), _new(Q), _new(K), _new(K)
    D = (dO.float() * O).sum(-1).contiguous()
    inputs, strided = (Q, K, V, dO, L, D), (Q, K, V, dO)
    _, tiles_dk_dv, tiles_dq = call.tiles
    ranges = call.mask.ranges(N_q, N_k, Q.device)
    grid = triton.cdiv(N_k, tiles_dk_dv.B_c), g, b
    of_keys = call.mask.cached("ranges of keys", (N_q, N_k, Q.device), lambda: _transposed(ranges, N_k))
    call.launch(_dk_dv, tiles_dk_dv, grid, of_keys, (*inputs, dK, dV), (*strided, dK))
    call.launch(_dq, tiles_dq, (triton.cdiv(N_q, tiles_dq.B_r), n, b), ranges, (*inputs, dQ), (*strided, dQ))
    return dQ, dK, dV


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
    tiles: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as of `core_attention.Attention`, which checks them, and the tables of `config/attention.py` have the
    limits. `tiles` are B_r and B_c of all kernels, or None for those of `TILES`."""
    assert dropout == 0
    return FlashAttention.apply(query, key, value, _call(query, mask, scale, softcap, tiles))


def _call(query: Tensor, mask: Mask, scale: float, softcap: float, tiles: tuple[int, int] | None) -> _Call:
    width = max(64, triton.next_power_of_2(query.shape[3]))
    return _Call(mask, scale, softcap, TILES[query.element_size(), width] if tiles is None else 3 * (Tiles(*tiles),))


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
    return _backward(_call(query, mask, scale, softcap, None), grad, Q, K, V, out, lse.contiguous())
