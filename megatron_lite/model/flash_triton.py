# ruff: noqa: E741 - O and l are letters of the paper
"""FlashAttention 2 as Triton kernels: forward, dK and dV, and dQ.

A program of a kernel owns a tile of one head and loops over the tiles that it needs: forward and dQ own queries and
loop over keys, dK and dV own keys and loop over queries. What a program owns stays in registers until it is final. No
other program writes it, so there are no atomic operations and results are the same bits in every run.

A mask is a range of columns for each row. Queries have ranges of keys (`Mask.ranges`), and since those do not decrease,
keys have ranges of queries. The first and the last row of a tile bound the columns of all its rows. Tiles of columns
that all rows see need no mask arithmetic, so they have a loop of their own.

The letters are those of the paper: tiles of B_r queries, numbered by i, and of B_c keys, numbered by j; maximum m, sum l,
log-sum-exp L, and D = rowsum(dO * O). Scores, softcap and m are in base 2, that is divided by ln 2, because GPUs have an
instruction for exp2; L is natural. Everything between inputs and results is fp32.
Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

from collections.abc import Callable
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
        "model.attention is triton: Python cannot import triton; install it (pip install triton) or choose another "
        "model.attention"
    ) from error

LN_2 = tl.constexpr(log(2))
LOWEST = tl.constexpr(-3.4e38)  # about the smallest fp32; differences of -inf would be nan


@triton.jit
def _load(X, stride, start, num_rows, d: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """Rows `start` to `start + ROWS` of X, zeros after its last row and after column d."""
    row, column = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + row.to(tl.int64)[:, None] * stride + column[None, :]
    if not CHECKED and d == WIDTH:
        return tl.load(pointers)
    return tl.load(pointers, mask=(row < num_rows)[:, None] & (column < d)[None, :], other=0.0)


@triton.jit
def _store(X, stride, start, num_rows, value, d: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row, column = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(pointers, value.to(X.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < d)[None, :])


@triton.jit
def _load_vector(x, start, num_rows, ROWS: tl.constexpr):
    """Elements `start` to `start + ROWS` of x, zeros after its last: a row without columns, if x is `end`."""
    row = start + tl.arange(0, ROWS)
    return tl.load(x + row, mask=row < num_rows, other=0)


@triton.jit
def _columns(first, end, start, num_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tiles of columns of a tile of rows. Some rows see those from `low` to `high`, and all rows those from
    `full` to `full_end`. Of the others, `num_left` are on the left of `full` and `num_border` on both sides."""
    last = tl.minimum(start + ROWS, num_rows) - 1
    low, high = tl.load(first + start) // COLUMNS * COLUMNS, tl.load(end + last)
    full = tl.cdiv(tl.load(first + last), COLUMNS) * COLUMNS
    full_end = tl.load(end + start) // COLUMNS * COLUMNS
    has_full = full < full_end
    full, full_end = tl.where(has_full, full, low), tl.where(has_full, full_end, low)
    num_left = (full - low) // COLUMNS
    return low, num_left, num_left + tl.cdiv(high - full_end, COLUMNS), full, full_end


@triton.jit
def _border(step, low, num_left, full_end, COLUMNS: tl.constexpr):
    """The first column of a tile on the left or on the right of the full ones."""
    return tl.where(step < num_left, low + step * COLUMNS, full_end + (step - num_left) * COLUMNS)


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
def _scores(a, b, scale, softcap: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """S = scale a b^T in base 2, with a softcap but without a mask."""
    S = _dot(a, tl.trans(b), tl.zeros([ROWS, COLUMNS], tl.float32)) * scale
    if softcap > 0:
        S = softcap * (1 - 2 / (1 + tl.exp2(S * (2 / (softcap * LN_2)))))  # tanh x = 1 - 2 / (1 + exp 2x)
    return S


@triton.jit
def _forward_step(
    O_i, l_i, m_i, Q_i, K, V, k_stride, v_stride, k0, N_k, first_i, end_i, scale, softcap: tl.constexpr,
    d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Lines 7 to 10 of algorithm 1: one tile of keys."""
    K_j = _load(K, k_stride, k0, N_k, d, WIDTH, B_c, MASKED)
    V_j = _load(V, v_stride, k0, N_k, d, WIDTH, B_c, MASKED)
    S = _scores(Q_i, K_j, scale, softcap, B_r, B_c)
    if MASKED:
        S = tl.where(_visible(first_i, end_i, k0, B_c), S, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(S, 1))
    P, old = tl.exp2(S - m_new[:, None]), tl.exp2(m_i - m_new)
    l_i = old * l_i + tl.sum(P, 1)
    O_i = _dot(P.to(V_j.dtype), V_j, O_i * old[:, None])
    return O_i, l_i, m_new


@triton.jit
def _forward(
    Q, K, V, O, L, first, end, q_strides, k_strides, v_strides, o_strides, range_stride, N_q, N_k, r, scale,
    softcap: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 for one tile of queries: the steps of its outer loop are programs."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # last queries first: with a causal mask they have the most keys
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q0, group = i * B_r, head // r
    K += batch * k_strides[0] + group * k_strides[1]
    V += batch * v_strides[0] + group * v_strides[1]
    first, end = first + batch * range_stride, end + batch * range_stride
    first_i, end_i = _load_vector(first, q0, N_q, B_r), _load_vector(end, q0, N_q, B_r)
    low, num_left, num_border, full, full_end = _columns(first, end, q0, N_q, B_r, B_c)
    Q_i = _load(Q + batch * q_strides[0] + head * q_strides[1], q_strides[2], q0, N_q, d, WIDTH, B_r, True)
    O_i, l_i = tl.zeros([B_r, WIDTH], tl.float32), tl.zeros([B_r], tl.float32)
    m_i = tl.full([B_r], LOWEST, tl.float32)
    for step in range(num_border):
        k0 = _border(step, low, num_left, full_end, B_c)
        O_i, l_i, m_i = _forward_step(
            O_i, l_i, m_i, Q_i, K, V, k_strides[2], v_strides[2], k0, N_k, first_i, end_i, scale, softcap, d, WIDTH,
            B_r, B_c, True,
        )  # fmt: skip
    for k0 in range(full, full_end, B_c):
        O_i, l_i, m_i = _forward_step(
            O_i, l_i, m_i, Q_i, K, V, k_strides[2], v_strides[2], k0, N_k, first_i, end_i, scale, softcap, d, WIDTH,
            B_r, B_c, False,
        )  # fmt: skip
    O_i /= tl.where(l_i == 0, 1.0, l_i)[:, None]  # a query without keys
    _store(O + batch * o_strides[0] + head * o_strides[1], o_strides[2], q0, N_q, O_i, d, WIDTH, B_r)
    L_i = tl.where(l_i == 0, float("-inf"), (m_i + tl.log2(l_i)) * LN_2)
    row = q0 + tl.arange(0, B_r)
    tl.store(L + (batch * tl.num_programs(1) + head) * N_q + row, L_i, mask=row < N_q)


@triton.jit
def _p_and_ds(S, dP, L, D, visible, softcap: tl.constexpr, MASKED: tl.constexpr):
    """Lines 11 and 14 of algorithm 2: P and dS, for a tile or its transpose."""
    P = tl.exp2(S - L / LN_2)
    if MASKED:
        P = tl.where(visible, P, 0.0)  # also where L is -inf
    dS = P * (dP - D)
    if softcap > 0:  # the derivative of tanh is 1 - tanh^2
        dS *= 1 - (S / softcap) * (S / softcap)
    return P, dS
