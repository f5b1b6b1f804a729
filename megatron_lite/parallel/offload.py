"""Activation offload: tensors saved for backward stay in the host's memory until backward reads them.

Each storage is copied once, as a block of bytes, however many views of it are saved. On a GPU the copies run in their
own stream, to and from pinned memory, while the GPU computes: a copy waits for the operation that made its tensor, and
backward waits for the copies that it reads. The first read of a block starts all copies of this block and of the block
before it.
Compare `torch.autograd.graph.save_on_cpu`, which copies views one by one, in the stream of the computation, and also
moves weights.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_streams: dict[torch.device, torch.cuda.Stream] = {}
_latest: "Callable[[], _Offload | None]" = lambda: None  # the block that was stored last


@dataclass
class _Stored:
    """The bytes of a storage in the host's memory, and while backward needs them again on the device."""

    host: Tensor
    device: torch.device
    on_device: Tensor | None = None
    ready: torch.cuda.Event | None = None  # after the copy to the device

    def load(self) -> Tensor:
        """The bytes on the device; starts the copy, into memory of the computation's stream."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.host, device=self.device)
            with _copying(self.on_device):
                self.on_device.copy_(self.host, non_blocking=True)
                if self.device.type == "cuda":
                    self.ready = torch.cuda.Event()
                    self.ready.record()
        return self.on_device


class _Offload:
    """The storages that one block has saved."""

    def __init__(self, resident: Iterable[Tensor]):
        self.resident = {tensor.untyped_storage().data_ptr() for tensor in resident}
        # The storages keep their addresses in use during the forward.
        self.stored: dict[int, tuple[_Stored, torch.UntypedStorage | None]] = {}
        global _latest
        self.before, _latest = _latest, ref(self)

    def pack(self, x: Tensor) -> Any:
        storage = x.untyped_storage()
        if storage.data_ptr() in self.resident:
            return x
        if storage.data_ptr() not in self.stored:
            flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)  # type: ignore[call-overload]
            with _copying(flat):
                host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=x.is_cuda)
                host.copy_(flat, non_blocking=True)
            self.stored[storage.data_ptr()] = _Stored(host, x.device), storage
        return self.stored[storage.data_ptr()][0], x.dtype, x.shape, x.stride(), x.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        stored, dtype, *place = packed
        flat = stored.load()
        self.load_all()
        if (before := self.before()) is not None:
            before.load_all()
        if stored.ready is not None:
            stored.ready.wait(torch.cuda.current_stream(stored.device))
        return flat.view(dtype).as_strided(*place)

    def load_all(self) -> None:
        """Start all copies to the device that were not started, the last stored one first."""
        while self.stored:
            self.stored.popitem()[1][0].load()

    def end_forward(self) -> None:
        """Release the device's memory."""
        self.stored = {address: (stored, None) for address, (stored, _) in self.stored.items()}


def _copying(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in the stream of copies, after the work so far; `tensor` is in use there. Nothing on the CPU."""
    if not tensor.is_cuda:
        return nullcontext()
    if tensor.device not in _streams:
        _streams[tensor.device] = torch.cuda.Stream(tensor.device)
    stream = _streams[tensor.device]
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    tensor.record_stream(stream)
    return torch.cuda.stream(stream)


class offloaded(saved_tensors_hooks):
    """A context around a forward that moves its saved tensors, except `resident` ones and their views."""

    def __init__(self, resident: Iterable[Tensor]):
        self._offload = _Offload(resident)
        super().__init__(self._offload.pack, self._offload.unpack)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self._offload.end_forward()
