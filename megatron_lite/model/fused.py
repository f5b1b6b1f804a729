"""The parts of a block between its matrix products, each as one kernel in forward and one in backward.

Eager operations each read and write an activation. These functions read every input and write every output once, and
round once, so their results are those of the eager functions, or are rounded less. A second small kernel in backward
adds up the gradient of a vector, which is a bias or a norm's weight. The kernels are in `fused_triton.py`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

PARTIAL_SUMS = 256  # programs that sum the gradient of a vector, each over some of the tokens
TILE = {"ROWS": 16, "COLUMNS": 128}
Some = Tensor | None


def launch(
    kernel: str, grid: tuple[int, ...], reads: Sequence[Some], writes: Sequence[Some], *numbers: Any, **constants: Any
) -> None:
    """Start a kernel; None stands for a tensor that it does not use. The roofline replaces this function."""
    _triton_launch()(kernel, grid, [*reads, *writes], *numbers, **constants)


@cache
def _triton_launch() -> Callable[..., None]:
    return import_module("megatron_lite.model.fused_triton").launch


class Sums:
    """Gradients of vectors, each as one row of partial sums for each program; absent vectors are None."""

    def __init__(self, vectors: Sequence[Some], programs: int):
        self._present = [vector is not None for vector in vectors]
        given = [vector for vector in vectors if vector is not None]
        self.partial: list[Some] = [None] * len(vectors)
        if given:
            self._dtype = given[0].dtype
            self._all = given[0].new_empty(len(given), programs, given[0].numel(), dtype=torch.float32)
            rows = iter(self._all)
            self.partial = [next(rows) if present else None for present in self._present]

    def totals(self) -> list[Some]:
        """The gradient of each vector."""
        if not any(self._present):
            return self.partial
        count, programs, size = self._all.shape
        out = self._all.new_empty(count, size, dtype=self._dtype)
        launch("total_of_rows", (_blocks(size), count), [self._all], [out], programs, size, **TILE)
        rows = iter(out)
        return [next(rows) if present else None for present in self._present]


class NormSpec(NamedTuple):
    """The computation of a norm, without its weight and bias."""

    eps: float
    is_rms: bool
    is_zero_centered: bool
    dtype: torch.dtype  # of its output


class _AddNorm(torch.autograd.Function):
    """The stream and its norm, whose gradients one kernel of backward adds."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Some,
        bias: Some,
        weight: Some,
        norm_bias: Some,
        spec: NormSpec | None,
        dropout: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Some]:
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        stream = x.view_as(x) if branch is None else torch.empty(x.shape, dtype=dtype, device=x.device)
        normed = mean = rstd = None
        if spec is not None:
            normed, rstd = x.new_empty(x.shape, dtype=spec.dtype), x.new_empty(rows, dtype=torch.float32)
            mean = None if spec.is_rms else torch.empty_like(rstd)
        seed = torch.randint(2**60, (), device=x.device) if dropout else None
        ctx.constants = constants = {
            "HAS_NORM": spec is not None,
            "HAS_NORM_BIAS": norm_bias is not None,
            "HAS_BIAS": bias is not None,
            "IS_RMS": spec is not None and spec.is_rms,
            "IS_ZERO_CENTERED": spec is not None and spec.is_zero_centered,
            "dropout": dropout,
            **_one_row(size),
        }
        reads = [x, branch, bias, weight, norm_bias, seed]
        writes = [None if branch is None else stream, normed, mean, rstd]
        numbers = size, spec.eps if spec else 0.0
        launch("add_norm_forward", (rows,), reads, writes, *numbers, HAS_BRANCH=branch is not None, **constants)
        ctx.save_for_backward(None if spec is None else stream, weight, mean, rstd, seed)
        ctx.set_materialize_grads(False)
        ctx.like, ctx.vectors = (x.dtype, None if branch is None else branch.dtype), (weight, norm_bias, bias)
        return stream, normed

    @staticmethod
    def backward(ctx: Any, grad_stream: Some, grad_normed: Some):  # type: ignore[override]
        stream, weight, mean, rstd, seed = ctx.saved_tensors
        constants, (dtype, branch_dtype) = ctx.constants, ctx.like
        has_norm = constants["HAS_NORM"]
        if has_norm and grad_normed is None:
            grad_normed = torch.zeros_like(stream, dtype=weight.dtype)
        given = grad_normed if grad_stream is None else grad_stream
        assert given is not None
        rows, size = given.numel() // given.shape[-1], given.shape[-1]
        grads = [None if grad is None else grad.contiguous() for grad in (grad_stream, grad_normed)]
        grad_x = torch.empty(given.shape, dtype=dtype, device=given.device) if has_norm else grads[0]
        differs = branch_dtype is not None and (constants["dropout"] > 0 or branch_dtype != dtype)
        grad_branch = torch.empty(given.shape, dtype=branch_dtype, device=given.device) if differs else None
        if not has_norm and not differs:  # the sum alone is one of torch's kernels
            bias = ctx.vectors[2]
            of_bias = None if bias is None else given.reshape(rows, size).sum(0).to(bias.dtype)
            return grad_x, grad_x, of_bias, *[None] * 5
        programs = min(rows, PARTIAL_SUMS)
        sums = Sums(ctx.vectors, programs)
        reads = [stream, weight, mean, rstd, *grads, seed]
        writes = [grad_x if has_norm else None, grad_branch, *sums.partial]
        flags = {"HAS_GRAD_STREAM": grad_stream is not None, "HAS_GRAD_BRANCH": differs}
        launch("add_norm_backward", (programs,), reads, writes, rows, size, **flags, **constants)
        of_weight, of_norm_bias, of_bias = sums.totals()
        of_branch = None if branch_dtype is None else grad_branch if differs else grad_x
        return grad_x, of_branch, of_bias, of_weight, of_norm_bias, None, None, None


