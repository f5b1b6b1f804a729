"""Process groups from mpu can be passed to torch.distributed, also groups of one rank."""

import torch
import torch.distributed as dist

from megatron_lite import mpu
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid


def sums_over_mpu_groups():
    mpu.register(ParallelContext.create(Grid(tp=2, dp=2), torch.device("cpu"), timeout_seconds=30))
    got = []
    for name in ("tensor_model", "data", "model", "context", "pipeline_model"):
        group = getattr(mpu, f"get_{name}_parallel_group" if name != "model" else "get_model_parallel_group")()
        total = torch.tensor([2 ** dist.get_rank()])
        dist.all_reduce(total, group=group)
        got.append((total.item(), dist.get_world_size(group)))
    total = torch.tensor([1])
    dist.all_reduce(total, group=mpu.get_embedding_group())
    dist.all_reduce(total, group=mpu.get_position_embedding_group())
    mpu.unregister()
    return got, total.item()


def test_an_all_reduce_over_an_mpu_group_sums_over_its_members(ranks):
    """If mpu returned None for a group of one, torch would sum over all ranks."""
    for rank, (got, embedding) in enumerate(ranks(4, sums_over_mpu_groups)):
        tensor = 3 if rank < 2 else 12
        data = 5 if rank % 2 == 0 else 10
        assert got == [(tensor, 2), (data, 2), (tensor, 2), (2**rank, 1), (2**rank, 1)]
        assert embedding == 1
