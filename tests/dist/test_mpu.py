"""Process groups from mpu go straight into torch.distributed, groups of one included."""

import torch
import torch.distributed as dist

from megatron_lite import mpu
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid


def sums_as_a_ported_script_takes_them():
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


def test_groups_sum_over_their_members_and_a_group_of_one_over_itself(ranks):
    """None for a group of one would sum over the whole world."""
    for rank, (got, embedding) in enumerate(ranks(4, sums_as_a_ported_script_takes_them)):
        tensor = 3 if rank < 2 else 12
        data = 5 if rank % 2 == 0 else 10
        assert got == [(tensor, 2), (data, 2), (tensor, 2), (2**rank, 1), (2**rank, 1)]
        assert embedding == 1
