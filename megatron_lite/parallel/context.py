"""This rank's place in the grid and the groups it talks to, handed around explicitly.

A layer gets the one group that it uses. A group of one rank never touches torch.distributed, and a missing
group is a group of one, never `None`: to torch, `None` is the whole world, and a forgotten group would
become an all-reduce over every GPU.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.parallel.grid import Grid


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate. `pg` is None only in a view built without torch.distributed, or with one rank."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in group order
    rank: int  # this rank's place in `ranks`; -1 when it is not a member (embd, pos_embd)
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
    """The same ranks, and nothing that is sent here waits for what is on its way in the given group: NCCL runs the
    collectives of one communicator one after another. Without a backend, the world's. Collective over the group."""
    if group.size == 1:
        return group
    timeout = timedelta(seconds=timeout_seconds)
    ranks = list(group.ranks)
    # Where only the group's ranks call, they meet under a name with the number of groups that each of them has: equal
    # within a pipeline stage, but not over the world, where some stages hold an embedding and others none.
    only_these = len(ranks) < dist.get_world_size()
    return replace(group, pg=dist.new_group(ranks, timeout, backend, use_local_synchronization=only_these))


@dataclass(frozen=True)
class ParallelContext:
    """All that a rank needs to know about its place."""

    grid: Grid
    rank: int
    device: torch.device
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    mp: Group  # tp x pp (x cp): the ranks that together hold one model
    embd: Group  # first and last stage
    pos_embd: Group  # first stage
    world: Group

    @classmethod
    def at(cls, grid: Grid, rank: int) -> "ParallelContext":
        """Any rank's view, in one process, on the meta device and without torch.distributed."""
        return cls._build(grid, rank, torch.device("meta"), lambda ranks: None)

    @classmethod
    def create(cls, grid: Grid, device: torch.device, timeout_seconds: float) -> "ParallelContext":
        """This process's view. Collective: every rank of the world calls it, with the same grid.

        torch.distributed must be initialized when the grid has more than one rank.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size != grid.world_size:
            raise ValueError(f"{grid} needs {grid.world_size} ranks, torch.distributed has {world_size}")
        if world_size == 1:
            return cls._build(grid, 0, device, lambda ranks: None)
        timeout = timedelta(seconds=timeout_seconds)
        made: dict[tuple[int, ...], Any] = {}  # torch hands an int to ranks outside the group

        def new_group(ranks: tuple[int, ...]) -> "dist.ProcessGroup | None":
            if len(ranks) == 1:
                return None
            if ranks not in made:
                whole_world = len(ranks) == grid.world_size
                made[ranks] = dist.group.WORLD if whole_world else dist.new_group(list(ranks), timeout=timeout)
            return made[ranks]

        return cls._build(grid, dist.get_rank(), device, new_group)

    @classmethod
    def _build(cls, grid: Grid, rank: int, device: torch.device, new_group) -> "ParallelContext":
        kinds = {
            "tp": grid.groups("tp"),
            "cp": grid.groups("cp"),
            "dp": grid.groups("dp"),
            "pp": grid.groups("pp"),
            "mp": grid.groups("tp", "cp", "pp"),
            "embd": grid.embedding_groups(),
            "pos_embd": grid.position_embedding_groups(),
            "world": [tuple(range(grid.world_size))],
        }
        mine = {}
        for name, groups in kinds.items():
            for ranks in groups:  # new_group is collective: every rank makes every group, in the same order
                pg = new_group(ranks)
                if rank in ranks:
                    mine[name] = Group(name, ranks, ranks.index(rank), pg)
            if name not in mine:  # a middle stage is in no embedding group
                mine[name] = Group(name, (rank,), -1)
        return cls(grid=grid, rank=rank, device=device, **mine)
