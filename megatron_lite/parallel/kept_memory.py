"""Memory of the CPU that one large tensor after another uses.

A new tensor of more than 32 MiB is new pages, which the system zeroes one by one while the first operation writes them.
"""

import math
import sys

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, as of torch's own tensors


class KeptMemory:
    """Memory for one tensor at a time."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._unused = self._references()

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor without values, in the dtype of `like`; in new memory while any tensor uses the old one."""
        size = math.prod(shape) * like.element_size()
        if len(self._bytes) < size + ALIGNMENT or self._references() > self._unused:
            self._bytes = np.empty(size + ALIGNMENT, np.uint8)
        start = -self._bytes.ctypes.data % ALIGNMENT
        storage = torch.from_numpy(self._bytes[start : start + size]).untyped_storage()
        # Not a view, which autograd restricts.
        return like.new_empty(0).set_(storage, 0, shape)  # type: ignore[call-overload]

    def _references(self) -> int:
        return sys.getrefcount(self._bytes)
