"""The line about the memory of the training state: counted from live tensors, and expected by arithmetic."""

from math import prod

import torch

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.plan.sizes import state_bytes
from megatron_lite.training.run import Run


def num_local_parameters(run: Run) -> int:
    """The parameters of this rank's tensor-parallel shard, before sharding over data-parallel ranks."""
    return sum(prod(meta.shard.local_shape(meta.shape, run.ctx.tp.size)) for meta in run.table.values())


def memory_line(run: Run) -> str:
    """The bytes of parameters, gradients and optimizer on this rank after a step, and on the rank with the most.

    Communicates: one number over the world.
    """
    counts = run.optimizer.bytes_held()
    buckets = counts.pop("buckets", 0)
    count = num_local_parameters(run)
    total = sum(counts.values())
    most = all_reduce(
        torch.tensor(float(total + buckets), dtype=torch.float64, device=run.ctx.device), run.ctx.world, "max"
    )
    place = run.config.deepspeed.offload_optimizer if run.config.parallel.ddp == "deepspeed" else "none"
    bytes_each = sum(state_bytes(run.config, run.ctx.dp_cp.size).values())
    # DeepSpeed keeps more copies of offloaded gradients and weights than the formula has.
    expected = f", {bytes_each:.2f} expected" if place == "none" else ""
    parts = ", ".join(f"{what} {size / 1e6:,.1f} MB" for what, size in counts.items() if size)
    beside = f", and buckets {buckets / 1e6:,.1f} MB" if buckets else ""
    return (
        f"memory of rank {run.ctx.rank}: {parts}; {total / count:.2f} bytes for each of its {count:,} "
        f"parameters{expected}{beside}; at most {most.item() / 1e6:,.1f} MB on a rank"
    )
