"""The peak of a device, for its utilisation (MFU), and memory.

The peak of a GPU is the dense figure of its data sheet; the sparse one is twice as large. The peak of a CPU is measured
once, with a large matrix product.
"""

import re
import resource
import sys
import time

import torch

# Dense TFLOP/s in bf16 and fp16, by a word of torch's device name; from NVIDIA's data sheets. More words come first.
DENSE_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 4090": 165.0,
}
FP32_SHARE = {"GH200": 67 / 989, "H200": 67 / 989, "H100": 67 / 989, "H800": 67 / 989, "A100": 19.5 / 312}


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The peak of one device in this dtype, TFLOP/s; 0 where it is unknown."""
    if device.type == "cpu":
        return measured_peak_tflops(dtype)
    known = known_gpu(torch.cuda.get_device_name(device))
    if dtype == torch.float64:
        return 0.0
    share = FP32_SHARE.get(known, 0.0) if dtype == torch.float32 else 1.0
    return DENSE_PEAK_TFLOPS.get(known, 0.0) * share


def known_gpu(name: str) -> str:
    """The key of DENSE_PEAK_TFLOPS for a device name; empty where it is unknown."""
    return next((key for key in DENSE_PEAK_TFLOPS if re.search(rf"\b{key}\b", name)), "")


def measured_peak_tflops(dtype: torch.dtype, size: int = 1024) -> float:
    """TFLOP/s of the fastest of a few square matrix products on the CPU."""
    if dtype == torch.float16:
        size = 256  # slow on most CPUs
    a = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12


def peak_memory_gb(device: torch.device) -> float:
    """The peak memory of this rank, GB: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
