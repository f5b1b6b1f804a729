"""Megatron's parallel_state functions read the parallel context."""

import pytest
import torch

from megatron_lite import mpu
from megatron_lite.errors import MegatronLiteError
from megatron_lite.mpu import groups
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid


@pytest.fixture
def at_rank():
    """Register the context of rank 5 in Megatron's example of 16 ranks."""
    groups.register(ParallelContext.at(Grid(tp=2, dp=2, pp=4), 5))
    yield
    groups.unregister()


def test_each_function_is_an_error_before_initialization():
    mpu.destroy_model_parallel()  # of an earlier test
    names = [name for name in mpu.__all__ if name.startswith(("get_", "is_"))]
    assert len(names) > 28
    for name in names:
        with pytest.raises(
            MegatronLiteError, match=r"call initialize_megatron\(config\) or mpu.initialize_model_parallel\(\)"
        ):
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
    groups.register(ParallelContext.at(Grid(tp=2, cp=2, dp=2), 6))  # tp 0, cp 1, dp 1
    sizes = [mpu.get_data_parallel_world_size(with_context_parallel=with_cp) for with_cp in (False, True)]
    ranks = [mpu.get_data_parallel_rank(with_context_parallel=with_cp) for with_cp in (False, True)]
    groups.unregister()
    assert sizes == [2, 4] and ranks == [1, 3]


@pytest.mark.parametrize(("rank", "previous", "following"), [(1, 13, 5), (13, 9, 1)])
def test_previous_and_next_pipeline_ranks_form_a_ring(rank, previous, following):
    groups.register(ParallelContext.at(Grid(tp=2, dp=2, pp=4), rank))
    assert mpu.get_pipeline_model_parallel_prev_rank() == previous
    assert mpu.get_pipeline_model_parallel_next_rank() == following
    assert mpu.is_rank_in_embedding_group()
    assert mpu.is_rank_in_position_embedding_group() == mpu.is_pipeline_first_stage() == (rank == 1)
    groups.unregister()


def test_a_group_without_this_rank_is_an_error(at_rank):
    with pytest.raises(MegatronLiteError, match=r"rank 5 is not in a group 'embd'; check is_rank_in_embedding_group"):
        mpu.get_embedding_group()


def test_a_process_group_without_torch_distributed_is_an_error():
    groups.register(ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=1))
    with pytest.raises(MegatronLiteError, match=r"group 'tp' has one rank, and torch\.distributed is not initialized"):
        mpu.get_tensor_model_parallel_group()
    groups.unregister()


@pytest.mark.parametrize(
    ("rank", "is_first", "is_last"), [(0, [True, False], [False] * 2), (3, [False] * 2, [False, True])]
)
def test_a_stage_is_first_or_last_by_its_chunk_too(rank, is_first, is_last):
    """An interleaved model would have two embeddings if every chunk of the first rank were the first stage."""
    groups.register(ParallelContext.at(Grid(pp=4), rank), num_chunks=2)
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2
    for chunk in (0, 1):
        mpu.set_virtual_pipeline_model_parallel_rank(chunk)
        assert mpu.get_virtual_pipeline_model_parallel_rank() == chunk
        assert mpu.is_pipeline_first_stage() == is_first[chunk]
        assert mpu.is_pipeline_last_stage() == is_last[chunk]
        assert mpu.is_pipeline_first_stage(ignore_virtual=True) == (rank == 0)
        assert mpu.is_pipeline_last_stage(ignore_virtual=True) == (rank == 3)
    with pytest.raises(
        MegatronLiteError, match=r"the virtual pipeline rank is 2, and a pipeline rank has 2 chunks; use 0..1"
    ):
        mpu.set_virtual_pipeline_model_parallel_rank(2)
    groups.unregister()


def test_without_an_interleaved_schedule_there_is_no_virtual_rank(at_rank):
    """Megatron's code compares it with None."""
    assert mpu.get_virtual_pipeline_model_parallel_world_size() is None
    assert mpu.get_virtual_pipeline_model_parallel_rank() is None


@pytest.fixture
def one_rank():
    """The groups of this process alone."""
    mpu.destroy_model_parallel()  # of an earlier test
    mpu.initialize_model_parallel()
    yield
    mpu.destroy_model_parallel()


