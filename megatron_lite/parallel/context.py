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


def new_group(
    ranks: tuple[int, ...], timeout_seconds: float, *, name: str = "", backend: str | None = None
) -> "dist.ProcessGroup | None":
    """Connect these ranks, which alone call this function; every other rank of the world connects some group too.

    Torch names the group by its ranks and by the number of groups that a rank has connected, so all ranks must have
    connected the same number. A rank without a part in a group connects one of its own.
    """
    timeout = timedelta(seconds=timeout_seconds)
    options: Any = {"use_local_synchronization": True, "group_desc": name}
    return dist.new_group(list(ranks), timeout, backend, **options)  # type: ignore[return-value]


def duplicate_group(group: Group, timeout_seconds: float, backend: str | None = None) -> Group:
    """Another communicator over the same ranks. NCCL runs the collectives of one communicator in order, so those of the
    new one do not wait for those in `group`. The default backend is the world's. Collective over the world, in groups
    of one size."""
    if group.size == 1:
        return group
    return replace(group, pg=new_group(group.ranks, timeout_seconds, backend=backend))


def split_group(group: Group, size: int, timeout_seconds: float) -> tuple[Group, Group]:
    """This rank's part of the group, `size` adjacent ranks (0: all), and the ranks with its place in their parts.
    Collective over the world, in groups of one size."""
    if size in (0, group.size):
        return group, solo(group.name)
    number, rank = divmod(group.rank, size)
    part = Group(group.name, group.ranks[number * size : (number + 1) * size], rank)
    across = Group(group.name, group.ranks[rank::size], number)
    return duplicate_group(part, timeout_seconds), duplicate_group(across, timeout_seconds)


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
    host: Group  # the ranks of one machine; a group of one where their number is not known
    world: Group

    @classmethod
    def at(cls, grid: Grid, rank: int) -> "ParallelContext":
        """The view of any rank, on the meta device, without torch.distributed."""
        return cls._build(grid, rank, torch.device("meta"), (rank,), lambda name, ranks: None)

    @classmethod
    def create(
        cls, grid: Grid, device: torch.device, timeout_seconds: float, ranks_per_host: int = 1
    ) -> "ParallelContext":
        """The view of this process. Collective over the world, with the same grid on every rank.

        Each rank connects its own groups alone, without a barrier over the world. `ranks_per_host` adjacent ranks are
        on each machine; 1 where their number is not known.
        A grid of several ranks needs an initialized torch.distributed.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if world_size != grid.world_size:
            raise ValueError(f"{grid} needs {grid.world_size} ranks, torch.distributed has {world_size}")
        created: dict[tuple[int, ...], Any] = {tuple(range(world_size)): dist.group.WORLD if world_size > 1 else None}

        def connect(name: str, ranks: tuple[int, ...]) -> "dist.ProcessGroup | None":
            if ranks not in created:
                created[ranks] = new_group(ranks, timeout_seconds, name=name)
            return created[ranks]

        first = rank - rank % ranks_per_host
        return cls._build(grid, rank, device, tuple(range(first, first + ranks_per_host)), connect)

    @classmethod
    def _build(cls, grid: Grid, rank: int, device: torch.device, host: tuple[int, ...], connect) -> "ParallelContext":
        pipeline = grid.group(rank, "pp")
        ranks_of = {axis: grid.group(rank, axis) for axis in AXES} | {
            "dp_cp": grid.group(rank, "cp", "dp"),
            "mp": grid.group(rank, "tp", "pp"),
            "embd": tuple(dict.fromkeys((pipeline[0], pipeline[-1]))),
            "pos_embd": pipeline[:1],
            "host": host,
            "world": tuple(range(grid.world_size)),
        }
        local = {}
        for name, ranks in ranks_of.items():
            # A middle stage has no embedding group. It connects one of its own: see `new_group`.
            own = ranks if rank in ranks else (rank,)
            pg = connect(name, own) if len(ranks) > 1 else None
            local[name] = Group(name, own, ranks.index(rank) if own is ranks else -1, pg if len(own) > 1 else None)
        return cls(grid=grid, rank=rank, device=device, **local)
