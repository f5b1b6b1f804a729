"""Counts what collectives put on the wire, whoever calls them: ours, torch's FSDP or DeepSpeed.

They all pass through torch's dispatcher as operators of `c10d`. Bytes that a rank sends are those of ring algorithms:
(n - 1)/n of a tensor for a reduce-scatter or an all-gather, twice that for an all-reduce, whatever the backend does.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

# Of each operator: the argument with the whole tensors, and how often (n - 1)/n of them travel.
COSTS = {
    "allreduce_": ("all-reduce", 0, 2),
    "allreduce_coalesced_": ("all-reduce", 0, 2),
    "_allgather_base_": ("all-gather", 0, 1),
    "allgather_": ("all-gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 1),
}


class Wire(TorchDispatchMode):
    """Inside, `sent` adds up the bytes that this rank sends by kind of collective, and `calls` their number.

    Tensors of fewer than `at_least` elements are left out: numbers that ranks agree on.
    """

    def __init__(self, at_least: int):
        super().__init__()
        self.at_least = at_least
        self.sent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (name := func.__name__.split(".")[0]) not in ("barrier", "wait_tensor"):
            kind, place, times = COSTS[name]
            tensors = list(_tensors(args[place]))
            (group,) = (
                arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            )
            size = ProcessGroup.unbox(group).size()
            if sum(tensor.numel() for tensor in tensors) >= self.at_least:
                whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                self.sent[kind] += times * whole * (size - 1) / size
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def _tensors(arg: Any) -> Iterator[torch.Tensor]:
    """Those of a tensor, or of lists of them."""
    if isinstance(arg, torch.Tensor):
        yield arg
    else:
        for item in arg:
            yield from _tensors(item)
