"""The smallest changes of a layout that make it fit, by the estimates of the search."""

from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from typing import Any

from megatron_lite.config.schema import Config
from megatron_lite.plan.estimate import Plan
from megatron_lite.plan.layouts import Layout, changes, layout_of, sharding
from megatron_lite.plan.search import HYBRID, Search

MOST_CHANGES = 3
NOTHING_FITS = "no layout that differs in up to three fields fits; use more GPUs, or a shorter sequence"
Change = dict[str, Any]  # fields of a layout that change together


@dataclass(frozen=True)
class Option:
    """A layout that fits."""

    changes: list[str]
    memory: float  # bytes
    slowdown: float  # of a step; 0.1: a tenth longer


def changes_that_fit(plan: Plan, limit: float, *, most: int = 5) -> list[Option]:
    """Layouts that fit, the fastest first; none differs in more fields than a faster one. Empty where none fits."""
    search = Search(_with_batch(plan), plan.grid.world_size, plan.machines)
    given = layout_of(plan.config)
    now = search.estimate(given)
    scale = plan.peak_memory / now.memory  # what the estimate leaves out, such as chunks of the head
    options: list[Option] = []
    for count in range(1, MOST_CHANGES + 1):
        if count == MOST_CHANGES and options:
            break
        fastest = min((option.slowdown for option in options), default=inf)
        for layout in _changed(search, given, count):
            if search.least_memory(layout) > limit or search.bound(layout) / now.seconds - 1 >= fastest:
                continue
            if not search.is_legal(layout):
                continue
            estimate = search.estimate(layout)
            slowdown = estimate.seconds / now.seconds - 1
            if estimate.memory * scale <= limit and slowdown < fastest:
                options.append(Option(changes(plan.config, layout), estimate.memory * scale, slowdown))
    return sorted(options, key=lambda option: option.slowdown)[:most]


def _with_batch(plan: Plan) -> Config:
    """The config with its global batch written out."""
    config = plan.config
    train = config.train.model_copy(update={"global_batch_size": config.train.global_batch(plan.grid.dp)})
    return config.model_copy(update={"train": train})


def _changed(search: Search, given: Layout, count: int) -> list[Layout]:
    """The layouts with `count` single changes of the given one, some of which may not be legal."""
    found: dict[Layout, None] = {}
    for chosen in combinations(_single_changes(search, given), count):
        fields = {name for change in chosen for name in change}
        if len(fields) == sum(map(len, chosen)):
            layout = replace(given, **{name: value for change in chosen for name, value in change.items()})
            found[layout] = None
    return [
        layout for layout in found if layout.tensor <= search.machines.ranks_per_machine and search.may_be_legal(layout)
    ]


def _single_changes(search: Search, given: Layout) -> list[Change]:
    """Changes that save memory, each of fields that belong together."""
    found: list[Change] = []
    shards = sharding(search.config, given.engine, 2)
    if shards == "local":
        sizes = search.shards(given.tensor, search.world_size // (given.tensor * given.pipeline))
        found += [{"engine": name, "shard": size} for name in HYBRID for size in sizes]
    elif shards == "zero1":
        found.append({"engine": "fsdp"})
    if given.shard:
        found.append({"shard": 0})
    weaker = ["none", "activation", "selective", "full"]
    place = weaker.index(given.recompute) if given.recompute in weaker else len(weaker)
    uses_scores = search.config.model.attention == "math"
    found += [{"recompute": kind} for kind in weaker[place + 1 :] if kind != "selective" or uses_scores]
    if given.tensor > 1 and not given.sequence:
        found.append({"sequence": True})
    found += [{"micro_batch": given.micro_batch // times} for times in (2, 4, 8) if given.micro_batch % times == 0]
    if given.schedule in ("gpipe", "zb-h1"):
        found.append({"schedule": "1f1b"})
    even: Change = {"stages": "even"} if not isinstance(given.stages, str) else {}
    found += [{"tensor": given.tensor * times} for times in (2, 4, 8)]
    found += [{"pipeline": given.pipeline * times, **even} for times in (2, 4, 8)]
    found += [{"context": given.context * times} for times in (2, 4)]
    return found
