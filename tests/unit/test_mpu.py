"""Megatron's parallel_state functions read the parallel context."""

import pytest
import torch

from megatron_lite import mpu
from megatron_lite.errors import MegatronLiteError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid


@pytest.fixture
def at_rank():
    """Register the context of rank 5 in Megatron's example of 16 ranks."""
    mpu.register(ParallelContext.at(Grid(tp=2, dp=2, pp=4), 5))
    yield
    mpu.unregister()


def test_each_function_is_an_error_before_initialization():
    names = [name for name in vars(mpu) if name.startswith(("get_", "is_")) and callable(getattr(mpu, name))]
    assert len(names) > 25
    for name in names:
        with pytest.raises(MegatronLiteError, match=r"call initialize_megatron\(config\) first"):
            getattr(mpu, name)()
    assert not mpu.model_parallel_is_initialized()


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "get_tensor_model_parallel_world_size": 2,
        "get_tensor_model_parallel_rank": 1,
        "get_tensor_model_parallel_src_rank": 4,
        "get_data_parallel_world_size": 2,
        "get_data_parallel_rank": 0,
        "get_data_parallel_src_rank": 5,
        "get_context_parallel_world_size": 1,
        "get_context_parallel_rank": 0,
        "get_pipeline_model_parallel_world_size": 4,
        "get_pipeline_model_parallel_rank": 1,
        "get_pipeline_model_parallel_first_rank": 1,
        "get_pipeline_model_parallel_last_rank": 13,
        "get_pipeline_model_parallel_next_rank": 9,
        "get_pipeline_model_parallel_prev_rank": 1,
        "get_model_parallel_world_size": 8,
        "get_model_parallel_rank": 3,
        "is_pipeline_first_stage": False,
        "is_pipeline_last_stage": False,
        "is_rank_in_embedding_group": False,
        "is_rank_in_position_embedding_group": False,
        "model_parallel_is_initialized": True,
    }.items(),
)
def test_functions_at_rank_five_of_sixteen(at_rank, name, value):
    assert getattr(mpu, name)() == value


def test_the_data_parallel_group_can_include_context_parallel_ranks():
    """Code that averages a value over all tokens of a batch needs both."""
    mpu.register(ParallelContext.at(Grid(tp=2, cp=2, dp=2), 6))  # tp 0, cp 1, dp 1
    sizes = [mpu.get_data_parallel_world_size(with_context_parallel=with_cp) for with_cp in (False, True)]
    ranks = [mpu.get_data_parallel_rank(with_context_parallel=with_cp) for with_cp in (False, True)]
    mpu.unregister()
    assert sizes == [2, 4] and ranks == [1, 3]


@pytest.mark.parametrize(("rank", "previous", "following"), [(1, 13, 5), (13, 9, 1)])
def test_previous_and_next_pipeline_ranks_form_a_ring(rank, previous, following):
    mpu.register(ParallelContext.at(Grid(tp=2, dp=2, pp=4), rank))
    assert mpu.get_pipeline_model_parallel_prev_rank() == previous
    assert mpu.get_pipeline_model_parallel_next_rank() == following
    assert mpu.is_rank_in_embedding_group()
    assert mpu.is_rank_in_position_embedding_group() == mpu.is_pipeline_first_stage() == (rank == 1)
    mpu.unregister()


def test_a_group_without_this_rank_is_an_error(at_rank):
    with pytest.raises(MegatronLiteError, match=r"rank 5 is not in a group 'embd'; check is_rank_in_embedding_group"):
        mpu.get_embedding_group()


def test_a_process_group_without_torch_distributed_is_an_error():
    mpu.register(ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=1))
    with pytest.raises(MegatronLiteError, match=r"group 'tp' has one rank, and torch\.distributed is not initialized"):
        mpu.get_tensor_model_parallel_group()
    mpu.unregister()
