"""Initial weights: a function of the run's seed and the weight's name, independent of the layout.

The full tensor is a matrix of normal values in tiles of 2^20 values, up to 1,024 columns wide. Each tile is drawn on
the CPU from a generator whose state is a hash of (seed, name, tile). A rank draws the tiles of its shard alone, so
every layout starts with the same model, and the work is divided over ranks of tp, and of dp under FSDP.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamMeta

TILE_NUMEL, TILE_COLUMNS = 2**20, 1024
INIT_VERSION = 2  # raised where a seed gives other values; 1 had generators with 32-bit seeds, so some tiles were equal
INIT = "init_version"  # key in a checkpoint's origin: the version with which the run drew its weights

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


def _state_of(seed: int, name: str, tile: int) -> Tensor:
    """A state of torch's CPU generator with all 624 words from a hash: of a seed the generator reads only 32 bits."""
    state = torch.Generator("cpu").get_state()  # seed, left and seeded, next, the words in 8 bytes each, normal values
    words = hashlib.shake_256(f"{seed}/{name}/{tile}".encode()).digest(624 * 4)
    state.numpy().view(np.uint64)[3:627] = np.frombuffer(words, "<u4")
    return state


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
    full tensor on each rank, from torch's generator, which has the same state on all.
    """
    dtype, rows = dtype or parameter.dtype, slice(first_row, first_row + len(parameter))
    if callable(meta.init):
        full = torch.empty(meta.shape, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(_state_of(seed, name, 0))
            meta.init(full)
        parameter.copy_(meta.shard.split(full, tp.rank, tp.size)[rows].to(dtype))
    elif meta.init != "normal":
        parameter.fill_(1.0 if meta.init == "ones" else 0.0)
    else:
        table, (height, width) = parameter.view(len(parameter), -1), (meta.shape[0], prod(meta.shape[1:]))
        columns = min(width, TILE_COLUMNS)
        tile_size = TILE_NUMEL // columns, columns

        def draw(area: tuple[Area, Area]) -> None:
            (row, column), local = area
            i, j = row.start // tile_size[0], column.start // tile_size[1]
            top, left = i * tile_size[0], j * tile_size[1]
            size = min(tile_size[0], height - top), min(tile_size[1], width - left)
            generator = torch.Generator("cpu")
            generator.set_state(_state_of(seed, name, i * -(-width // columns) + j))
            tile = torch.randn(size, generator=generator, dtype=torch.float32)
            inside = tile[row.start - top : row.stop - top, column.start - left : column.stop - left]
            with torch.no_grad():  # which is a setting of each thread
                values = (inside * meta.std).to(dtype).to(parameter.dtype)
                # From pinned memory a GPU copies while this thread draws the next tile.
                table[local].copy_(values.pin_memory() if table.is_cuda else values, non_blocking=True)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw, _tiles(meta, tp, rows, tile_size)))


Area = tuple[slice, slice]
"""Rows and columns."""


def _tiles(meta: ParamMeta, tp: Group, local_rows: slice, tile: tuple[int, int]) -> Iterator[tuple[Area, Area]]:
    """The areas of single tiles that this rank's shard has: in the full tensor, and in the chosen rows of the shard."""
    num_rows, num_columns = meta.shape[0], prod(meta.shape[1:])
    rows, columns = [(0, num_rows)], [(0, num_columns)]
    if meta.shard.dim == 0:
        rows = meta.shard.ranges(num_rows, tp.rank, tp.size)
    elif meta.shard.dim == 1:
        columns = meta.shard.ranges(num_columns, tp.rank, tp.size)
    for row, r in _by_tile(rows, local_rows, tile[0]):
        for column, c in _by_tile(columns, slice(0, num_columns), tile[1]):
            yield (row, column), (r, c)


def _by_tile(ranges: list[tuple[int, int]], chosen: slice, tile: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of a dimension, joined in the shard, divided at the borders of tiles and restricted to `chosen` places of
    the shard: each in the full tensor, and relative to the first chosen place."""
    position = 0
    for first, last in ranges:
        here = max(first, first + chosen.start - position)
        end = min(last, first + chosen.stop - position)
        while here < end:
            stop = min(end, (here // tile + 1) * tile)
            place = position + here - first - chosen.start
            yield slice(here, stop), slice(place, place + stop - here)
            here = stop
        position += last - first
