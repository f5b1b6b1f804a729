"""Initial weights: a function of the run's seed and the weight's name, independent of the layout.

The full tensor is a matrix of normal values in tiles of 1,024 x 1,024. Each tile is drawn on the CPU from a generator
seeded by a hash of (seed, name, tile). A rank draws the tiles of its shard alone, so every layout starts with the same
model, and the work is divided over ranks of tp, and of dp under FSDP.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Literal

import torch
from torch import Tensor

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamMeta

TILE = 1024

Start = Literal["drawn", "empty", "meta"]
_start: Start = "drawn"


@contextmanager
def starting(how: Start) -> Iterator[None]:
    """A context in which `initialize_parameters` draws values, or leaves memory without values for a checkpoint to
    fill, or leaves parameters on the meta device for an engine to allocate."""
    global _start
    before, _start = _start, how
    try:
        yield
    finally:
        _start = before


def start() -> Start:
    """How parameters start now."""
    return _start


def _seed_of(seed: int, name: str, *place: int) -> int:
    """4 bytes, because torch's CPU generator reads only 32 bits of a seed."""
    text = "/".join(map(str, (seed, name, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


@torch.no_grad()
def fill(
    parameter: Tensor,
    meta: ParamMeta,
    *,
    seed: int,
    name: str,
    tp: Group,
    first_row: int = 0,
    dtype: torch.dtype | None = None,
) -> None:
    """Set the initial values of this rank's shard of a parameter, or of some of its rows.

    parameter   [rows/tp, columns] or [rows, columns/tp], as `meta.shard` shards the full [rows, columns]; or the rows
                of it from `first_row` on
    name        the global name; for a tied copy that of its original
    dtype       that of the weight, if the parameter is a wider master of it

    Values are drawn in fp32, so that every precision starts from the same model. A function as `meta.init` draws the
    full tensor on each rank, from torch's generator, which has the same seed on all.
    """
    dtype, rows = dtype or parameter.dtype, slice(first_row, first_row + len(parameter))
    if callable(meta.init):
        full = torch.empty(meta.shape, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(seed, name, 0))
            meta.init(full)
        parameter.copy_(meta.shard.split(full, tp.rank, tp.size)[rows].to(dtype))
    elif meta.init != "normal":
        parameter.fill_(1.0 if meta.init == "ones" else 0.0)
    else:
        table, shape = parameter.view(len(parameter), -1), (meta.shape[0], prod(meta.shape[1:]))

        def draw(area: tuple[Area, Area]) -> None:
            (row, column), (r, c) = area
            i, j = row.start // TILE, column.start // TILE
            size = (min(TILE, shape[0] - i * TILE), min(TILE, shape[1] - j * TILE))
            generator = torch.Generator("cpu").manual_seed(_seed_of(seed, name, i, j))
            tile = torch.randn(size, generator=generator, dtype=torch.float32)
            inside = tile[row.start - i * TILE : row.stop - i * TILE, column.start - j * TILE : column.stop - j * TILE]
            with torch.no_grad():  # which is a setting of each thread
                table[r, c] = (inside * meta.std).to(dtype).to(parameter.dtype)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw, _tiles(meta, tp, rows)))


Area = tuple[slice, slice]
"""Rows and columns."""


def _tiles(meta: ParamMeta, tp: Group, local_rows: slice) -> Iterator[tuple[Area, Area]]:
    """The areas of single tiles that this rank's shard has: in the full tensor, and in the chosen rows of the shard."""
    num_rows, num_columns = meta.shape[0], prod(meta.shape[1:])
    rows, columns = [(0, num_rows)], [(0, num_columns)]
    if meta.shard.dim == 0:
        rows = meta.shard.ranges(num_rows, tp.rank, tp.size)
    elif meta.shard.dim == 1:
        columns = meta.shard.ranges(num_columns, tp.rank, tp.size)
    for row, r in _by_tile(rows, local_rows):
        for column, c in _by_tile(columns, slice(0, num_columns)):
            yield (row, column), (r, c)


def _by_tile(ranges: list[tuple[int, int]], chosen: slice) -> Iterator[tuple[slice, slice]]:
    """Ranges of a dimension, joined in the shard, divided at the borders of tiles and restricted to `chosen` places of
    the shard: each in the full tensor, and relative to the first chosen place."""
    position = 0
    for first, last in ranges:
        here = max(first, first + chosen.start - position)
        end = min(last, first + chosen.stop - position)
        while here < end:
            stop = min(end, (here // TILE + 1) * TILE)
            place = position + here - first - chosen.start
            yield slice(here, stop), slice(place, place + stop - here)
            here = stop
        position += last - first
