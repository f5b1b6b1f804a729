"""The rates of this machine's CPUs, measured by as many ranks at once as a run would have.

Ranks share the memory, the clock and often the cores, so a rate is that of a rank while all others measure too.
Products, attention and additions are timed in several sizes; collectives by Gloo in two, for latency and rate. What
these do not show is the time that Python and torch need for an operation. It follows from real training steps of a
small model: it is what their kernels' predictions leave over, for each kernel.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

SIDES = (64, 256, 512, 1024)  # of square products
REPEATS, REPEAT_SECONDS = 5, 0.03
LARGE, SMALL = 2**24, 2**14  # elements of an addition: beyond all caches, and within them
MESSAGES = (2**12, 2**23)  # bytes of collectives


def measured_rates(dtype_name: str) -> dict[str, Any]:
    """The rates of this rank in a dtype. Collective over the world, if there is one."""
    dtype = getattr(torch, dtype_name)
    rates: dict[str, Any] = {
        "products": {str(side): _product_rate(side, dtype) for side in SIDES},
        "attention": _attention_rates(dtype),
        "memory": _addition_rate(LARGE, dtype),
        "cache": _addition_rate(SMALL, dtype),
    }
    if dist.is_initialized() and dist.get_world_size() > 1:
        rates["collectives"] = {str(size): _all_reduce_seconds(size) for size in MESSAGES}
    return rates


def _seconds(work: Callable[[], object]) -> float:
    """The median time of a call, of some repeats that begin together on all ranks.

    A repeat is longer than the time slices of the system: more ranks than cores take turns.
    """
    work()
    start = time.perf_counter()
    work()
    times = max(1, round(REPEAT_SECONDS / (time.perf_counter() - start)))
    if dist.is_initialized():  # a collective needs as many calls on every rank
        agreed = torch.tensor(times)
        dist.broadcast(agreed, src=0)
        times = int(agreed)
    found = []
    for _ in range(REPEATS):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - start) / times)
    return sorted(found)[len(found) // 2]


def _product_rate(side: int, dtype: torch.dtype) -> float:
    a = torch.randn(side, side).to(dtype)
    return 2 * side**3 / _seconds(lambda: a @ a)


def _addition_rate(numel: int, dtype: torch.dtype) -> float:
    a, b = (torch.ones(numel, dtype=dtype) for _ in range(2))
    return 3 * numel * dtype.itemsize / _seconds(lambda: torch.add(a, b, out=a))


def _attention_rates(dtype: torch.dtype) -> list[float]:
    """FLOP/s of causal attention, forward and backward."""
    batch, heads, length, size = 2, 8, 256, 64
    query, key, value = (torch.randn(batch, heads, length, size).to(dtype).requires_grad_() for _ in range(3))
    products = 2 * query.numel() * length / 2

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        forward().sum().backward()

    one, two = _seconds(forward), _seconds(both)
    return [2 * products / one, 5 * products / max(two - one, 1e-9)]


def _all_reduce_seconds(size: int) -> float:
    x = torch.zeros(size // 4)
    return _seconds(lambda: dist.all_reduce(x))
