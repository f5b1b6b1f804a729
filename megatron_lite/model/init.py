"""What a weight starts as: a function of the run's seed and the weight's name, never of the layout.

The whole tensor is a sequence of normal numbers in blocks of 2^20, each drawn on the CPU from a generator
that is seeded by a hash of (seed, name, block). A rank draws the blocks that its piece touches, one at a
time, so memory stays bounded and any number of ranks start with the same model.
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


def _block_seed(seed: int, name: str, block: int) -> int:
    # 4 bytes: torch's CPU generator reads no more of a seed.
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _normal_run(seed: int, name: str, numel: int) -> Callable[[int, int], Tensor]:
    """A function (start, stop) -> that run of the tensor's `numel` standard normal numbers, in fp32."""

    @lru_cache(maxsize=1)  # neighbouring runs share a block
    def draw(block: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(_block_seed(seed, name, block))
        return torch.randn(min(BLOCK, numel - block * BLOCK), generator=generator, dtype=torch.float32)

    def run(start: int, stop: int) -> Tensor:
        first, last = start // BLOCK, (stop - 1) // BLOCK
        blocks = range(first, last + 1)
        pieces = [draw(i)[max(start - i * BLOCK, 0) : min(stop - i * BLOCK, BLOCK)] for i in blocks]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return run


def _fill_normal(out: Tensor, meta: ParamMeta, seed: int, name: str, tp: Group) -> None:
    """Writes this rank's rows and columns of N(0, std), some rows at a time.

    out   [rows/tp, cols] or [rows, cols/tp]   as `meta.shard` cuts the whole [rows, cols]
    """
    num_rows, num_columns = meta.shape[0], prod(meta.shape[1:])
    run = _normal_run(seed, name, num_rows * num_columns)
    rows, columns = [(0, num_rows)], [(0, num_columns)]
    if meta.shard.dim == 0:
        rows = meta.shard.ranges(num_rows, tp.rank, tp.size)
    elif meta.shard.dim == 1:
        columns = meta.shard.ranges(num_columns, tp.rank, tp.size)
    at_once = max(1, BLOCK // num_columns)
    written = 0
    for first, last in rows:
        for row in range(first, last, at_once):
            until = min(row + at_once, last)
            whole = run(row * num_columns, until * num_columns).view(until - row, num_columns)
            mine = [whole[:, a:b] for a, b in columns]
            piece = mine[0] if len(mine) == 1 else torch.cat(mine, dim=1)
            out[written : written + until - row] = (piece * meta.std).view(until - row, *out.shape[1:])
            written += until - row


@torch.no_grad()
def fill(parameter: Tensor, meta: ParamMeta, *, seed: int, name: str, tp: Group) -> None:
    """Gives this rank's piece of a parameter its first values, in its own dtype and on its device.

    Drawn in fp32 whatever the dtype, so that every precision starts from the same model. `name` is the
    global name, or that of the tensor of which this one is a tied copy.
    """
    if meta.init == "zeros":
        parameter.zero_()
    elif meta.init == "ones":
        parameter.fill_(1.0)
    else:
        _fill_normal(parameter, meta, seed, name, tp)
