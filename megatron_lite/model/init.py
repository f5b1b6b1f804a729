"""Initial weights: a function of the run's seed and the weight's name, independent of the layout.

The full tensor is a sequence of normal values in blocks of 2^20. Each block is drawn on the CPU from a generator seeded
by a hash of (seed, name, block). A rank draws the blocks of its shard, one at a time, so memory is bounded and every
layout starts with the same model.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamMeta

BLOCK = 2**20


def _seed_of(seed: int, name: str, block: int) -> int:
    """4 bytes, because torch's CPU generator reads only 32 bits of a seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=4).digest(), "little")


def _normal_values(seed: int, name: str, numel: int) -> Callable[[int, int], Tensor]:
    """A function (start, stop) -> that slice of the tensor's `numel` standard normal values, in fp32."""

    @lru_cache(maxsize=1)  # neighbouring slices share a block
    def draw(block: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(_seed_of(seed, name, block))
        return torch.randn(min(BLOCK, numel - block * BLOCK), generator=generator, dtype=torch.float32)

    def values(start: int, stop: int) -> Tensor:
        blocks = range(start // BLOCK, (stop - 1) // BLOCK + 1)
        return torch.cat([draw(i)[max(start - i * BLOCK, 0) : min(stop - i * BLOCK, BLOCK)] for i in blocks])

    return values


@torch.no_grad()
def fill(parameter: Tensor, meta: ParamMeta, *, seed: int, name: str, tp: Group) -> None:
    """Set the initial values of this rank's shard of a parameter, some rows at a time.

    parameter   [rows/tp, columns] or [rows, columns/tp], as `meta.shard` shards the full [rows, columns]
    name        the global name; for a tied copy that of its original

    Values are drawn in fp32, so that every precision starts from the same model. A function as `meta.init` draws the
    full tensor on each rank, from torch's generator, which has the same seed on all.
    """
    if callable(meta.init):
        full = torch.empty(meta.shape, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(seed, name, 0))
            meta.init(full)
        parameter.copy_(meta.shard.split(full, tp.rank, tp.size))
        return
    if meta.init != "normal":
        parameter.fill_(1.0 if meta.init == "ones" else 0.0)
        return
    num_rows, num_columns = meta.shape[0], prod(meta.shape[1:])
    values = _normal_values(seed, name, num_rows * num_columns)
    rows, columns = [(0, num_rows)], [(0, num_columns)]
    if meta.shard.dim == 0:
        rows = meta.shard.ranges(num_rows, tp.rank, tp.size)
    elif meta.shard.dim == 1:
        columns = meta.shard.ranges(num_columns, tp.rank, tp.size)
    step = max(1, BLOCK // num_columns)
    position = 0  # in parameter
    for first, last in rows:
        for row in range(first, last, step):
            stop = min(row + step, last)
            full = values(row * num_columns, stop * num_columns).view(stop - row, num_columns)
            local = torch.cat([full[:, a:b] for a, b in columns], dim=1)
            parameter[position : position + stop - row] = (local * meta.std).view(stop - row, *parameter.shape[1:])
            position += stop - row
