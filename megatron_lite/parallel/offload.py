"""Activation offload: between forward and backward, what autograd keeps waits in the host's memory.

Each tensor that an operation saves is copied to pinned memory on the way, and back when backward asks for it. Copies
are in the stream of the computation, so a tensor's memory is free for the next operation and nothing waits for the
host; what this costs is the time on the bus. Weights are saved by reference and stay where they are.
Source: `torch.autograd.graph.save_on_cpu`, which moves them too.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def offloaded(resident: Iterable[Tensor]) -> saved_tensors_hooks:
    """Around a forward: moves what it saves for backward, except `resident` tensors and views of them."""
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
