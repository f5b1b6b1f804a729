"""The content of a corpus in a few values, to compare corpora of other hosts, under other names or of another time.

To read all of it could take hours. So the lengths and document ends in the `.idx`, and the `.bin`, are read in full up
to `FULL_BYTES` each; of a longer one blocks are read, evenly spaced from its first to its last byte.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_lite.data.blended import parse_paths
from megatron_lite.data.corpus_info import checksum
from megatron_lite.data.indexed import HEADER, bin_path, idx_path, read_header
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.files import open_file

FULL_BYTES = 16 << 20
NUM_BLOCKS, BLOCK_BYTES = 32, 1 << 15
READERS = 16  # threads, which wait for a network file system

Identity = Mapping[str, Any]
"""Sizes and checksum of `idx` and `bin`, or the reason why they cannot be read; a JSON object."""


def identity(prefix: str, of_start: Identity | None = None) -> Identity:
    """The identity of a corpus or, given that of a smaller one, of a start of its size: a corpus that has only grown
    has a start with the identity of the earlier corpus."""
    try:
        dtype, sequences, ends = read_header(idx_path(prefix))
        sizes = {"sequences": sequences, "document_ends": ends, "dtype": dtype.name}
        size = bin_path(prefix).stat().st_size
        if of_start:
            sizes, size = {**of_start["idx"]}, of_start["bin"]["bytes"]
        # The pointers between both follow from the lengths, as every opening of a corpus checks.
        lengths = _blocks(idx_path(prefix), HEADER.size, 4 * sizes["sequences"])
        ends = _blocks(idx_path(prefix), HEADER.size + 12 * sequences, 8 * sizes["document_ends"])
        index = {**sizes, "dtype": dtype.name, "crc32": checksum(*lengths, *ends)}
        return {"idx": index, "bin": {"bytes": size, "crc32": checksum(*_blocks(bin_path(prefix), 0, size))}}
    except (OSError, DataError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return {"idx": reason, "bin": reason}


def identities(prefixes: Sequence[str]) -> list[Identity]:
    """The identity of each corpus."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(identity, prefixes))


def recorded_identities(paths: Sequence[str]) -> list[Identity]:
    """Those of the corpora in `data.paths`, for a checkpoint; none where one is missing, as for a custom dataset."""
    try:
        found = identities(parse_paths(paths).prefixes) if paths else []
    except ConfigError:  # a custom dataset may have any words
        return []
    return found if all(isinstance(one["idx"], dict) for one in found) else []


def _blocks(path: os.PathLike[str], start: int, size: int) -> list[bytes]:
    """The bytes that stand for `size` bytes of a file from `start`."""
    places, length = [0], size
    if size > FULL_BYTES:
        places, length = [n * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1) for n in range(NUM_BLOCKS)], BLOCK_BYTES
    with open_file(path) as file:
        return [os.pread(file.fileno(), length, start + place) for place in places]
