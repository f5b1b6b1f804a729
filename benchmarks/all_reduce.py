"""Our all-reduces of messages against torch's, interleaved in one run of Gloo on this machine.

`python benchmarks/all_reduce.py` prints the median of 30 rounds for 2 and 4 ranks, and the ratios to torch's.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megatron_lite.engines.moves import ALGORITHMS
from megatron_lite.engines.ring import sum_in_steps
from megatron_lite.parallel.context import Group

SIZES = (25_000, 250_000, 4_000_000)  # fp32 values: 0.1, 1 and 16 MB
ROUNDS, WARM_UP = 30, 3


def measure(rank: int, num_ranks: int, store: str) -> None:
    """Print a line for each size on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    group = Group("world", tuple(range(num_ranks)), rank, dist.group.WORLD)
    ways: dict[str, Callable[[Tensor], object]] = {"torch": dist.all_reduce}
    for name, steps_of in ALGORITHMS.items():
        ways[name.partition("_")[0]] = partial(sum_in_steps, steps=steps_of(num_ranks), group=group)
    for size in SIZES:
        x, seconds = torch.zeros(size), {name: [] for name in ways}
        for number in range(ROUNDS + WARM_UP):
            for name, way in ways.items():
                dist.barrier()
                started = time.perf_counter()
                way(x)
                if number >= WARM_UP:
                    seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        shown = " | ".join(f"{1e3 * medians[name]:.2f} ({medians[name] / medians['torch']:.2f})" for name in ways)
        if rank == 0:
            print(f"| {num_ranks} | {size * 4 / 1e6:.1f} | {shown} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    print("| ranks | MB | torch, ms | ring, ms (ratio) | tree, ms (ratio) |\n|--:|--:|--:|--:|--:|")
    for num_ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (num_ranks, os.path.join(folder, "store")), nprocs=num_ranks)


if __name__ == "__main__":
    main()
