"""One flat piece of memory for all gradients of a model chunk, cut into the buckets that are reduced at once.

Parameters lie in reverse order of registration, because backward runs from the last layer to the first: the
first bucket is complete, and travels, while the rest is still being computed. Each parameter's `main_grad` is
a view, so neither adding nor reducing ever copies a gradient into place.
Source: Li et al., PyTorch Distributed, arXiv 2006.15704, section 3.2.3 (buckets, reverse order).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

# Elements. Parameters start, and ranks' shares end, at multiples of this. A vector kernel treats what is left at the
# end of a tensor apart and may round it otherwise, so that only then is a share updated to the same bits as the whole;
# and a parameter among others in flat memory (ZeRO-1) then starts at a cache line, as one of its own does, in bf16 too.
ALIGNMENT = 32


@dataclass
class Bucket:
    """Gradients that are reduced in one call."""

    flat: Tensor  # [numel], a run of the buffer, with padding that stays zero
    starts: dict[str, int]  # of each parameter in `flat`, in buffer order
    sizes: dict[str, int]
    missing: set[str] = field(default_factory=set)  # whose last gradient is still to come

    def share(self, rank: int, size: int) -> slice:
        """The part of `flat` that is one rank's of `size`."""
        each = self.flat.numel() // size
        return slice(rank * each, (rank + 1) * each)

    def runs(self, part: slice) -> Iterator[tuple[str, slice, int]]:
        """What of the parameters lies in a part of `flat`: name, place in `flat`, first element of the parameter."""
        for name, start in self.starts.items():
            first, end = max(start, part.start), min(start + self.sizes[name], part.stop)
            if first < end:
                yield name, slice(first, end), first - start


class GradBuffer:
    """`flat [numel]` in `dtype`; `views[name]` has the parameter's shape; `buckets` cover `flat` in order.

    Each bucket divides into `shares` equal parts. Parameters in `alone` have a bucket of their own, which is then cut
    in the same places wherever else the parameter is.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        *,
        bucket_bytes: float,
        dtype: torch.dtype,
        shares: int = 1,
        alone: Collection[str] = (),
    ):
        device = next(iter(params.values())).device
        filled = _fill_buckets(list(reversed(params.items())), bucket_bytes / dtype.itemsize, alone)
        starts, sizes = [], []
        for names in filled:
            end, of_bucket = 0, {}
            for name in names:
                of_bucket[name] = end
                end = _round_up(end + params[name].numel(), ALIGNMENT)
            starts.append(of_bucket)
            sizes.append(_round_up(end, ALIGNMENT * shares))
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.views: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        for flat, of_bucket in zip(self.flat.split(sizes), starts, strict=True):
            self.buckets.append(Bucket(flat, of_bucket, {name: params[name].numel() for name in of_bucket}))
            for name, start in of_bucket.items():
                self.views[name] = flat[start : start + params[name].numel()].view(params[name].shape)


def _fill_buckets(params: list[tuple[str, nn.Parameter]], max_numel: float, alone: Collection[str]) -> list[list[str]]:
    """Names, bucket by bucket. A parameter larger than a bucket has one of its own: a word embedding, whose
    gradient comes last, would otherwise hold back the layers that arrived before it."""
    buckets: list[list[str]] = []
    room = 0.0
    for name, parameter in params:
        if not buckets or parameter.numel() > room or name in alone:
            buckets.append([])
            room = max_numel
        buckets[-1].append(name)
        room = 0.0 if name in alone else room - _round_up(parameter.numel(), ALIGNMENT)
    return buckets


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
