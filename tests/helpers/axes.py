"""What is special about a layout of `layouts.py`: the features by which covers of long lists are chosen."""

from collections.abc import Hashable
from typing import Any

from tests.helpers.cover import pairs
from tests.helpers.layouts import PACKING

SIZES = ("tensor", "context", "pipeline")


def sizes(layout: dict[str, Any]) -> dict[str, int]:
    """The number of ranks along each axis of the grid."""
    found = {name: layout["changes"].get(f"parallel__{name}", 1) for name in SIZES}
    return found | {"data": layout["ranks"] // (found["tensor"] * found["context"] * found["pipeline"])}


def is_packed(layout: dict[str, Any]) -> bool:
    return layout["changes"].items() >= PACKING.items()


def engine(layout: dict[str, Any]) -> str:
    """The data-parallel engine, in the words of `plan/layouts.py`."""
    changes = layout["changes"]
    return changes.get("parallel__ddp", "zero1" if changes.get("optim__distributed") else "local")


def axes(layout: dict[str, Any]) -> set[str]:
    """The kinds of parallelism that a layout combines. Two of them may be right alone and wrong together."""
    changes = layout["changes"]
    found = {name for name, size in sizes(layout).items() if size > 1} | {engine(layout)} - {"local"}
    schedule = changes.get("parallel__schedule", "1f1b")
    if "pipeline" in found or schedule != "1f1b":  # zb-h1 splits the backwards of one stage too
        found.add(schedule)
    return found | ({"sequence"} if changes.get("parallel__sequence") else set())


def settings(layout: dict[str, Any]) -> set[str]:
    """Everything else that a layout sets, and which axes have more than two ranks. Of numbers only the names count."""
    others = {*PACKING, "parallel__schedule", "train__micro_batch_size", *(f"parallel__{name}" for name in SIZES)}
    changes = {name: value for name, value in layout["changes"].items() if name not in others}
    packed = {"packed"} if is_packed(layout) else set()
    large = {f"more than two: {name}" for name, size in sizes(layout).items() if size > 2}
    texts = {f"{name}={value}" for name, value in changes.items() if isinstance(value, str)}
    return {*changes, *texts} | packed | large


def num_layers(layout: dict[str, Any]) -> int:
    """The fewest layers that a layout needs: one for each stage, but two for `uniform:2`, and two without stages."""
    changes = layout["changes"]
    if "parallel__pipeline_layout" in changes:
        return 6
    stages = changes.get("parallel__pipeline", 1) * changes.get("parallel__virtual_pipeline", 1)
    return max(2, stages * (2 if changes.get("train__recompute") == "uniform:2" else 1))


def parts(model: str, layout: dict[str, Any]) -> set[Hashable]:
    """Every setting, and every pair of kinds of parallelism."""
    return {model, *settings(layout), *pairs(axes(layout))}
