"""The content of a corpus in a few values, to compare corpora of other hosts, under other names or of another time.

Sizes, dates and names do not identify a corpus, and to read all of it could take hours. So the lengths and document
ends in the `.idx`, and the `.bin`, are read in full up to `FULL_BYTES` each; of a longer one blocks are read, evenly
spaced from its first to its last byte. A change between those blocks that keeps every size is not noticed.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from megatron_lite.data.blended import parse_paths
from megatron_lite.data.corpus_info import checksum
from megatron_lite.data.indexed import HEADER, bin_path, idx_path, read_header
from megatron_lite.errors import ConfigError, DataError

FULL_BYTES = 16 << 20
NUM_BLOCKS, BLOCK_BYTES = 32, 1 << 17
READERS = 16  # threads, which wait for a network file system

Identity = Mapping[str, Any]
"""Numbers of sequences, document ends and bytes, the dtype, and the checksums `idx` and `bin`; a JSON object."""


def identity(prefix: str | os.PathLike[str], of_start: Identity | None = None) -> Identity:
    """The identity of a corpus or, given that of a smaller one, of a start of the same size.

    A corpus that has only grown has a start with the identity of the earlier corpus.
    """
    dtype, num_sequences, num_ends = read_header(idx_path(prefix))
    with open(idx_path(prefix), "rb") as index, open(bin_path(prefix), "rb") as tokens:
        sizes = of_start or {"sequences": num_sequences, "ends": num_ends, "bytes": os.fstat(tokens.fileno()).st_size}
        # The pointers between both follow from the lengths, as every opening of a corpus checks.
        lengths = _blocks(index, HEADER.size, 4 * sizes["sequences"])
        ends = _blocks(index, HEADER.size + 12 * num_sequences, 8 * sizes["ends"])
        return {
            **{name: sizes[name] for name in ("sequences", "ends", "bytes")},
            "dtype": dtype.name,
            "idx": checksum(*lengths, *ends),
            "bin": checksum(*_blocks(tokens, 0, sizes["bytes"])),
        }


def identities(prefixes: Sequence[str]) -> list[Identity | str]:
    """For each corpus its identity, or the reason why it cannot be read."""

    def read(prefix: str) -> Identity | str:
        try:
            return identity(prefix)
        except (OSError, DataError) as error:
            return getattr(error, "strerror", None) or str(error)

    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, prefixes))


def identities_of(paths: Sequence[str]) -> list[Identity]:
    """The identities of the corpora of `data.paths`; none where it names other data, as for a custom dataset."""
    try:
        found = identities(parse_paths(paths).prefixes)
    except ConfigError:
        return []
    read = [one for one in found if not isinstance(one, str)]
    return read if len(read) == len(found) else []


def _blocks(file: BinaryIO, start: int, size: int) -> list[bytes]:
    """The bytes that stand for `size` bytes of a file from `start`."""
    if size <= FULL_BYTES:
        places, length = [0], size
    else:
        places, length = [n * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1) for n in range(NUM_BLOCKS)], BLOCK_BYTES
    return [os.pread(file.fileno(), length, start + place) for place in places]
