"""Which parameters weight decay pulls on: matrices and embeddings, not norms and biases (`ParamMeta.decay`)."""

from typing import Any

from torch import Tensor

from megatron_lite.parallel.shard import ParamTable


def decay_groups(weights: dict[str, Tensor], table: ParamTable, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer, with and without decay; each keeps the order of `weights`."""
    return [
        {"params": [weight for name, weight in weights.items() if table[name].decay], "weight_decay": weight_decay},
        {"params": [weight for name, weight in weights.items() if not table[name].decay], "weight_decay": 0.0},
    ]
