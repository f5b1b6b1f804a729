"""Profiles of devices for the roofline: how fast products, attention and memory really are.

The rates are sustained ones, not those of data sheets. For the H100 they are a bf16 product of large matrices on a
power-limited SXM card (640 of 989 TFLOP/s), memory at 2.7 of 3.35 TB/s, and FlashAttention 2 with a causal mask.
cuDNN's and FlashAttention 3's kernels are about 1.7 times as fast there (forward alone 631 and 329 TFLOP/s in
https://github.com/pytorch/pytorch/issues/142132). Other GPUs are assumed to reach the same shares of their data
sheets, so their predictions are rougher. On the A100 these shares give the ten iteration times of Narayanan et al.
within 6% (`published.py`), so no rate is fitted to it. The CPU is measured.
"""

import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_lite.errors import ConfigError
from megatron_lite.training.throughput import measured_peak_tflops

# Of the dense peak in bf16 and of the memory bandwidth in data sheets.
PRODUCT_SHARE, MEMORY_SHARE = 640 / 989, 2.7 / 3.35
ATTENTION_SHARES = {"flash2": (300 / 989, 230 / 989), "cudnn": (520 / 989, 400 / 989)}
# Attention that stores its scores, as before FlashAttention: bytes of 16-bit kernels for each score. Forward: a product
# writes it, softmax (with scale and mask) and dropout read and write it, dropout with a mask of a byte, and a product
# reads it. Backward: a product writes the gradient, dropout and softmax read and write it, softmax with its result, two
# products read it, and one reads the result of dropout.
STORED_SCORES = (2 + 4 + 5 + 2, 2 + 5 + 6 + 4 + 2)
ATTENTIONS = (*ATTENTION_SHARES, "stored")


@dataclass(frozen=True)
class Device:
    """The rates of one device, in FLOP/s and bytes/s; `kernel_seconds` is the least time of a kernel."""

    name: str
    peak: float  # dense, of the data sheet
    product: float
    attention_forward: float
    attention_backward: float
    memory: float
    memory_bytes: float  # its size
    link: float  # to each direction, between devices of a machine
    network: float  # to each direction, between machines, for each device
    kernel_seconds: float = 3e-6
    link_latency: float = 5e-6
    network_latency: float = 1e-5
    reserved_bytes: float = 1e9  # of the CUDA context, NCCL's buffers and cuBLAS's workspace
    # Of attention that stores its scores, forward and backward; (0, 0): a fused kernel.
    score_bytes: tuple[int, int] = field(default=(0, 0), kw_only=True)


# Dense TFLOP/s in bf16 (fp16 for the V100) and in fp32 without TF32, memory in TB/s and GB, links of a machine in GB/s
# for each direction; from NVIDIA's and AMD's data sheets. The last number is the network in GB/s for each device, of a
# usual machine: 400 Gb/s (H100, H200, B200, MI300X), 200 (A100), 50 (V100 in a DGX-2), 100 (L40S), 10 (4090).
DATA_SHEETS = {
    "h100": (989, 67, 3.35, 80, 450, 50),
    "h200": (989, 67, 4.8, 141, 450, 50),
    "b200": (2250, 80, 8.0, 180, 900, 50),
    "mi300x": (1307, 163, 5.3, 192, 448, 50),
    "a100": (312, 19.5, 2.04, 80, 300, 25),
    "l40s": (362, 91.6, 0.864, 48, 32, 12.5),
    "4090": (165, 82.6, 1.008, 24, 32, 1.25),
    "v100": (125, 15.7, 0.9, 32, 150, 6.25),
}
LINK_SHARE = 0.8  # of the data sheet, that NCCL is assumed to reach with large tensors
NAMES = (*DATA_SHEETS, "cpu")


def device_of(name: str, *, attention: str = "cudnn", dtype: torch.dtype = torch.bfloat16) -> Device:
    """The profile of a device in a dtype. `attention` is one of ATTENTIONS.

    Raises ConfigError for unknown names, and for fp64 on a GPU.
    """
    if name not in NAMES:
        raise ConfigError(f"--device {name} is unknown; use {', '.join(NAMES[:-1])} or cpu")
    if attention not in ATTENTIONS:
        raise ConfigError(f"--attention {attention} is unknown; use {', '.join(ATTENTION_SHARES)} or stored")
    if name == "cpu":
        return measured_cpu(dtype)
    if dtype == torch.float64:
        raise ConfigError(
            f"--device {name} has no profile for train.precision fp64; use bf16, fp16, fp32 or --device cpu"
        )
    sixteen_bit, fp32, terabytes, gigabytes, link, network = DATA_SHEETS[name]
    forward, backward = ATTENTION_SHARES.get(attention, (PRODUCT_SHARE, PRODUCT_SHARE))
    peak = (fp32 if dtype == torch.float32 else sixteen_bit) * 1e12
    of_attention: dict[str, Any] = {"attention_forward": peak * forward, "attention_backward": peak * backward}
    memory = terabytes * 1e12 * MEMORY_SHARE
    links: dict[str, Any] = {"link": link * 1e9 * LINK_SHARE, "network": network * 1e9 * LINK_SHARE}
    size: dict[str, Any] = {"memory": memory, "memory_bytes": gigabytes * 1e9}
    found = Device(name, peak, peak * PRODUCT_SHARE, **of_attention, **size, **links)
    return replace(found, score_bytes=STORED_SCORES) if attention == "stored" else found


def shared(device: Device, ranks: int) -> Device:
    """The share of a CPU that each of so many ranks has; its rates are those of one process with all its threads."""
    crowd = max(1.0, ranks * torch.get_num_threads() / (os.cpu_count() or 1))
    names = "peak", "product", "attention_forward", "attention_backward", "memory"
    rates = {name: getattr(device, name) / crowd for name in names}
    return replace(device, **rates, memory_bytes=device.memory_bytes / ranks)


def measured_cpu(dtype: torch.dtype) -> Device:
    """This machine's CPU: a matrix product, and a sum of two tensors that no cache holds. Takes a second."""
    product = measured_peak_tflops(dtype) * 1e12
    a, b = torch.ones(2**25), torch.ones(2**25)
    fastest = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        torch.add(a, b, out=a)
        fastest = min(fastest, time.perf_counter() - start)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = 3 * a.numel() * a.element_size() / fastest
    links: dict[str, Any] = {"link": 1e9, "network": 1e8}  # Gloo over loopback, and an Ethernet of 1 Gb/s
    rates = (product, product, product / 2, product / 2, memory, pages)
    return Device("cpu", *rates, **links, kernel_seconds=5e-6, reserved_bytes=0)


def faster_precision() -> str:
    """bf16 where this machine computes faster in it than in fp32, else fp32."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if measured_peak_tflops(torch.bfloat16) > measured_peak_tflops(torch.float32) else "fp32"
