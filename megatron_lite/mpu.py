"""The functions of Megatron's `mpu`, which read the context that `initialize_megatron` registers.

Scripts ported from Megatron-LM use them. The package passes its context as an argument and never imports this file.
Groups are torch process groups, for direct use with torch.distributed.
"""

import torch.distributed as dist

from megatron_lite.errors import MegatronLiteError
from megatron_lite.parallel.context import Group, ParallelContext

# The only globals of the package.
_registered: ParallelContext | None = None
_group_of_one: dist.ProcessGroup | None = None  # created on the first request for a group of one rank


def register(context: ParallelContext) -> None:
    """Set the context of the functions below, in place of an earlier one."""
    global _registered, _group_of_one
    _registered, _group_of_one = context, None


def unregister() -> None:
    """Remove the context."""
    global _registered, _group_of_one
    _registered, _group_of_one = None, None


def model_parallel_is_initialized() -> bool:
    return _registered is not None


def _context() -> ParallelContext:
    if _registered is None:
        raise MegatronLiteError("mpu is not initialized; call initialize_megatron(config) first")
    return _registered


def _data_parallel(with_context_parallel: bool) -> Group:
    return _context().dp_cp if with_context_parallel else _context().dp


def _process_group(group: Group) -> dist.ProcessGroup:
    global _group_of_one
    if group.pg is not None:
        return group.pg
    if group.rank < 0:
        raise MegatronLiteError(
            f"rank {_context().rank} is not in a group {group.name!r}; "
            "check is_rank_in_embedding_group() or is_rank_in_position_embedding_group() first"
        )
    if not dist.is_initialized():
        raise MegatronLiteError(
            f"the group {group.name!r} has one rank, and torch.distributed is not initialized; check the world size of "
            "the group first, or start the script with torchrun"
        )
    # torch reads None as the world group, so a group of one rank needs a real process group.
    if _group_of_one is None:
        created = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(created, dist.ProcessGroup)
        _group_of_one = created
    return _group_of_one


def get_model_parallel_group() -> dist.ProcessGroup:
    """Process group of the ranks that share one copy of the model."""
    return _process_group(_context().mp)


def get_model_parallel_world_size() -> int:
    return _context().mp.size


def get_model_parallel_rank() -> int:
    return _context().mp.rank


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    return _process_group(_context().tp)


def get_tensor_model_parallel_world_size() -> int:
    return _context().tp.size


def get_tensor_model_parallel_rank() -> int:
    return _context().tp.rank


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank in the tensor-parallel group, the usual source of a broadcast."""
    return _context().tp.ranks[0]


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """Process group of the ranks with other samples; or also other tokens, over which gradients are summed."""
    return _process_group(_data_parallel(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel).size


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel).rank


def get_data_parallel_src_rank() -> int:
    """Global rank of the first rank in the data-parallel group."""
    return _context().dp.ranks[0]


def get_context_parallel_group() -> dist.ProcessGroup:
    return _process_group(_context().cp)


def get_context_parallel_world_size() -> int:
    return _context().cp.size


def get_context_parallel_rank() -> int:
    return _context().cp.rank


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    return _process_group(_context().pp)


def get_pipeline_model_parallel_world_size() -> int:
    return _context().pp.size


def get_pipeline_model_parallel_rank() -> int:
    return _context().pp.rank


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first pipeline stage."""
    return _context().pp.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last pipeline stage."""
    return _context().pp.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the last stage gets the first one."""
    pp = _context().pp
    return pp.ranks[(pp.rank + 1) % pp.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage; the first stage gets the last one."""
    pp = _context().pp
    return pp.ranks[(pp.rank - 1) % pp.size]


def is_pipeline_first_stage() -> bool:
    return _context().pp.is_first


def is_pipeline_last_stage() -> bool:
    return _context().pp.is_last


def get_embedding_group() -> dist.ProcessGroup:
    """Process group of the first and last stage, which share a tied word embedding; an error on other stages."""
    return _process_group(_context().embd)


def is_rank_in_embedding_group() -> bool:
    return _context().embd.rank >= 0


def get_position_embedding_group() -> dist.ProcessGroup:
    """Process group of the first stage, which has the position embedding; an error on other stages."""
    return _process_group(_context().pos_embd)


def is_rank_in_position_embedding_group() -> bool:
    return _context().pos_embd.rank >= 0
