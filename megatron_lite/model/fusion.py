"""Elementwise chains that are worth one kernel: bias + activation, and bias + dropout + residual add.

Eager, each operation reads and writes a whole activation; compiled, the chain does so once. Where the chain is
compiled the linear layer hands its bias over instead of adding it. Both ways compute the same numbers; in bf16 and
fp16 a compiled chain rounds once at its end, where each eager operation rounds.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), CodeGeeX's `fast_gelu`; one pass fewer than written out, as a scaled silu."""
    return F.silu(1.702 * x) * (1 / 1.702)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of a fused `[..., 2f/tp]`; returns `[..., f/tp]`. Source: Shazeer, arXiv 2002.05202."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of gelu, GPT-2's."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "swiglu": swiglu,
}


def bias_activation(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(x + bias); x `[s, b, f/tp]` (`2f/tp` for swiglu), bias of its last dimension or already added."""
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
    """The function as one kernel; compiled at its first call, once for the whole process."""
    # With torch's own random numbers inside, the same units are dropped with and without fusion.
    return torch.compile(function, options={"fallback_random": True})


def fusion_on(setting: str, device: torch.device) -> bool:
    """Whether `model.fusion` asks for compiled chains on this device.

    `auto` is off on the CPU: its kernels are bound by the matrix products, and compiling takes longer than it saves.
    """
    return setting == "on" or (setting == "auto" and device.type == "cuda")
