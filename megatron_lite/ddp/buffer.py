"""One flat tensor for all gradients of a model chunk, divided into the buckets that are reduced in one call each.

Parameters are in reverse order of registration, because backward runs from the last layer to the first: the first
bucket is complete, and in flight, while backward still computes the rest. Each parameter's `main_grad` is a view, so
neither accumulation nor reduction copies a gradient.
Source: Li et al., PyTorch Distributed, arXiv 2006.15704, section 3.2.3 (buckets, reverse order).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lite.ddp.data_parallel import Params

# Elements. Parameters start, and shards end, at multiples of this number. A vector kernel handles the remainder of a
# tensor separately and may round it differently; with this alignment AdamW updates a shard to the same bits as the full
# tensor. A parameter in the flat memory of ZeRO-1 then starts at a cache line, in bf16 too.
ALIGNMENT = 32


@dataclass
class Bucket:
    """Gradients that are reduced in one call."""

    flat: Tensor  # [numel], a range of the buffer; its padding stays zero
    ranges: dict[str, slice]  # parameter name -> its range in `flat`, in buffer order
    missing: set[str] = field(default_factory=set)  # parameters whose last gradient has not arrived

    def shard(self, rank: int, size: int) -> slice:
        """The range of `flat` that belongs to one of `size` ranks."""
        numel = self.flat.numel() // size
        return slice(rank * numel, (rank + 1) * numel)

    def slices(self, part: slice) -> Iterator[tuple[str, slice, int]]:
        """The parameters in a range of `flat`: name, range in `flat`, first element of the parameter."""
        for name, of_parameter in self.ranges.items():
            start, stop = max(of_parameter.start, part.start), min(of_parameter.stop, part.stop)
            if start < stop:
                yield name, slice(start, stop), start - of_parameter.start


class GradBuffer:
    """`flat [numel]` in `dtype`; `views[name]` has the parameter's shape; `buckets` cover `flat` in order.

    The size of each bucket is a multiple of `num_shards`. A parameter in `alone` is the only one of its bucket, so that
    every rank that holds it shards it in the same places.
    """

    def __init__(
        self,
        params: Params,
        *,
        bucket_bytes: float,
        dtype: torch.dtype,
        num_shards: int = 1,
        alone: Collection[str] = (),
    ):
        ranges: list[dict[str, slice]] = []
        sizes: list[int] = []
        for names in _fill_buckets(params, bucket_bytes / dtype.itemsize, alone):
            ranges.append({})
            end = 0
            for name in names:
                ranges[-1][name] = slice(end, end + params[name].numel())
                end = _round_up(end + params[name].numel(), ALIGNMENT)
            sizes.append(_round_up(end, ALIGNMENT * num_shards))
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=next(iter(params.values())).device)
        self.buckets = [Bucket(*bucket) for bucket in zip(self.flat.split(sizes), ranges, strict=True)]
        self.views = {
            name: bucket.flat[place].view(params[name].shape)
            for bucket in self.buckets
            for name, place in bucket.ranges.items()
        }


def _fill_buckets(params: Params, max_numel: float, alone: Collection[str]) -> list[list[str]]:
    """The names in each bucket. A parameter larger than a bucket is the only one of its bucket: the gradient of a word
    embedding comes last and would delay the layers before it."""
    buckets: list[list[str]] = []
    room = 0.0
    for name, parameter in reversed(params.items()):
        if not buckets or parameter.numel() > room or name in alone:
            buckets.append([])
            room = max_numel
        buckets[-1].append(name)
        room = 0.0 if name in alone else room - _round_up(parameter.numel(), ALIGNMENT)
    return buckets


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
