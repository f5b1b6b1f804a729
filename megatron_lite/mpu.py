"""Megatron's `mpu`: its function names over the context that `initialize_megatron` registers.

For scripts ported from Megatron-LM. The package itself hands its context around and never imports this file.
Groups come as torch process groups, so that they can go straight into torch.distributed.
"""

import torch.distributed as dist

from megatron_lite.errors import MegatronLiteError
from megatron_lite.parallel.context import Group, ParallelContext


class _Registered:
    def __init__(self, ctx: ParallelContext):
        self.ctx = ctx
        self.alone: dist.ProcessGroup | None = None  # made when a script first asks for a group of one


_registered: _Registered | None = None  # the only global of the package


def register(context: ParallelContext) -> None:
    """Makes this the context that the functions below read; replaces an earlier one."""
    global _registered
    _registered = _Registered(context)


def unregister() -> None:
    """Forgets the context."""
    global _registered
    _registered = None


def model_parallel_is_initialized() -> bool:
    return _registered is not None


def _context() -> ParallelContext:
    return _current().ctx


def _current() -> _Registered:
    if _registered is None:
        raise MegatronLiteError(
            "megatron_lite.mpu was asked before there is a layout; call initialize_megatron(config) first"
        )
    return _registered


def _process_group(group: Group) -> dist.ProcessGroup:
    if group.pg is not None:
        return group.pg
    if group.rank < 0:
        raise MegatronLiteError(
            f"rank {_context().rank} is not in a group {group.name!r}; "
            "ask is_rank_in_embedding_group() or is_rank_in_position_embedding_group() first"
        )
    if not dist.is_initialized():
        raise MegatronLiteError(
            f"the group {group.name!r} has one rank and this process runs without torch.distributed: there is no "
            "process group; ask for the group's world size first, or start the script with torchrun"
        )
    # None would be the whole world to torch, so a group of one gets a real process group here.
    current = _current()
    if current.alone is None:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(alone, dist.ProcessGroup)
        current.alone = alone
    return current.alone


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that together hold one copy of the model."""
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
    """Global rank of the first rank of this rank's tensor-parallel group, the usual source of a broadcast."""
    return _context().tp.ranks[0]


def get_data_parallel_group() -> dist.ProcessGroup:
    return _process_group(_context().dp)


def get_data_parallel_world_size() -> int:
    return _context().dp.size


def get_data_parallel_rank() -> int:
    return _context().dp.rank


def get_data_parallel_src_rank() -> int:
    """Global rank of the first rank of this rank's data-parallel group."""
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
    """Global rank of the first stage of this rank's pipeline."""
    return _context().pp.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage of this rank's pipeline."""
    return _context().pp.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; of the first one for the last."""
    pp = _context().pp
    return pp.ranks[(pp.rank + 1) % pp.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the stage before; of the last one for the first."""
    pp = _context().pp
    return pp.ranks[(pp.rank - 1) % pp.size]


def is_pipeline_first_stage() -> bool:
    return _context().pp.is_first


def is_pipeline_last_stage() -> bool:
    return _context().pp.is_last


def get_embedding_group() -> dist.ProcessGroup:
    """First and last stage, which hold a tied word embedding; an error on a stage between."""
    return _process_group(_context().embd)


def is_rank_in_embedding_group() -> bool:
    return _context().embd.rank >= 0


def get_position_embedding_group() -> dist.ProcessGroup:
    """The first stage, which holds the position embedding; an error on the others."""
    return _process_group(_context().pos_embd)


def is_rank_in_position_embedding_group() -> bool:
    return _context().pos_embd.rank >= 0
