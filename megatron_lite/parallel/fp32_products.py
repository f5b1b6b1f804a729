"""fp32 products by oneDNN on AMD CPUs. torch takes MKL for them, which is up to a tenth slower there, and oneDNN for
bf16."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SMALLEST = 2**24  # multiplications; oneDNN compiles a kernel for each shape


def can_compute(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` is for these tensors and this machine."""
    is_fp32 = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return is_fp32 and x.numel() * weight.shape[0] >= SMALLEST and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Whether this CPU is one of AMD's with AVX512."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    path = Path("/proc/cpuinfo")
    return path.exists() and "AuthenticAMD" in path.read_text()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As F.linear, without a graph."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
