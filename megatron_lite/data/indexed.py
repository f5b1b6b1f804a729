"""Megatron's `.bin/.idx` pair: the tokens of a corpus in one flat file, and the start of each sequence.

`.bin` contains the tokens. `.idx` is little-endian: magic, version, dtype code, two counts, then
int32 lengths, int64 byte offsets and int64 document ends (positions in the list of sequences, after a leading 0).
Both are memory-mapped, so all processes of a machine share the pages.
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py; written here to be equal byte for byte.
"""

import os
import struct
from pathlib import Path

import numpy as np

from megatron_lite.data.corpus_info import checksum, read_info
from megatron_lite.errors import DataError
from megatron_lite.files import open_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, number of document ends

# Codes 6 and 7 are floating-point dtypes.
DTYPE_OF_CODE = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}

CHECKED_AT_ONCE = 1 << 16  # sequences; their intermediate results fit into the processor's cache


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """The sequences of `prefix.bin`, read in place.

    `sequence_lengths` int32 [S], `sequence_pointers` int64 [S] in bytes, `document_indices` int64 [D + 1].
    A returned sequence is a read-only view of the file. `info` is the record of `preprocess`, or None; `index_crc32` is
    the checksum of the full `.idx`.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        index = idx_path(prefix)
        check_exists(prefix)
        self.dtype, num_sequences, num_ends = read_header(index)
        expected_bytes = HEADER.size + 12 * num_sequences + 8 * num_ends
        found_bytes = index.stat().st_size
        if found_bytes != expected_bytes:
            raise _damaged(
                f"{index}: has {found_bytes:,} bytes, but {num_sequences:,} sequences and {num_ends:,} document ends "
                f"need {expected_bytes:,}"
            )
        if num_sequences == 0:
            raise DataError(f"{index}: the corpus is empty; run preprocess on files that contain text")
        raw = np.memmap(index, mode="r", dtype=np.uint8)
        self.index_crc32 = checksum(raw)
        self.info = read_info(prefix, self.index_crc32)
        at = HEADER.size
        self.sequence_lengths: np.ndarray = np.frombuffer(raw, "<i4", num_sequences, at)
        self.sequence_pointers: np.ndarray = np.frombuffer(raw, "<i8", num_sequences, at + 4 * num_sequences)
        self.document_indices: np.ndarray = np.frombuffer(raw, "<i8", num_ends, at + 12 * num_sequences)
        _check_document_ends(index, self.document_indices, num_sequences)
        self.num_bytes = _check_pointers(index, self.sequence_lengths, self.sequence_pointers, self.dtype.itemsize)
        path = bin_path(prefix)
        found_bytes = path.stat().st_size
        if found_bytes != self.num_bytes:
            raise _damaged(f"{path}: has {found_bytes:,} bytes, but its .idx describes {self.num_bytes:,}")
        # The operating system cannot map an empty file.
        self._bytes: np.ndarray = np.memmap(path, mode="r", dtype=np.uint8) if found_bytes else np.empty(0, np.uint8)

    @property
    def num_tokens(self) -> int:
        return self.num_bytes // self.dtype.itemsize

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, one sequence after another: a view of the file."""
        return np.frombuffer(self._bytes, self.dtype)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of a sequence from `offset` (None: to its end), in the dtype of the file."""
        if length is None:
            length = int(self.sequence_lengths[sequence]) - offset
        start = int(self.sequence_pointers[sequence]) + offset * self.dtype.itemsize
        return np.frombuffer(self._bytes, self.dtype, length, start) if length else np.empty(0, self.dtype)


def check_exists(prefix: str | os.PathLike[str]) -> None:
    """Raise DataError if the `.idx` or the `.bin` of a corpus is missing."""
    missing = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if missing:
        text = os.fspath(prefix)
        stem = text.removesuffix(".bin").removesuffix(".idx")
        near = sorted(path.with_suffix("") for path in Path(stem).parent.glob(f"{Path(stem).name}*.idx"))
        hint = f"; did you mean {near[0]}?" if near and os.fspath(near[0]) != text else ""
        raise DataError(f"{missing[0]}: no such file; give the prefix of a corpus, its path without .bin or .idx{hint}")


def _damaged(problem: str) -> DataError:
    return DataError(f"{problem}; copy both files again, or run preprocess again")


def _check_pointers(index: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """The number of bytes of all sequences; raises DataError unless each starts at the end of the previous one."""
    end = 0
    for start in range(0, len(lengths), CHECKED_AT_ONCE):
        part = slice(start, start + CHECKED_AT_ONCE)
        ends = np.cumsum(lengths[part], dtype=np.int64)
        ends *= itemsize
        ends += end
        expected = np.concatenate(([end], ends[:-1]))
        bad = (lengths[part] < 0) | (pointers[part] != expected)
        if bad.any():
            first = int(bad.argmax())
            raise _damaged(
                f"{index}: sequence {start + first:,} has length {lengths[start + first]:,} at byte "
                f"{pointers[start + first]:,}, but the previous one ends at byte {expected[first]:,}"
            )
        end = int(ends[-1])
    return end


def _check_document_ends(index: Path, ends: np.ndarray, num_sequences: int) -> None:
    """Raise DataError unless documents cover all sequences in order; Megatron's empty texts have no sequences."""
    problem = ""
    if len(ends) == 0 or int(ends[-1]) != num_sequences:
        problem = f"the last document does not end at sequence {num_sequences:,}"
    elif int(ends[0]) != 0:
        problem = f"the first document starts at sequence {ends[0]:,}, not at 0"
    for start in range(0, len(ends), CHECKED_AT_ONCE):
        part = ends[start : start + CHECKED_AT_ONCE + 1]
        decreases = part[1:] < part[:-1]
        if not problem and decreases.any():
            document = start + int(decreases.argmax())
            problem = f"document {document:,} ends at sequence {ends[document + 1]:,}, before its start"
    if problem:
        raise _damaged(f"{index}: {problem}")


def read_header(path: Path) -> tuple[np.dtype, int, int]:
    with open_file(path) as file:
        head = file.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: starts with {head[: len(MAGIC)]!r}, not {MAGIC!r}; write the corpus with preprocess")
    if len(head) < HEADER.size:
        raise _damaged(f"{path}: has {len(head)} bytes, less than its header of {HEADER.size}")
    _, version, code, num_sequences, num_ends = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: index format version {version}; this reads version {VERSION}")
    if code not in DTYPE_OF_CODE:
        raise DataError(f"{path}: token dtype code {code}; token ids have one of {sorted(DTYPE_OF_CODE)}")
    return DTYPE_OF_CODE[code], num_sequences, num_ends
