"""AdamW and its parameter groups: weight decay acts on matrices and embeddings, not on norms and biases."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.schema import OptimConfig
from megatron_lite.parallel.shard import ParamTable

MOMENTS = ("exp_avg", "exp_avg_sq")


def decay_groups(weights: dict[str, Tensor], table: ParamTable, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer, with and without decay; each keeps the order of `weights`."""
    return [
        {"params": [weight for name, weight in weights.items() if table[name].decay], "weight_decay": weight_decay},
        {"params": [weight for name, weight in weights.items() if not table[name].decay], "weight_decay": 0.0},
    ]


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the decorators that load torch's compiler, which takes a second of each rank's start.

    They exclude the optimizer from compilation, and nothing here compiles it.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_adam(
    params: dict[str, Tensor], table: ParamTable, optim: OptimConfig, kind: type[torch.optim.AdamW] = AdamW
) -> torch.optim.AdamW:
    """AdamW over named tensors, with the settings of `optim`; DeepSpeed accepts only torch's own class as `kind`."""
    groups = decay_groups(params, table, optim.weight_decay)
    is_fused = all(param.device.type != "meta" for param in params.values())
    return kind(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=is_fused)


def allocate_moments(adam: torch.optim.AdamW, params: Iterable[Tensor]) -> None:
    """Allocate the state that AdamW would allocate in its first step, so that it can be saved or loaded before."""
    for param in params:
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        adam.state[param] = {"step": step, **{moment: torch.zeros_like(param) for moment in MOMENTS}}
