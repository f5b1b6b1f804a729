"""Cases of the parity matrix by their features, and a training whose first two steps show a mistake.

Adam divides a gradient by its size, so a gradient of twice the right size moves weights by the same. With `SHARP`,
epsilon dominates that size and an update is nearly proportional to its gradient: a weight after two steps differs if
any of its gradients does. The second step has moments of the first one.
"""

from typing import Any

from torch import Tensor

from tests.helpers.axes import SIZES, is_packed, sizes
from tests.helpers.layouts import BATCH, PACKING
from tests.helpers.tiny import train_tiny

SHARP = {"train__iterations": 2, "optim__eps": 1.0, "optim__lr": 1.0, "optim__warmup_iterations": 0}


def features(layout: dict[str, Any]) -> set[str]:
    """The parallel sizes above one and the other settings of a layout, without its micro-batch size."""
    others = {*PACKING, "train__micro_batch_size", *(f"parallel__{name}" for name in SIZES)}
    changes = {name: value for name, value in layout["changes"].items() if name not in others and value is not False}
    changes |= {name: size for name, size in sizes(layout).items() if size > 1}
    return {f"{name}={value}" for name, value in changes.items()} | ({"packed"} if is_packed(layout) else set())


def train(model: str, precision: str, num_layers: int, **changes: Any) -> dict[str, Any]:
    """The results of `SHARP` steps."""
    common = {"train__global_batch_size": BATCH, "model__num_layers": num_layers, "train__precision": precision}
    return train_tiny(model, **{**SHARP, **common, **changes})


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
