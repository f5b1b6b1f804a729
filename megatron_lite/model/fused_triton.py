# Triton's annotations describe its compiler, where True is a constexpr and static_range is a loop.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""The Triton kernels of `fused.py`: each reads its inputs once and writes its outputs once.

Arithmetic is in fp32, and a value is rounded when it is stored. The gradient of a vector, of a bias or a norm's weight,
is a sum over all tokens: each program sums its rows in registers and writes one row of partial sums, which torch adds
up. No program adds to another one's memory, so two runs give the same bits.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError(
        "model.fusion is on, and Python cannot import triton; pip install triton, or set model.fusion: off"
    ) from error


@triton.jit
def _kept(seed, row, column, dropout: tl.constexpr):
    """1 / (1 - dropout) for elements that dropout keeps, 0 for others; the same in forward and backward."""
    return tl.where(tl.rand(tl.load(seed) + row, column) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _vector(x, column, inside, IS_GIVEN: tl.constexpr, default: tl.constexpr):
    return tl.load(x + column, mask=inside, other=0.0).to(tl.float32) if IS_GIVEN else default


@triton.jit
def add_norm_forward(
    x, branch, bias, weight, norm_bias, seed, stream, normed, mean, rstd, size, eps,
    HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    IS_RMS: tl.constexpr, IS_ZERO_CENTERED: tl.constexpr, dropout: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """stream = x + dropout(branch + bias) and its norm, for one row."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < size
    at = row.to(tl.int64) * size + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        added += _vector(bias, column, inside, HAS_BIAS, 0.0)
        if dropout > 0:
            added *= _kept(seed, row, column, dropout)
        value = (value + added).to(stream.dtype.element_ty)
        tl.store(stream + at, value, mask=inside)
        value = value.to(tl.float32)  # backward computes the norm of the stored stream
    if HAS_NORM:
        center = 0.0 if IS_RMS else tl.sum(value) / size
        value = tl.where(inside, value - center, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(value * value) / size + eps)
        factor = _vector(weight, column, inside, True, 1.0)
        factor = factor + 1.0 if IS_ZERO_CENTERED else factor
        value = value * scale * factor + _vector(norm_bias, column, inside, HAS_NORM_BIAS, 0.0)
        tl.store(normed + at, value.to(normed.dtype.element_ty), mask=inside)
        tl.store(rstd + row, scale)
        if not IS_RMS:
            tl.store(mean + row, center)


@triton.jit
def add_norm_backward(
    stream, weight, mean, rstd, grad_stream, grad_normed, seed, grad_x, grad_branch, sum_weight, sum_norm_bias,
    sum_bias, num_rows, size,
    HAS_GRAD_STREAM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GRAD_BRANCH: tl.constexpr, IS_RMS: tl.constexpr, IS_ZERO_CENTERED: tl.constexpr, dropout: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of x, and of the branch if it differs, for every n-th row; and their sums, [n, size] each."""
    program, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    inside = column < size
    factor = _vector(weight, column, inside, HAS_NORM, 1.0)
    factor = factor + 1.0 if IS_ZERO_CENTERED else factor
    of_weight, of_norm_bias = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    of_bias = tl.zeros([WIDTH], tl.float32)
    size_64 = tl.cast(size, tl.int64)
    for row in range(program, num_rows, step):
        at = row * size_64 + column
        total = tl.zeros([WIDTH], tl.float32)
        if HAS_GRAD_STREAM:
            total += tl.load(grad_stream + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.load(rstd + row)
            center = 0.0 if IS_RMS else tl.load(mean + row)
            value = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, (value - center) * scale, 0.0)
            grad = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
            of_weight += grad * value
            of_norm_bias += grad
            grad *= factor
            along = tl.sum(grad * value) / size
            mean_grad = 0.0 if IS_RMS else tl.sum(grad) / size
            total += (grad - mean_grad - value * along) * scale
        if HAS_NORM:  # without one it is the gradient of the stream
            tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=inside)
        if dropout > 0:
            total *= _kept(seed, row, column, dropout)
        if HAS_GRAD_BRANCH:
            tl.store(grad_branch + at, total.to(grad_branch.dtype.element_ty), mask=inside)
        of_bias += tl.where(inside, total, 0.0)
    own = program.to(tl.int64) * size + column
    if HAS_NORM:
        tl.store(sum_weight + own, of_weight, mask=inside)
    if HAS_NORM_BIAS:
        tl.store(sum_norm_bias + own, of_norm_bias, mask=inside)
    if HAS_BIAS:
        tl.store(sum_bias + own, of_bias, mask=inside)


@triton.jit
def total_of_rows(x, out, num_rows, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums over dim 1 of x [k, num_rows, size], for a block of columns."""
    plane = tl.program_id(1)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros([1, COLUMNS], tl.float32)
    for first in range(0, num_rows, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        at = x + (plane * num_rows + row).to(tl.int64) * size + column
        total += tl.sum(tl.load(at, mask=(row < num_rows) & (column < size), other=0.0), axis=0)[None, :]
    tl.store(out + plane * size + column, total.to(out.dtype.element_ty), mask=column < size)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activation(x, KIND: tl.constexpr):
    """The activation of x and its derivative."""
    if KIND == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    if KIND == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * below, below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    if KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        half = _sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
        slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
        return x * half, half + 2.0 * x * half * (1.0 - half) * slope
    scale: tl.constexpr = 1.702 if KIND == "quick_gelu" else 1.0  # pyright: ignore[reportAssignmentType] # or silu
    part = _sigmoid(scale * x)
    return x * part, part + scale * x * part * (1.0 - part)


@triton.jit
def activation_forward(
    x, bias, out, num_rows, width, KIND: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """activation(x + bias) of a tile; with a gate x has 2 * width columns, the gate first."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside, is_column = (row < num_rows) & (column < width), column < width
    at = row.to(tl.int64) * (2 * width if IS_GATED else width) + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + _vector(bias, column, is_column, HAS_BIAS, 0.0)
    result, _ = _activation(value, KIND)
    if IS_GATED:
        up = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
        result *= up + _vector(bias, column + width, is_column, HAS_BIAS, 0.0)
    tl.store(out + row.to(tl.int64) * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward(
    x, bias, grad, grad_x, sums, num_rows, width, KIND: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of x for a block of columns in every n-th tile of rows, and its sums for the bias, [n, columns]."""
    program, step = tl.program_id(0), tl.num_programs(0)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_column, total = column < width, 2 * width if IS_GATED else width
    bias_x = _vector(bias, column, is_column, HAS_BIAS, 0.0)
    bias_up = _vector(bias, column + width, is_column, HAS_BIAS and IS_GATED, 0.0)
    of_x, of_up = tl.zeros([1, COLUMNS], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
    for tile in range(program, tl.cdiv(num_rows, ROWS), step):
        row = (tile * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < num_rows) & is_column
        at = row * total + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + bias_x
        incoming = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        result, slope = _activation(value, KIND)
        if IS_GATED:
            up = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32) + bias_up
            for_up = (incoming * result).to(grad_x.dtype.element_ty)
            tl.store(grad_x + at + width, for_up, mask=inside)
            of_up += tl.sum(for_up.to(tl.float32), axis=0)[None, :]
            incoming *= up
        for_x = (incoming * slope).to(grad_x.dtype.element_ty)
        tl.store(grad_x + at, for_x, mask=inside)
        of_x += tl.sum(for_x.to(tl.float32), axis=0)[None, :]
    if HAS_BIAS:
        own = program.to(tl.int64) * total + column
        tl.store(sums + own, of_x, mask=is_column)
        if IS_GATED:
            tl.store(sums + own + width, of_up, mask=is_column)


@triton.jit
def rotate_heads(
    x, cos, sin, out, num_rows, batch, width, angle_strides, NUM_HEADS: tl.constexpr, d: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate the first heads of rows [s * b, width] by the angles of their positions; `out` can be x."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < HALF)
    angle = row // batch * angle_strides[0] + row % batch * angle_strides[1] + column
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    for head in range(NUM_HEADS):
        at = row.to(tl.int64) * width + head * d + column
        first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def join_heads(
    query, key, value, cos, sin, out, sums, num_rows, batch, query_strides, key_strides, value_strides, angle_strides,
    NUM_QUERIES: tl.constexpr, NUM_GROUPS: tl.constexpr, d: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy one head of every n-th tile of rows from [s, b, n, d], with its strides, to its columns of the fused rows;
    rotate queries and keys back; and sum the rows for the bias, [n, columns]. HALF is 0 without a rotation."""
    program, step, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    if head < NUM_QUERIES:
        source = query + head * query_strides[2]
        stride_s, stride_b = query_strides[0], query_strides[1]
    elif head < NUM_QUERIES + NUM_GROUPS:
        source = key + (head - NUM_QUERIES) * key_strides[2]
        stride_s, stride_b = key_strides[0], key_strides[1]
    else:
        source = value + (head - NUM_QUERIES - NUM_GROUPS) * value_strides[2]
        stride_s, stride_b = value_strides[0], value_strides[1]
    half = tl.where(head < NUM_QUERIES + NUM_GROUPS, HALF, 0)
    column = tl.arange(0, COLUMNS)[None, :]
    partner = tl.where(column < half, column + half, column - half)
    width = (NUM_QUERIES + 2 * NUM_GROUPS) * d
    total = tl.zeros([1, COLUMNS], tl.float32)
    for tile in range(program, tl.cdiv(num_rows, ROWS), step):
        row = (tile * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < num_rows) & (column < d)
        at = source + row // batch * stride_s + row % batch * stride_b
        x = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
        if HALF > 0:
            turned = inside & (column < 2 * half)
            angle = row // batch * angle_strides[0] + row % batch * angle_strides[1] + column % HALF
            c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
            s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
            other = tl.load(at + partner, mask=turned, other=0.0).to(tl.float32)
            x = x * c + tl.where(column < half, other, -other) * s
        x = x.to(out.dtype.element_ty)
        tl.store(out + row * width + head * d + column, x, mask=inside)
        total += tl.sum(tl.where(inside, x.to(tl.float32), 0.0), axis=0)[None, :]
    if HAS_BIAS:
        tl.store(sums + program.to(tl.int64) * width + head * d + column, total, mask=column < d)


# Compiled kernels by all that Triton may specialize them for.
_compiled: dict[tuple[Any, ...], Any] = {}
MOST_COMPILED = 1000  # then the table starts again, because a kernel has an entry for each length of a sequence


def launch(name: str, grid: tuple[int, ...], tensors: Sequence[Tensor | None], *numbers: Any, **constants: Any) -> None:
    """Start the kernel of this name. None is a tensor that the kernel does not use.

    Triton's own search for the compiled kernel takes the host as long as a kernel of a small model takes the GPU. So a
    kernel that was started with the same dtypes, alignments, numbers and constants is started at once.
    """
    kernel, some = globals()[name], next(tensor for tensor in tensors if tensor is not None)
    given = [some if tensor is None else tensor for tensor in tensors]
    forms = [(tensor.dtype, tensor.data_ptr() % 16) for tensor in given]
    key = (name, some.device, numbers, *constants.items(), *forms)
    is_current = not some.is_cuda or some.device.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(some.device):
        if (found := _compiled.get(key)) is not None:
            others = [constants[parameter] for parameter in kernel.arg_names[len(given) + len(numbers) :]]
            found[(*grid, 1, 1)[:3]](*given, *numbers, *others)
            return
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = kernel[grid](*given, *numbers, **constants)  # None in the interpreter
