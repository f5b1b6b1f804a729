"""The start, the save and the resume of a job in seconds: counts of the control plane with measured unit costs.

A step is arithmetic and links, which `timing.py` plays. These events are processes, connections, requests to the store
of rank 0, and bytes of the storage. `benchmarks/control_plane.py` counts them for one rank of 8 to 16,384, and a test
compares the counts here. The slowest rank, or rank 0 and the storage, which serve all ranks, give the time.
"""

from dataclasses import dataclass
from math import ceil, log2

from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.plan.estimate import Plan
from megatron_lite.plan.units import duration, size_text

# Measured by `benchmarks/control_plane.py --units` on two cores at 2.5 GHz, over loopback.
PROCESS_SECONDS = 4.0  # Python, torch and this package from a warm page cache
REQUEST_SECONDS = 1e-4  # of one rank, to the store and back: 3e-5, and a network's round trip
SERVED_PER_SECOND = 100_000  # requests, by the store in the process of rank 0: 9 us of processor time each
CONNECTION_SECONDS = 3e-4  # of a pair of ranks in Gloo
# Assumed: a parallel file system that serves 25 GB/s to all machines together, and a machine with 2.5 GB/s.
STORAGE = 25e9
STORAGE_OF_A_MACHINE = 2.5e9

# Requests of the busiest rank to the store, rounded up; they do not depend on the number of ranks.
REQUESTS_OF_A_GROUP = 1  # its address; the others are read when two ranks connect
REQUESTS_OF_A_START = 100
REQUESTS_OF_A_SAVE = 40
REQUESTS_OF_A_RESUME = 40  # beside those of a start


@dataclass(frozen=True)
class Event:
    """The seconds of an event by what takes them, and the bytes that it moves to or from the storage."""

    parts: dict[str, float]
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def requests_seconds(count: int, world_size: int) -> float:
    """The time of so many requests of each rank: their own, or that of the store which serves all."""
    return max(count * REQUEST_SECONDS, count * world_size / SERVED_PER_SECOND) if world_size > 1 else 0.0


def groups_of(grid: Grid, ranks_per_machine: int, *, gathers: bool) -> list[tuple[int, ...]]:
    """The groups of several ranks that rank 0 joins: each once, a second one of a pipeline for its pipes, and, if an
    optimizer `gathers` weights, a second one of its ranks."""
    ctx, host = ParallelContext.at(grid, 0), tuple(range(min(ranks_per_machine, grid.world_size)))
    groups = (value.ranks for value in vars(ctx).values() if isinstance(value, Group))
    found = [*dict.fromkeys((host, *groups)), ctx.pp.ranks]
    return [ranks for ranks in (*found, *([ctx.dp_cp.ranks] if gathers else [])) if len(ranks) > 1]


def start(grid: Grid, ranks_per_machine: int, *, gathers: bool) -> Event:
    """Processes until the first step; without the data's index files, which an earlier start has written."""
    groups = groups_of(grid, ranks_per_machine, gathers=gathers)
    # A ring has two neighbours; a tree as many as its depth.
    connections = sum(2 + ceil(log2(len(ranks))) for ranks in groups)
    requests = REQUESTS_OF_A_START + len(groups) * REQUESTS_OF_A_GROUP + 2 * connections
    return Event(
        {
            "processes": PROCESS_SECONDS,
            "connections": connections * CONNECTION_SECONDS,
            "store": requests_seconds(requests, grid.world_size),
        }
    )


def storage_seconds(size: float, machines: int) -> float:
    """The time to read or write so many bytes, each once."""
    return size / min(STORAGE, machines * STORAGE_OF_A_MACHINE)


def save(grid: Grid, size: float, machines: int) -> Event:
    """A checkpoint of so many bytes; each rank writes its shard."""
    requests = requests_seconds(REQUESTS_OF_A_SAVE, grid.world_size)
    return Event({"storage": storage_seconds(size, machines), "store": requests}, size)


def resume(started: Event, grid: Grid, size: float, machines: int, link: float) -> Event:
    """A start, from a checkpoint of so many bytes. One rank reads each of them; the others with equal values get them
    over a link of so many bytes/s."""
    parts = dict(started.parts)
    parts["store"] += requests_seconds(REQUESTS_OF_A_RESUME, grid.world_size)
    parts["storage"] = storage_seconds(size, machines)
    if grid.dp * grid.cp > 1:
        parts["broadcast"] = size / (grid.tp * grid.pp) / link
    return Event(parts, size)


def events(plan: Plan) -> dict[str, Event]:
    """The start, the save and the resume of a plan."""
    grid, size, per_machine = plan.grid, plan.checkpoint_bytes, plan.machines.ranks_per_machine
    machines, link = ceil(grid.world_size / per_machine), plan.machines.rate(grid.group(0, "cp", "dp"))
    started = start(grid, per_machine, gathers=plan.config.optim.distributed)
    return {
        "start": started,
        "save": save(grid, size, machines),
        "resume": resume(started, grid, size, machines, link),
    }


def lines(plan: Plan) -> list[str]:
    """A line for each event, with its bytes."""
    found = []
    for name, event in events(plan).items():
        size = f"; {size_text(event.bytes)}" if event.bytes else ""
        parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in event.parts.items() if seconds >= 1e-3)
        found.append(f"{name:14}{duration(event.seconds)}{size}: {parts or 'storage'}")
    return found