def add_norm(
    x: Tensor,
    branch: Some,
    bias: Some,
    weight: Some,
    norm_bias: Some,
    *,
    spec: NormSpec | None,
    dropout: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Some]:
    """stream = x + dropout(branch + bias) in `dtype`, or x without a branch; and norm(stream), or None without `spec`.

    x, branch   [s', b, h];   bias, weight, norm_bias   [h]
    """
    branch = None if branch is None else branch.contiguous()
    return _AddNorm.apply(x.contiguous(), branch, bias, weight, norm_bias, spec, dropout, dtype)  # type: ignore[return-value]


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Some, kind: str, is_gated: bool) -> Tensor:
        width = x.shape[-1] // (2 if is_gated else 1)
        rows = x.numel() // x.shape[-1]
        out = x.new_empty(*x.shape[:-1], width)
        ctx.constants = {"KIND": kind, "IS_GATED": is_gated, "HAS_BIAS": bias is not None, **TILE}
        grid = (-(-rows // TILE["ROWS"]), _blocks(width))
        launch("activation_forward", grid, [x, bias], [out], rows, width, **ctx.constants)
        ctx.save_for_backward(x, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, bias = ctx.saved_tensors
        grad = grad.contiguous()
        width, rows = grad.shape[-1], grad.numel() // grad.shape[-1]
        grad_x, programs = torch.empty_like(x), min(-(-rows // TILE["ROWS"]), PARTIAL_SUMS)
        sums = Sums([bias], programs)
        grid, writes = (programs, _blocks(width)), [grad_x, *sums.partial]
        launch("activation_backward", grid, [x, bias, grad], writes, rows, width, **ctx.constants)
        return grad_x, *sums.totals(), None, None


# For each activation the function of the kernel, and whether a gate follows it.
KINDS = {name: (name, False) for name in ("gelu", "gelu_tanh", "quick_gelu", "relu")}
KINDS |= {"swiglu": ("silu", True), "geglu": ("gelu_tanh", True)}


def bias_activation(x: Tensor, bias: Some, activation: str) -> Tensor:
    """As `fusion.bias_activation`."""
    return _BiasActivation.apply(x.contiguous(), bias, *KINDS[activation])  # type: ignore[return-value]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int, d: int) -> None:
    """Rotate heads in place: x [s, b, heads * d], or the first columns of wider rows."""
    (s, b, _), half = x.shape, cos.shape[-1]
    numbers = s * b, b, x.stride(1), _angle_strides(cos)
    constants = {"NUM_HEADS": heads, "d": d, "HALF": half, "ROWS": 16, "COLUMNS": _power_of_2(half)}
    launch("rotate_heads", (-(-s * b // 16),), [x, cos, sin], [x], *numbers, **constants)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        _rotate(x.flatten(2), cos, sin, *x.shape[2:])
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)
        _rotate(grad.flatten(2), cos, -sin, *grad.shape[2:])
        return grad, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rotary.apply_rotary`, in place: x [s, b, n, d] is the output of a norm, which backward does not need."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[return-value]


class _SplitHeads(torch.autograd.Function):
    """Views of the fused rows, which were rotated in place: the product that made them does not need its output."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, bias: Some, rotary: tuple[Tensor, Tensor] | None, heads: int, groups: int, d: int
    ) -> tuple[Tensor, ...]:
        s, b, _ = mixed.shape
        ctx.rotary = None
        if rotary is not None:
            ctx.rotary = (*rotary, _angle_strides(rotary[0]))
            _rotate(mixed[..., : (heads + groups) * d], *rotary, heads + groups, d)
        ctx.sizes, ctx.bias = (heads, groups, d), bias
        rows = mixed.data.view(s, b, heads + 2 * groups, d)
        return rows[:, :, :heads], rows[:, :, heads : heads + groups], rows[:, :, heads + groups :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):  # type: ignore[override]
        heads, groups, d = ctx.sizes
        grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        s, b = grads[0].shape[:2]
        cos, sin, angle_strides = ctx.rotary or (None, None, (0, 0))
        mixed = grads[0].new_empty(s, b, (heads + 2 * groups) * d)
        programs = min(-(-s * b // 16), PARTIAL_SUMS)
        sums = Sums([ctx.bias], programs)
        strides = (grad.stride()[:3] for grad in grads)
        constants = {"NUM_QUERIES": heads, "NUM_GROUPS": groups, "d": d, "HALF": 0 if cos is None else cos.shape[-1]}
        constants |= {"HAS_BIAS": ctx.bias is not None, "ROWS": 16, "COLUMNS": _power_of_2(d)}
        reads, writes = [*grads, cos, sin], [mixed, *sums.partial]
        numbers = s * b, b, *strides, angle_strides
        launch("join_heads", (programs, heads + 2 * groups), reads, writes, *numbers, **constants)
        return mixed, *sums.totals(), None, None, None, None


def split_heads(
    mixed: Tensor, bias: Some, rotary: tuple[Tensor, Tensor] | None, *, heads: int, groups: int, head_size: int
) -> tuple[Tensor, ...]:
    """Query [s, b, heads, d], key and value [s, b, groups, d], the first two rotated. Overwrites `mixed`.

    mixed    [s, b, (heads + 2 groups) d]   a product, whose bias is added already
    bias     its bias, which gets its gradient here; or None
    rotary   cosine and sine, [s, 1 or b, 1, r/2]
    """
    return _SplitHeads.apply(mixed, bias, rotary, heads, groups, head_size)  # type: ignore[return-value]


def _angle_strides(angles: Tensor) -> tuple[int, int]:
    """The strides over positions and rows of the batch."""
    return angles.stride(0), angles.stride(1) if angles.shape[1] > 1 else 0


def _one_row(size: int) -> dict[str, int]:
    """A program's tile where it has a full row."""
    width = _power_of_2(size)
    return {"WIDTH": width, "num_warps": min(max(width // 512, 4), 32)}


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 1).bit_length() if number > 1 else 1


def _blocks(columns: int) -> int:
    return -(-columns // TILE["COLUMNS"])
