"""Counts the bytes that collectives send, also those of torch's FSDP and DeepSpeed.

All collectives and messages pass through torch's dispatcher as operators of `c10d`. A rank sends the bytes of ring
algorithms: (n - 1)/n of a tensor for a reduce-scatter, an all-gather or an all-to-all, twice that for an all-reduce,
whatever the backend does.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

# For each operator: its kind, the argument with the full tensors, and how many times (n - 1)/n of them is sent.
COSTS = {
    "allreduce_": ("all-reduce", 0, 2),
    "allreduce_coalesced_": ("all-reduce", 0, 2),
    "_allgather_base_": ("all-gather", 0, 1),
    "allgather_": ("all-gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 1),
    "alltoall_base_": ("all-to-all", 1, 1),
}


class Wire(TorchDispatchMode):
    """Inside, `sent` counts the bytes that this rank sends, and `calls` the collectives, each by kind of collective.

    Tensors of fewer than `at_least` elements, such as losses and norms, are not counted.
    """

    def __init__(self, at_least: int):
        super().__init__()
        self.at_least = at_least
        self.sent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0] if func.namespace == "c10d" else ""
        if name == "send":
            self.sent["send"] += sum(tensor.nbytes for tensor in _tensors(args[0]))
            self.calls["send"] += 1
        elif name and name not in ("barrier", "wait_tensor", "recv_"):
            kind, place, times = COSTS[name]
            tensors = list(_tensors(args[place]))
            (group,) = (
                arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            )
            size = ProcessGroup.unbox(group).size()
            if sum(tensor.numel() for tensor in tensors) >= self.at_least:
                full_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                self.sent[kind] += times * full_bytes * (size - 1) / size
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def _tensors(arg: Any) -> Iterator[torch.Tensor]:
    """All tensors of a tensor or of nested lists."""
    if isinstance(arg, torch.Tensor):
        yield arg
    else:
        for item in arg:
            yield from _tensors(item)
