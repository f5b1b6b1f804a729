# Triton's annotations describe its compiler, where True is a constexpr.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""What the kernels of `flash_triton.py` compute with one tile of scores: ranges, scores, bias, dropout, P and dS.

Rows and columns of a tile are queries and keys, or in the kernel of dK and dV keys and queries. Options are constants
of the compiler: without a bias or dropout, nothing of them is in the compiled kernel.
"""

from math import log

import triton
import triton.language as tl

LN_2 = tl.constexpr(log(2))


@triton.jit
def load(X, stride, start, num_rows, d: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """ROWS rows of X from row `start`, with zeros after the last row and after column d."""
    row, column = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + row.to(tl.int64)[:, None] * stride + column[None, :]
    if not CHECKED and d == WIDTH:
        return tl.load(pointers)
    return tl.load(pointers, mask=(row < num_rows)[:, None] & (column < d)[None, :], other=0.0)


@triton.jit
def store(X, stride, start, num_rows, value, d: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The counterpart of `load`."""
    row, column = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(pointers, value.to(X.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < d)[None, :])


@triton.jit
def load_vector(x, start, num_rows, ROWS: tl.constexpr):
    """ROWS elements of x from `start`, with zeros after the last. So rows after the last have an empty range."""
    row = start + tl.arange(0, ROWS)
    return tl.load(x + row, mask=row < num_rows, other=0)


@triton.jit
def columns(first, end, start, num_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tiles of columns that a tile of rows needs. All rows see the full tiles, some rows see those at the borders.
    Returns the first column, and the numbers of tiles on the left of the full ones, of full ones, and at borders."""
    last = tl.minimum(start + ROWS, num_rows) - 1
    low, high = tl.load(first + start) // COLUMNS, tl.cdiv(tl.load(end + last), COLUMNS)
    full, full_end = tl.cdiv(tl.load(first + last), COLUMNS), tl.load(end + start) // COLUMNS
    num_full = tl.maximum(full_end - full, 0)
    num_left = tl.where(num_full > 0, full - low, 0)
    return low * COLUMNS, num_left, num_full, high - low - num_full


@triton.jit
def column(step, low, num_left, num_full, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """The first column of the tile of a step: a tile at the borders if MASKED, else a full one."""
    skipped = tl.where(step < num_left, 0, num_full) if MASKED else num_left
    return low + (step + skipped) * COLUMNS


@triton.jit
def visible(first, end, start, COLUMNS: tl.constexpr):
    """True where a row sees a column."""
    column = (start + tl.arange(0, COLUMNS))[None, :]
    return (first[:, None] <= column) & (column < end[:, None])


@triton.jit
def dot(a, b, c):
    """a b + c. Without "ieee", fp32 inputs would be rounded to TF32."""
    return tl.dot(a, b, acc=c, input_precision="ieee")


@triton.jit
def scores(a, b, scale, softcap: tl.constexpr):
    """S / ln 2, without the mask; `scale` and `softcap` are divided by ln 2."""
    S = dot(a, tl.trans(b), None) * scale
    if softcap > 0:
        S = softcap * (1 - 2 / (1 + tl.exp2(S * (2 / (softcap * LN_2)))))  # tanh x = 1 - 2 / (1 + exp 2x)
    return S


@triton.jit
def biased(S, bias, strides, batch, head, query, key, N_q, N_k):
    """S with the biases of these queries and keys, [rows, 1] and [1, columns] or the other way round."""
    if bias is not None:
        at = bias + batch * strides[0] + head * strides[1] + query.to(tl.int64) * strides[2] + key * strides[3]
        S += tl.load(at, mask=(query < N_q) & (key < N_k), other=0.0).to(tl.float32) / LN_2
    return S


@triton.jit
def dropped(x, seed, head, query, key, threshold: tl.constexpr):
    """x * Z of algorithm 2: 0 for dropped probabilities, 1 / (1 - dropout) for the others. `flash_tiled.py` has the
    same hash, so both keep the same probabilities. `threshold` is dropout * 2**32; `head` counts the batch's heads."""
    if threshold > 0:
        of_head = hashed(head.to(tl.uint32) ^ tl.load(seed).to(tl.uint32))
        bits = hashed(hashed(of_head ^ query.to(tl.uint32)) ^ hashed(key.to(tl.uint32)))
        x *= tl.where(bits >= threshold, 1 / (1 - threshold / 4294967296), 0.0)
    return x


@triton.jit
def hashed(x):
    """32 mixed bits for each uint32: the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def p_and_ds(S, biased_S, dP, L, D, visible, softcap: tl.constexpr, MASKED: tl.constexpr):
    """Lines 11 and 14 of algorithm 2: P and dS of a tile, or of its transpose."""
    P = tl.exp2(biased_S - L / LN_2)
    if MASKED:
        P = tl.where(visible, P, 0.0)  # L may be -inf where nothing is visible
    dS = P * (dP - D)
    if softcap > 0:  # the derivative of tanh is 1 - tanh^2
        dS *= 1 - (S / softcap) * (S / softcap)
    return P, dS
