"""Cases of the parity matrix by their features, and a training whose first two steps show a mistake.

Adam divides a gradient by its size, so a gradient of twice the right size moves weights by the same. With `SHARP`,
epsilon dominates that size and an update is nearly proportional to its gradient: a weight after two steps differs if
any of its gradients does. The second step has moments of the first one.
"""

from typing import Any

from torch import Tensor

from tests.helpers.layouts import BATCH, PACKING
from tests.helpers.tiny import train_tiny

SHARP = {"train__iterations": 2, "optim__eps": 1.0, "optim__lr": 1.0, "optim__warmup_iterations": 0}


def is_packed(layout: dict[str, Any]) -> bool:
    return layout["changes"].items() >= PACKING.items()


def features(layout: dict[str, Any]) -> set[str]:
    """The parallel sizes above one and the other settings of a layout, without its micro-batch size."""
    changes = {name: value for name, value in layout["changes"].items() if name not in PACKING}
    sizes = {name: changes.pop(f"parallel__{name}", 1) for name in ("tensor", "pipeline", "context")}
    sizes["data"] = layout["ranks"] // (sizes["tensor"] * sizes["pipeline"] * sizes["context"])
    changes |= {name: size for name, size in sizes.items() if size > 1} | {"packed": is_packed(layout)}
    if sizes["context"] == 1:
        changes.pop("parallel__context_mode", None)
    changes.pop("train__micro_batch_size")
    return {f"{name}={value}" for name, value in changes.items() if value is True or value not in (1, False)}


def train(model: str, precision: str, num_layers: int, **changes: Any) -> dict[str, Any]:
    """The results of `SHARP` steps."""
    sizes = {"train__global_batch_size": BATCH, "model__num_layers": num_layers, "train__precision": precision}
    return train_tiny(model, **{**SHARP, **sizes, **changes})


def differences(got: dict[str, Any], truth: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of losses, of gradient norms and of each weight; raises if names differ."""
    assert got["weights"].keys() == truth["weights"].keys()
    found = {name: _relative(got[name], truth[name]) for name in ("loss", "grad_norm")}
    weights = {
        name: (got["weights"][name] - want).abs().max() / want.abs().max() for name, want in truth["weights"].items()
    }
    return found | {name: float(value) for name, value in weights.items()}


def _relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs() / b.abs()).max())
