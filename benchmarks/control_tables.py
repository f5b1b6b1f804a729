"""Tables of `docs/scale.md`: the costs of a job, from the counts of its kinds of ranks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, log2
from typing import Any

from megatron_lite.plan.control import CONNECTION_SECONDS, REQUEST_SECONDS, SERVED_PER_SECOND, STORAGE

METADATA_PER_SECOND = 50_000  # operations that a parallel file system serves; assumed
LINK = 10e9  # bytes/s of rank 0's machine; assumed
COLLECTIVE_SECONDS = 2e-5  # for each doubling of the ranks; assumed
MESH_RANKS = 32  # up to here Gloo connects all pairs of ranks
LISTENER = 4  # descriptors of a Gloo group without its connections; measured
EVENTS = {
    "start": "A start",
    "step": "A step",
    "log": "A log interval, beside its step",
    "save": "A save",
    "resume": "A resume",
}
Costs = dict[str, float]


def kinds_of(
    data: Mapping[int, Mapping[str, Any]], world: int, numbers: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """The counts of each kind of rank; of larger worlds, those of the largest one in which the kind was driven."""
    found = dict(data[world]["kinds"])
    for kind in numbers:
        if kind not in found:
            found[kind] = next(
                data[size]["kinds"][kind] for size in sorted(data, reverse=True) if kind in data[size]["kinds"]
            )
    return found


def costs(data: Mapping[int, Mapping[str, Any]], world: int, numbers: Mapping[str, int], event: str) -> Costs:
    """The costs of an event in a world, by name."""
    kinds = {kind: Counter(phases[event]) for kind, phases in kinds_of(data, world, numbers).items()}
    if event == "log":  # beside an ordinary step
        for kind, phases in kinds_of(data, world, numbers).items():
            kinds[kind].subtract(phases["step"])

    def total(name: str) -> int:
        return sum(numbers[kind] * counts[name] for kind, counts in kinds.items())

    first = kinds["first"]
    is_start = event in ("start", "resume")
    requests, all_requests = max(counts["store requests"] for counts in kinds.values()), total("store requests")
    found: Costs = {}
    if is_start:
        sizes = first["members of joined groups"]
        joined = first["groups joined"]
        lazy = data[world].get("lazy") and world > MESH_RANKS
        pairs = joined * (2 + ceil(log2(world))) if lazy else sizes - joined
        # Each address is awaited and read; an address has 154 bytes and 8 for each member.
        requests += joined + 2 * pairs
        all_requests += world * (joined + 2 * pairs)
        found["calls of new_group, of a rank"] = first["calls of new_group"]
        found["groups that rank 0 joins"] = joined
        found["connections of rank 0"] = pairs + world
        found["open files of rank 0"] = pairs + LISTENER * joined + world
    found["collectives and messages of rank 0"] = first["collectives"] + first["messages"]
    found["collectives over the world"] = first["collectives over the world"]
    found["requests of a rank to the store"] = requests
    found["requests of all ranks"] = all_requests
    layouts = data[world]["layout bytes"]
    if data[world].get("layout version", 2) == 2:
        layouts += (world - 1) * data[world]["file entries bytes"]
    else:  # one rank of each stage describes its tensors, and rank 0 has those of the first
        layouts += ((8 if world > 8 else 2) - 1) * data[world]["tensor entries bytes"]
    found["bytes to rank 0"] = first["bytes to rank 0"] + total("bytes to the store")
    found["bytes from rank 0's store"] = total("bytes from the store")
    found["files written"] = total("files written")
    found["metadata operations"] = total("metadata operations") + total("files of the package opened")
    found["bytes from the storage"] = total("bytes read")
    if event == "resume":
        found["bytes from the storage"] += total("reads of layout.json") * (
            layouts - data[world]["layout bytes of one process"]
        )
    if event == "save":
        found["bytes of layout.json"] = layouts
    if event != "log":
        found["processor seconds of rank 0"] = first["microseconds"] / 1e6
    found["seconds, predicted"] = seconds(found, world) + found.get("processor seconds of rank 0", 0.0)
    return found


def seconds(found: Costs, world: int) -> float:
    """The time on a cluster, without processor time: what a rank waits for, or what rank 0 and the storage serve."""
    store = max(
        found["requests of a rank to the store"] * REQUEST_SECONDS,
        found["requests of all ranks"] / SERVED_PER_SECOND,
    )
    links = (found["bytes to rank 0"] + found["bytes from rank 0's store"]) / LINK
    disk = found["metadata operations"] / METADATA_PER_SECOND + found["bytes from the storage"] / STORAGE
    collectives = found["collectives over the world"] * COLLECTIVE_SECONDS * log2(world)
    return store + links + disk + collectives + found.get("connections of rank 0", 0) * CONNECTION_SECONDS


def shown(value: float, name: str) -> str:
    if "seconds" in name:
        return f"{value:,.3f}" if value < 1 else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= 10 * size or (value >= size and "bytes" in name):
            return f"{value / size:,.3g}{letter}"
    return f"{value:,.0f}"


def tables(
    before: Mapping[int, Mapping[str, Any]],
    after: Mapping[int, Mapping[str, Any]],
    numbers_of: Callable[[int], Mapping[str, int]],
) -> Iterator[str]:
    """A table for each event. A cell is `before → after`, or one value where they are equal."""
    worlds = sorted(after)
    for event, title in EVENTS.items():
        of = {
            which: {world: costs(data, world, numbers_of(world), event) for world in worlds if world in data}
            for which, data in (("before", before), ("after", after))
        }
        rows = [(title, *(f"{world:,} ranks" for world in worlds))]
        for name in dict.fromkeys(name for found in of["after"].values() for name in found):
            cells = []
            for world in worlds:
                new = shown(of["after"][world][name], name)
                old = shown(of["before"][world][name], name) if world in of["before"] else ""
                cells.append(new if old in ("", new) else f"{old} → {new}")
            if any(cell != "0" for cell in cells):
                rows.append((name, *cells))
        yield table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rest)])


def real_table(measured: Mapping[str, Mapping[int, Sequence[Mapping[str, float]]]]) -> str:
    """Medians of real ranks, `before → after`."""
    names = {
        "first step": "seconds to the end of the first step",
        "step": "seconds of a step, median of three",
        "end": "seconds to the end, with a save",
        "descriptors": "descriptors of rank 0",
    }
    worlds = sorted({world for found in measured.values() for world in found})
    rows = [("Real ranks", *(f"{world} ranks" for world in worlds))]
    for key, name in names.items():
        cells = []
        for world in worlds:
            middles = [sorted(one[key] for one in found[world]) for found in measured.values() if world in found]
            cells.append(" → ".join(shown(values[len(values) // 2], name) for values in middles))
        rows.append((name, *cells))
    return table(rows)
