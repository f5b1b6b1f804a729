"""This rank's place in the grid and its groups, passed explicitly.

A layer gets the one group that it uses. A missing group is a group of one, which never calls torch.distributed. It is
never `None`: torch takes None for the world, so a forgotten group would become an all-reduce over every GPU.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.parallel.grid import AXES, Grid


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. `pg` is None without torch.distributed and in a group of one."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in group order
    rank: int  # index of this rank in `ranks`; -1 outside of the group (embd, pos_embd)
    pg: "dist.ProcessGroup | None" = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


def solo(name: str = "solo") -> Group:
    """A group of one: its collectives do nothing."""
    return Group(name, (0,), 0)


def duplicate_group(group: Group, timeout_seconds: float, backend: str | None = None) -> Group:
    """Another communicator over the same ranks. NCCL runs the collectives of one communicator in order, so those of the
    new one do not wait for those in `group`. The default backend is the world's. Collective over the group."""
    if group.size == 1:
        return group
    timeout = timedelta(seconds=timeout_seconds)
    ranks = list(group.ranks)
    # With local synchronization torch names the new group by the number of groups of each rank. It is equal within a
    # pipeline stage, but not over the world, because only some stages have an embedding group.
    local = len(ranks) < dist.get_world_size()
    return replace(group, pg=dist.new_group(ranks, timeout, backend, use_local_synchronization=local))


@dataclass(frozen=True)
class ParallelContext:
    """A rank's place in the grid, its device and its groups."""

    grid: Grid
    rank: int
    device: torch.device
    tp: Group
    cp: Group
    dp: Group
    dp_cp: Group  # the ranks with equal weights and different tokens: their gradients are summed
    pp: Group
    mp: Group  # tp x pp: the ranks that together hold one model
    embd: Group  # first and last stage
    pos_embd: Group  # first stage
    world: Group

    @classmethod
    def at(cls, grid: Grid, rank: int) -> "ParallelContext":
        """The view of any rank, on the meta device, without torch.distributed."""
        return cls._build(grid, rank, torch.device("meta"), lambda name, ranks: None)

    @classmethod
    def create(cls, grid: Grid, device: torch.device, timeout_seconds: float) -> "ParallelContext":
        """The view of this process. Collective over the world, with the same grid on every rank.

        A grid of several ranks needs an initialized torch.distributed.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if world_size != grid.world_size:
            raise ValueError(f"{grid} needs {grid.world_size} ranks, torch.distributed has {world_size}")
        timeout = timedelta(seconds=timeout_seconds)
        created: dict[tuple[int, ...], Any] = {}  # torch returns an int to ranks outside of the group

        def new_group(name: str, ranks: tuple[int, ...]) -> "dist.ProcessGroup | None":
            if len(ranks) == 1:
                return None
            if ranks not in created:
                is_world = len(ranks) == grid.world_size
                created[ranks] = dist.group.WORLD if is_world else dist.new_group(list(ranks), timeout, group_desc=name)
            return created[ranks]

        return cls._build(grid, rank, device, new_group)

    @classmethod
    def _build(cls, grid: Grid, rank: int, device: torch.device, new_group) -> "ParallelContext":
        ranks_of = {axis: grid.groups(axis) for axis in AXES} | {
            "dp_cp": grid.groups("cp", "dp"),
            "mp": grid.groups("tp", "pp"),
            "embd": grid.embedding_groups(),
            "pos_embd": grid.position_embedding_groups(),
            "world": [tuple(range(grid.world_size))],
        }
        local = {}
        for name, groups in ranks_of.items():
            for ranks in groups:  # new_group is collective: every rank creates every group, in one order
                pg = new_group(name, ranks)
                if rank in ranks:
                    local[name] = Group(name, ranks, ranks.index(rank), pg)
            if name not in local:  # a middle stage has no embedding group
                local[name] = Group(name, (rank,), -1)
        return cls(grid=grid, rank=rank, device=device, **local)