def test_model_parallelism_is_initialized_once(one_rank):
    assert mpu.model_parallel_is_initialized()
    assert mpu.get_tensor_model_parallel_world_size() == mpu.get_pipeline_model_parallel_world_size() == 1
    with pytest.raises(MegatronLiteError, match=r"already initialized; call mpu.destroy_model_parallel\(\) first"):
        mpu.initialize_model_parallel()
    mpu.destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized()
    with pytest.raises(
        MegatronLiteError, match=r"tensor size 2 x pipeline size 3 x context size 1 does not divide the "
    ):
        mpu.initialize_model_parallel(2, 3)
    mpu.initialize_model_parallel()


def test_sizes_that_do_not_divide_are_errors(one_rank):
    assert mpu.divide(12, 4) == 3
    for call in (lambda: mpu.divide(7, 2), lambda: mpu.ensure_divisibility(7, 2)):
        with pytest.raises(MegatronLiteError, match="7 is not divisible by 2; choose sizes that divide over the ranks"):
            call()
    with pytest.raises(MegatronLiteError, match="6 is not divisible by 4"):
        mpu.split_tensor_along_last_dim(torch.zeros(2, 6), 4)
    with pytest.raises(MegatronLiteError, match="9 is not divisible by 2"):
        mpu.VocabUtility.vocab_range_from_global_vocab_size(9, 0, 2)
    with pytest.raises(MegatronLiteError, match="6 is not divisible by 4"):
        mpu.ColumnParallelLinear(4, 6, stride=4, gather_output=False)


def test_slices_of_the_last_dim_and_of_the_vocabulary():
    x = torch.arange(12.0).view(2, 6)
    views = mpu.split_tensor_along_last_dim(x, 3)
    copies = mpu.split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True)
    assert (
        [part.tolist() for part in views]
        == [part.tolist() for part in copies]
        == [
            [[0, 1], [6, 7]],
            [[2, 3], [8, 9]],
            [[4, 5], [10, 11]],
        ]
    )
    assert not any(part.is_contiguous() for part in views) and all(part.is_contiguous() for part in copies)
    assert mpu.VocabUtility.vocab_range_from_global_vocab_size(12, 1, 4) == (3, 6)
    assert mpu.VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)


def test_random_streams_need_a_seed_and_a_known_name(one_rank):
    with pytest.raises(MegatronLiteError, match=r"no random streams; call mpu.model_parallel_cuda_manual_seed\(seed\)"):
        mpu.get_cuda_rng_tracker()
    mpu.model_parallel_cuda_manual_seed(7)
    tracker = mpu.get_cuda_rng_tracker()
    states = tracker.get_states()
    with tracker.fork():
        inside = torch.rand(3)
    outside = torch.rand(3)
    assert not torch.equal(inside, outside)
    tracker.set_states(states)
    assert torch.equal(torch.rand(3), outside)
    with (
        pytest.raises(MegatronLiteError, match="no random stream 'data'; the one to fork is 'model-parallel-rng'"),
        tracker.fork("data"),
    ):
        pass


def test_a_gathered_output_has_no_separate_bias(one_rank):
    """The bias of each rank would not fit the gathered output."""
    with pytest.raises(MegatronLiteError, match="gather_output does not go with skip_bias_add or stride; set gather_"):
        mpu.ColumnParallelLinear(4, 8, skip_bias_add=True)


def test_layers_keep_the_master_weight_and_skip_values_on_request(one_rank):
    layer = mpu.RowParallelLinear(4, 6, keep_master_weight_for_test=True, params_dtype=torch.float64)
    assert torch.equal(layer.master_weight, layer.weight) and layer.weight.dtype == torch.float64
    calls = []
    skipped = mpu.ColumnParallelLinear(4, 6, init_method=calls.append, skip_init=True, device="meta")
    assert not calls and skipped.master_weight is None and skipped.weight.is_meta


def test_collectives_name_a_wrong_group_and_a_wrong_number_of_tensors(one_rank):
    with pytest.raises(
        MegatronLiteError, match="mpu has no group 'tensor'; use one of tp, cp, dp, dp_cp, pp, mp, world"
    ):
        mpu.barrier(group="tensor")
    with pytest.raises(MegatronLiteError, match="rank 0 of tp gave 2 tensors; it needs one for each of the 1 ranks"):
        mpu.scatter([torch.zeros(1)] * 2, torch.zeros(1), src=0, group="tp")
