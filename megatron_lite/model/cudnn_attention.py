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

from megatron_lite.errors import TrainingError

ops = torch.ops.aten
_has_failed = False


def can_compute(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, causal: bool) -> bool:
    """Whether to call cuDNN: torch's rules allow it, nothing asks for determinism, and it has not failed."""
    if _has_failed or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.are_deterministic_algorithms_enabled():  # its backward adds in any order
        return False
    grouped = key.shape[1] != query.shape[1]
    return can_use_cudnn_attention(SDPAParams(query, key, value, None, dropout, causal, grouped))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    causal: bool,
    scale: float,
    otherwise: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention as of `core_attention.Attention`, without a mask besides the causal one.

    otherwise  computes the same from query, key and value; called where cuDNN cannot or fails
    """
    if not can_compute(query, key, value, dropout=dropout, causal=causal):
        return otherwise(query, key, value)
    try:
        return _Attention.apply(query, key, value, dropout, causal, scale, otherwise)  # type: ignore[return-value]
    except RuntimeError as error:
        _give_up(error, "forward")
    return otherwise(query, key, value)


class _Attention(torch.autograd.Function):
    """The two operations that torch's own scaled_dot_product_attention would call."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float, otherwise: Any
    ) -> Tensor:
        with_lse = any(ctx.needs_input_grad)
        options = (None, with_lse, dropout, causal, False)
        found = ops._scaled_dot_product_cudnn_attention(query, key, value, *options, scale=scale)
        out, lse, *ends, seed, offset, _ = found
        ctx.save_for_backward(query, key, value, out, lse, seed, offset)
        ctx.ends, ctx.options, ctx.otherwise = ends, (dropout, causal, scale), otherwise
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse, seed, offset = ctx.saved_tensors
        dropout, causal, scale = ctx.options
        tensors = (grad, query, key, value, out, lse, seed, offset, None)
        try:
            backward = ops._scaled_dot_product_cudnn_attention_backward
            grads = backward(*tensors, *ctx.ends, dropout, causal, scale=scale)
        except RuntimeError as error:
            _give_up(error, "backward")
            if dropout:
                raise TrainingError(
                    f"cuDNN's attention failed in backward ({error}), and no other kernel can repeat its dropout; set "
                    "model.attention_dropout: 0, or train.deterministic: true, which leaves cuDNN out"
                ) from error
            leaves = [x.detach().requires_grad_() for x in (query, key, value)]
            with torch.enable_grad():
                grads = torch.autograd.grad(ctx.otherwise(*leaves), leaves, grad)
        return *grads, None, None, None, None


def _give_up(error: RuntimeError, where: str) -> None:
    """Note and print that cuDNN failed. Raises the error again if it is not cuDNN's own."""
    global _has_failed
    if isinstance(error, torch.OutOfMemoryError) or "cudnn" not in str(error).lower():
        raise error
    if not _has_failed:
        reason = str(error).splitlines()[0]
        print(
            f" > attention: cuDNN failed in {where} ({reason}); torch's other kernels compute it from now on",
            flush=True,
        )
    _has_failed = True
