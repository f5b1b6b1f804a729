"""The registered context, and Megatron's functions that ask it for groups, ranks and stages.

Groups are torch process groups, for direct use with torch.distributed.
"""

import torch
import torch.distributed as dist

from megatron_lite.errors import MegatronLiteError
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import RngTracker, seed_everything

TIMEOUT_SECONDS = 1800.0  # of the groups of `initialize_model_parallel`, torch's default


class _Registered:
    """The only globals of the package."""

    context: ParallelContext | None = None
    rng: RngTracker | None = None
    num_chunks: int | None = None  # on each pipeline rank; None without an interleaved schedule
    chunk = 0
    group_of_one: dist.ProcessGroup | None = None  # created on the first request for a group of one rank


def register(context: ParallelContext, rng: RngTracker | None = None, num_chunks: int | None = None) -> None:
    """Set the context of `mpu`, in place of an earlier one."""
    unregister()
    _Registered.context, _Registered.rng, _Registered.num_chunks = context, rng, num_chunks


def unregister() -> None:
    """Remove the context."""
    _Registered.context = _Registered.rng = _Registered.num_chunks = _Registered.group_of_one = None
    _Registered.chunk = 0


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
) -> None:
    """Build the groups of a layout over an initialized torch.distributed, or over this process alone, and register
    them. `initialize_megatron` does the same from a config.

    Collective over the world. Raises MegatronLiteError for sizes that do not divide the world, and for a second call.
    """
    if _Registered.context is not None:
        raise MegatronLiteError("model parallelism is already initialized; call mpu.destroy_model_parallel() first")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size
    if model < 1 or world_size % model:
        raise MegatronLiteError(
            f"initialize_model_parallel: tensor size {tensor_model_parallel_size} x pipeline size "
            f"{pipeline_model_parallel_size} x context size {context_parallel_size} does not divide the world size, "
            f"{world_size}; choose sizes whose product does"
        )
    grid = Grid(
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        dp=world_size // model,
        pp=pipeline_model_parallel_size,
    )
    uses_gpu = dist.is_initialized() and "nccl" in str(dist.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")
    register(ParallelContext.create(grid, device, TIMEOUT_SECONDS), num_chunks=virtual_pipeline_model_parallel_size)


def destroy_model_parallel() -> None:
    """Forget the groups; `initialize_model_parallel` can then build others."""
    unregister()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's generators for this rank: equal over tensor-parallel ranks, except inside of
    `get_cuda_rng_tracker().fork()`."""
    _Registered.rng = seed_everything(seed, context())


def model_parallel_is_initialized() -> bool:
    return _Registered.context is not None


def context() -> ParallelContext:
    """The registered context. Raises MegatronLiteError without one."""
    if _Registered.context is None:
        raise MegatronLiteError(
            "mpu is not initialized; call initialize_megatron(config) or mpu.initialize_model_parallel() first"
        )
    return _Registered.context


def rng_tracker() -> RngTracker:
    """The registered random streams. Raises MegatronLiteError without them."""
    context()
    if _Registered.rng is None:
        raise MegatronLiteError("mpu has no random streams; call mpu.model_parallel_cuda_manual_seed(seed) first")
    return _Registered.rng


def _data_parallel(with_context_parallel: bool) -> Group:
    return context().dp_cp if with_context_parallel else context().dp


def _process_group(group: Group) -> dist.ProcessGroup:
    if group.pg is not None:
        return group.pg
    if group.rank < 0:
        raise MegatronLiteError(
            f"rank {context().rank} is not in a group {group.name!r}; "
            "check is_rank_in_embedding_group() or is_rank_in_position_embedding_group() first"
        )
    if not dist.is_initialized():
        raise MegatronLiteError(
            f"the group {group.name!r} has one rank, and torch.distributed is not initialized; check the world size of "
            "the group first, or start the script with torchrun"
        )
    # torch reads None as the world group, so a group of one rank needs a real process group.
    if _Registered.group_of_one is None:
        created = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(created, dist.ProcessGroup)
        _Registered.group_of_one = created
    return _Registered.group_of_one


def get_model_parallel_group() -> dist.ProcessGroup:
    """Process group of the ranks that share one copy of the model."""
    return _process_group(context().mp)


def get_model_parallel_world_size() -> int:
    return context().mp.size


def get_model_parallel_rank() -> int:
    return context().mp.rank


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    return _process_group(context().tp)


def get_tensor_model_parallel_world_size() -> int:
    return context().tp.size


def get_tensor_model_parallel_rank() -> int:
    return context().tp.rank


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank in the tensor-parallel group, the usual source of a broadcast."""
    return context().tp.ranks[0]


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """Process group of the ranks with other samples; or also other tokens, over which gradients are summed."""
    return _process_group(_data_parallel(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel).size


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel).rank


def get_data_parallel_src_rank() -> int:
    """Global rank of the first rank in the data-parallel group."""
    return context().dp.ranks[0]


def get_context_parallel_group() -> dist.ProcessGroup:
    return _process_group(context().cp)


def get_context_parallel_world_size() -> int:
    return context().cp.size


def get_context_parallel_rank() -> int:
    return context().cp.rank


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    return _process_group(context().pp)


def get_pipeline_model_parallel_world_size() -> int:
    return context().pp.size


def get_pipeline_model_parallel_rank() -> int:
    return context().pp.rank


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first pipeline stage."""
    return context().pp.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last pipeline stage."""
    return context().pp.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the last stage gets the first one."""
    pp = context().pp
    return pp.ranks[(pp.rank + 1) % pp.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage; the first stage gets the last one."""
    pp = context().pp
    return pp.ranks[(pp.rank - 1) % pp.size]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """The number of chunks of the model on each pipeline rank; None without an interleaved schedule."""
    context()
    return _Registered.num_chunks


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The current chunk, as a model provider with `pre_process` and `post_process` is called for it."""
    context()
    return None if _Registered.num_chunks is None else _Registered.chunk


def set_virtual_pipeline_model_parallel_rank(rank: int) -> None:
    """Set the current chunk. Raises MegatronLiteError for a chunk that does not exist."""
    context()
    if not 0 <= rank < (_Registered.num_chunks or 1):
        raise MegatronLiteError(
            f"the virtual pipeline rank is {rank}, and a pipeline rank has {_Registered.num_chunks or 1} chunks; use "
            f"0..{(_Registered.num_chunks or 1) - 1}"
        )
    _Registered.chunk = rank


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """True on the first stage; with `ignore_virtual` on all stages of the first rank."""
    return context().pp.is_first and (ignore_virtual or _Registered.chunk == 0)


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """True on the last stage; with `ignore_virtual` on all stages of the last rank."""
    return context().pp.is_last and (ignore_virtual or _Registered.chunk == (_Registered.num_chunks or 1) - 1)


def get_embedding_group() -> dist.ProcessGroup:
    """Process group of the first and last stage, which share a tied word embedding; an error on other stages."""
    return _process_group(context().embd)


def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    """True on the first and last stage; with `ignore_virtual` on all stages of the first and last rank."""
    return is_pipeline_first_stage(ignore_virtual) or is_pipeline_last_stage(ignore_virtual)


def get_position_embedding_group() -> dist.ProcessGroup:
    """Process group of the first stage, which has the position embedding; an error on other stages."""
    return _process_group(context().pos_embd)


def is_rank_in_position_embedding_group() -> bool:
    return context().pos_embd.rank >= 0
