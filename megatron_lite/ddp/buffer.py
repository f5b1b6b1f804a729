"""One flat piece of memory for all gradients of a model chunk, cut into the buckets that are reduced at once.

Parameters lie in reverse order of registration, because backward runs from the last layer to the first: the
first bucket is complete, and travels, while the rest is still being computed. Each parameter's `main_grad` is
a view, so neither adding nor reducing ever copies a gradient into place.
Source: Li et al., PyTorch Distributed, arXiv 2006.15704, section 3.2.3 (buckets, reverse order).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Bucket:
    """Gradients that are reduced in one call."""

    flat: Tensor  # [numel], a run of the buffer
    names: tuple[str, ...]  # in buffer order
    missing: set[str] = field(default_factory=set)  # whose last gradient is still to come


class GradBuffer:
    """`flat [numel]` in `dtype`; `views[name]` has the parameter's shape; `buckets` cover `flat` in order."""

    def __init__(self, params: dict[str, nn.Parameter], *, bucket_bytes: float, dtype: torch.dtype):
        device = next(iter(params.values())).device
        self.flat = torch.zeros(sum(p.numel() for p in params.values()), dtype=dtype, device=device)
        self.views: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        arriving = list(reversed(params.items()))
        start = 0
        for names in _fill_buckets(arriving, max_numel=bucket_bytes / dtype.itemsize):
            bucket_start = start
            for name in names:
                end = start + params[name].numel()
                self.views[name] = self.flat[start:end].view(params[name].shape)
                start = end
            self.buckets.append(Bucket(self.flat[bucket_start:start], tuple(names)))


def _fill_buckets(params: list[tuple[str, nn.Parameter]], max_numel: float) -> list[list[str]]:
    """Names, bucket by bucket. A parameter larger than a bucket has one of its own: a word embedding, whose
    gradient comes last, would otherwise hold back the layers that arrived before it."""
    buckets: list[list[str]] = []
    room = 0.0
    for name, parameter in params:
        if not buckets or parameter.numel() > room:
            buckets.append([])
            room = max_numel
        buckets[-1].append(name)
        room -= parameter.numel()
    return buckets
