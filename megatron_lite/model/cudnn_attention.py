"""cuDNN's attention on a GPU, the fastest kernel of torch on Hopper, with torch's other kernels where it fails.

torch chooses a kernel by rules before it calls one. An error of cuDNN's own, such as a missing execution plan for a
shape, would therefore end the run, in forward or much later in backward. Here the call is repeated by another kernel,
and cuDNN is not called again in this process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from megatron_lite.text import visible

ops = torch.ops.aten
_has_failed = False


def can_compute(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
    """Whether torch's rules allow cuDNN, in 16 bits, and nothing asks for determinism. Asks the driver of the GPU."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.are_deterministic_algorithms_enabled():  # its backward adds in any order
        return False
    grouped = key.shape[1] != query.shape[1]
    return can_use_cudnn_attention(SDPAParams(query, key, value, None, 0.0, causal, grouped))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float,
    otherwise: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention as of `core_attention.Attention`, without dropout and without a mask besides the causal one.

    otherwise  computes the same from query, key and value; called where cuDNN cannot or fails. It lives as long as the
               graph, so it must refer to no activation.
    """
    if not can_compute(query, key, value, causal=causal):
        return otherwise(query, key, value)
    return _Attention.apply(query, key, value, causal, scale, otherwise)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """The two operations that torch's own scaled_dot_product_attention would call.

    Whether cuDNN fails or not, the same tensors are saved: a layer that is recomputed after a failure of another one
    must save those of its forward.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, otherwise: Any
    ) -> Tensor:
        trains = any(ctx.needs_input_grad)
        out = lse = query.new_empty(0)
        ctx.found = None
        if not _has_failed:
            try:
                options = (None, trains, 0.0, causal, False)
                found = ops._scaled_dot_product_cudnn_attention(query, key, value, *options, scale=scale)
                out, lse, *ends, seed, offset, _ = found
                ctx.found = lse.shape, seed, offset, ends
            except RuntimeError as error:
                _give_up(error, "forward")
        if ctx.found is None:
            out, lse = otherwise(query, key, value), query.new_empty(query.shape[:3], dtype=torch.float32)
        if trains:
            ctx.save_for_backward(query, key, value, out, lse.reshape(query.shape[:3]))
            ctx.options = causal, scale, otherwise
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        causal, scale, otherwise = ctx.options
        if ctx.found is not None and not _has_failed:
            shape, seed, offset, ends = ctx.found
            tensors = (grad, query, key, value, out, lse.reshape(shape), seed, offset, None)
            try:
                backward = ops._scaled_dot_product_cudnn_attention_backward
                return *backward(*tensors, *ends, 0.0, causal, scale=scale), None, None, None
            except RuntimeError as error:
                _give_up(error, "backward")
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            grads = torch.autograd.grad(otherwise(*leaves), leaves, grad)
        return *grads, None, None, None


def _give_up(error: RuntimeError, where: str) -> None:
    """Note and print that cuDNN failed. Raises the error again if it is not cuDNN's own."""
    global _has_failed
    if isinstance(error, torch.OutOfMemoryError) or "cudnn" not in str(error).lower():
        raise error
    if not _has_failed:
        reason = str(error).splitlines()[0]
        line = f"attention: cuDNN failed in {where} ({reason}); torch's other kernels compute it from now on"
        print(visible(line), flush=True)
    _has_failed = True
