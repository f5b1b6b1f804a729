"""Activation offload: tensors saved for backward stay in the host's memory until backward reads them.

Copies to and from pinned memory run in the stream of the computation. So memory is free for the next operation, the
host does not wait, and the cost is the time on the bus. Source: `torch.autograd.graph.save_on_cpu`, which also moves
weights; here they stay.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def offloaded(resident: Iterable[Tensor]) -> saved_tensors_hooks:
    """A context around a forward that moves its saved tensors, except `resident` ones and their views."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in resident}

    def pack(x: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if x.untyped_storage().data_ptr() in storages:
            return x
        host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        return x.device, host.copy_(x, non_blocking=True)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)
