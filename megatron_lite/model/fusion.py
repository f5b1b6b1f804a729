"""Elementwise chains between matrix products: bias + activation, and bias + dropout + residual add.

Eager operations each read and write an activation. `model.fusion` replaces them: on a GPU by the Triton kernels of
`fused.py`, on the CPU by chains that torch compiles. The results are equal, except that in bf16 and fp16 a chain
rounds once and every eager operation rounds.
"""

import os
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.model.functions import Gated


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), CodeGeeX's `fast_gelu`, as a scaled silu, which saves a pass."""
    return F.silu(1.702 * x) * (1 / 1.702)


gelu_tanh = partial(F.gelu, approximate="tanh")  # GPT-2's
gelu_tanh_backward = partial(torch.ops.aten.gelu_backward, approximate="tanh")


def _gated(x: Tensor, activation: Callable[..., Tensor], derivative: Callable[..., Tensor]) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler chooses itself what to compute again
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up
    return Gated.apply(x, activation, derivative)  # type: ignore[return-value]


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of a fused `[..., 2f/tp]`; returns `[..., f/tp]`. Source: Shazeer, arXiv 2002.05202."""
    return _gated(x, F.silu, torch.ops.aten.silu_backward)


def geglu(x: Tensor) -> Tensor:
    """gelu_tanh(gate) * up of a fused `[..., 2f/tp]`; returns `[..., f/tp]`. Source: as `swiglu`."""
    return _gated(x, gelu_tanh, gelu_tanh_backward)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,  # of the original transformer
    "swiglu": swiglu,
    "geglu": geglu,
}


def bias_activation(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(x + bias); x `[s, b, f/tp]` (`2f/tp` with a gate), bias of its last dimension or None."""
    return ACTIVATIONS[activation](x if bias is None else x + bias)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float) -> Tensor:
    """residual + dropout(x + bias), `[s, b, h]`, in the wider dtype of x and residual."""
    if bias is not None:
        x = x + bias
    if dropout > 0:
        x = F.dropout(x, dropout)
    return residual + x


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as one kernel, compiled at its first call."""
    # With torch's random numbers fusion does not change the dropped units.
    return torch.compile(function, fullgraph=True, options={"fallback_random": True})


Fusion = Literal["off", "compiled", "triton"]


def fusion_kind(setting: str, device: torch.device, dtype: torch.dtype) -> Fusion:
    """What `model.fusion` does on this device; with `on` the meta device stands for a GPU.

    `auto` is off on the CPU, where matrix products dominate and compilation takes longer than it saves, and on a GPU
    without Triton. The kernels compute in fp32, so they are off in fp64.
    """
    if setting == "off" or dtype == torch.float64:
        return "off"
    if setting == "auto":
        return "triton" if device.type == "cuda" and find_spec("triton") is not None else "off"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "compiled" if device.type == "cpu" and not interpreted else "triton"
