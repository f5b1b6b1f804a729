# Triton's annotations describe its compiler, where True is a constexpr.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""The Triton kernels of `loss.py`: forward reads the logits once, backward reads and overwrites them once."""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def max_and_sum_of_exp(logits, highest, total, width, num_valid, COLUMNS: tl.constexpr):
    """Of one row, the maximum and the sum of exp(logit - maximum) over the first `num_valid` columns."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * width
    top = tl.full([COLUMNS], float("-inf"), tl.float32)
    parts = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, num_valid, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        value = tl.load(start + column, mask=column < num_valid, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, value)
        finite = tl.where(new == float("-inf"), 0.0, new)
        parts = parts * tl.exp(top - finite) + tl.exp(value - finite)
        top = new
    most = tl.max(top)
    tl.store(highest + row, most)
    tl.store(total + row, tl.sum(parts * tl.exp(top - tl.where(most == float("-inf"), 0.0, most))))


@triton.jit
def softmax_gradient(logits, highest, total, target, grad, out, width, num_valid, COLUMNS: tl.constexpr):
    """(softmax - one_hot(target)) * grad for a block of columns of one row; `out` can be the logits. `target` is -1
    where it is not in this rank's columns."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64) * width + column
    value = tl.load(logits + at, mask=column < num_valid, other=float("-inf")).to(tl.float32)
    value = tl.exp(value - tl.load(highest + row)) / tl.load(total + row)
    value = (value - tl.where(column == tl.load(target + row), 1.0, 0.0)) * tl.load(grad + row)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=column < width)


def launch(kernel: str, grid: tuple[int, ...], tensors: list[Tensor], *numbers: Any, **constants: Any) -> None:
    """Start the kernel of this name."""
    with torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else nullcontext():
        globals()[kernel][grid](*tensors, *numbers, **constants)
