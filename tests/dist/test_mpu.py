"""Process groups from mpu can be passed to torch.distributed, also groups of one rank."""

import torch
import torch.distributed as dist

from megatron_lite import mpu
from megatron_lite.mpu import groups
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid


def sums_over_mpu_groups():
    groups.register(ParallelContext.create(Grid(tp=2, dp=2), torch.device("cpu"), timeout_seconds=30))
    got = []
    for get_group in (
        mpu.get_tensor_model_parallel_group,
        mpu.get_data_parallel_group,
        mpu.get_model_parallel_group,
        mpu.get_context_parallel_group,
        mpu.get_pipeline_model_parallel_group,
    ):
        group = get_group()
        total = torch.tensor([2 ** dist.get_rank()])
        dist.all_reduce(total, group=group)
        got.append((total.item(), dist.get_world_size(group)))
    total = torch.tensor([1])
    dist.all_reduce(total, group=mpu.get_embedding_group())
    dist.all_reduce(total, group=mpu.get_position_embedding_group())
    groups.unregister()
    return got, total.item()


def test_an_all_reduce_over_an_mpu_group_sums_over_its_members(ranks):
    """If mpu returned None for a group of one, torch would sum over all ranks."""
    for rank, (got, embedding) in enumerate(ranks(4, sums_over_mpu_groups)):
        tensor = 3 if rank < 2 else 12
        data = 5 if rank % 2 == 0 else 10
        assert got == [(tensor, 2), (data, 2), (tensor, 2), (2**rank, 1), (2**rank, 1)]
        assert embedding == 1


def rooted_collectives() -> dict[str, list[float]]:
    """The results of each collective over pairs of ranks, {0, 1} and {2, 3}; a rank's value is its global rank."""
    mpu.destroy_model_parallel()  # of an earlier test in this process
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    rank, at = torch.tensor([float(dist.get_rank())]), mpu.get_tensor_model_parallel_rank()
    got = {
        "broadcast": mpu.broadcast(rank.clone(), src=1, group="tp"),
        "all_reduce": mpu.all_reduce(rank.clone(), group="tp"),
        "all_gather": mpu.all_gather(rank, group="tp"),
        "reduce_scatter": mpu.reduce_scatter(torch.cat([rank, 10 * rank]), group="tp"),
        "all_to_all": mpu.all_to_all(torch.cat([rank, 10 * rank]), group="tp"),
        "reduce": mpu.reduce(rank.clone(), dst=1, group="tp"),
        "gather": torch.cat([*mpu.gather(rank, dst=1, group="tp"), torch.tensor([])]),
        "scatter": mpu.scatter([rank, 10 * rank] if at == 0 else None, torch.zeros(1), src=0, group="tp"),
    }
    mpu.barrier(group="world")
    if at == 0:
        mpu.send(10 * rank, dst=1, group="tp")
    got["received"] = mpu.recv(torch.zeros(1), src=0, group="tp") if at == 1 else torch.zeros(0)
    mpu.destroy_model_parallel()
    return {name: value.tolist() for name, value in got.items()}


def test_collectives_take_the_rank_in_the_group(ranks):
    """A global rank as root would hang or read another pair's tensor."""
    *_, third, fourth = ranks(4, rooted_collectives)
    both = {"broadcast": [3.0], "all_reduce": [5.0], "all_gather": [2.0, 3.0]}
    assert third == both | {
        "reduce_scatter": [5.0],
        "all_to_all": [2.0, 3.0],
        "reduce": [2.0],
        "gather": [],
        "scatter": [2.0],
        "received": [],
    }
    assert fourth == both | {
        "reduce_scatter": [50.0],
        "all_to_all": [20.0, 30.0],
        "reduce": [5.0],
        "gather": [2.0, 3.0],
        "scatter": [20.0],
        "received": [20.0],
    }
