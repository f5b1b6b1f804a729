"""Functions with a backward of their own, which need less memory than autograd's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Gated(torch.autograd.Function):
    """activation(gate) * up. Backward needs only the input, because it computes the activation again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Callable[..., Tensor], derivative: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.derivative = activation, derivative
        gate, up = x.chunk(2, dim=-1)
        return activation(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        (gate, up), (grad_gate, grad_up) = x.chunk(2, dim=-1), grad_x.chunk(2, dim=-1)
        torch.mul(grad, ctx.activation(gate), out=grad_up)
        grad_gate.copy_(ctx.derivative(grad * up, gate))
        return grad_x, None, None


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight in at least fp32, rounded once. Backward needs x and one value per token. The backward of
    torch's CPU kernels needs two fp32 tensors of the size of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        normed = torch.mul(wide, rstd, out=None if wide is x else wide)
        return normed.mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        normed = x * rstd
        products = grad * normed
        of_weight = products.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        mean = products.mul_(weight).mean(-1, keepdim=True)
        grad_x = (grad * weight.to(rstd.dtype)).sub_(normed.mul_(mean)).mul_(rstd)
        return grad_x.to(x.dtype), of_weight, None


class Rotated(torch.autograd.Function):
    """Elements i and i + r/2 of x `[..., r]` rotated by the angles of `cos` and `sin`. Works in one tensor of the
    table's dtype. Backward rotates by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype, copy=True)
    first, second = wide.chunk(2, dim=-1)
    to_second = first * sin
    first.mul_(cos).sub_(second * sin)
    second.mul_(cos).add_(to_second)
    return wide.to(x.dtype)
