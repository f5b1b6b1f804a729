"""Megatron's `.bin/.idx` pair: the tokens of a corpus in one flat file, and the start of each sequence.

`.bin` contains the tokens. `.idx` is little-endian: magic, version, dtype code, two counts, then
int32 lengths, int64 byte offsets and int64 document ends (positions in the list of sequences, after a leading 0).
Both are memory-mapped, so all processes of a machine share the pages.
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py; written here to be equal byte for byte.
"""

import os
import struct
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_lite.data.corpus_info import CorpusInfo, checksum, info_path, merged, read_info, write_info
from megatron_lite.errors import DataError

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
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

CHECKED_AT_ONCE = 1 << 16  # sequences; their intermediate results fit into the processor's cache


def optimal_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron stores token ids of this vocabulary in: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """The sequences of `prefix.bin`, read in place.

    `sequence_lengths` int32 [S], `sequence_pointers` int64 [S] in bytes, `document_indices` int64 [D + 1].
    A returned sequence is a read-only view of the file. `info` is the record of `preprocess`, or None.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        index = idx_path(prefix)
        _require(index, prefix)
        _require(bin_path(prefix), prefix)
        self.dtype, num_sequences, num_ends = _read_header(index)
        expected_bytes = HEADER.size + 12 * num_sequences + 8 * num_ends
        found_bytes = index.stat().st_size
        if found_bytes != expected_bytes:
            raise DataError(
                f"{index}: {'truncated' if found_bytes < expected_bytes else 'too long'}: {num_sequences:,} sequences "
                f"and {num_ends:,} document ends need {expected_bytes:,} bytes, the file has {found_bytes:,}; "
                "copy it again or run preprocess again"
            )
        if num_sequences == 0:
            raise DataError(f"{index}: the corpus is empty; run preprocess on files that contain text")
        raw = np.memmap(index, mode="r", dtype=np.uint8)
        self.info = read_info(prefix, raw)
        at = HEADER.size
        self.sequence_lengths: np.ndarray = np.frombuffer(raw, "<i4", num_sequences, at)
        self.sequence_pointers: np.ndarray = np.frombuffer(raw, "<i8", num_sequences, at + 4 * num_sequences)
        self.document_indices: np.ndarray = np.frombuffer(raw, "<i8", num_ends, at + 12 * num_sequences)
        _check_document_ends(index, self.document_indices, num_sequences)
        self.num_bytes = _check_pointers(index, self.sequence_lengths, self.sequence_pointers, self.dtype.itemsize)
        path = bin_path(prefix)
        found_bytes = path.stat().st_size
        if found_bytes != self.num_bytes:
            raise DataError(
                f"{path}: has {found_bytes:,} bytes, but its .idx describes {self.num_bytes:,}; copy both files again"
            )
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
    for path in (idx_path(prefix), bin_path(prefix)):
        _require(path, prefix)


def _require(path: Path, prefix: str | os.PathLike[str]) -> None:
    if path.is_file():
        return
    text = os.fspath(prefix)
    stem = text.removesuffix(".bin").removesuffix(".idx")
    near = sorted(p.with_suffix("") for p in Path(stem).parent.glob(f"{Path(stem).name}*.idx"))
    hint = f"; did you mean {near[0]}?" if near and os.fspath(near[0]) != text else ""
    raise DataError(f"{path}: no such file; give the prefix of a corpus, its path without .bin or .idx{hint}")


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
            raise DataError(
                f"{index}: sequence {start + first:,} has length {lengths[start + first]:,} at byte "
                f"{pointers[start + first]:,}, but the previous one ends at byte {expected[first]:,}; "
                "the file is damaged: copy it again or run preprocess again"
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
        raise DataError(f"{index}: {problem}; the file is damaged: copy it again or run preprocess again")


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path}: not a Megatron index: it starts with {head[: len(MAGIC)]!r}, expected {MAGIC!r}; "
            "write the corpus with megatron-lite preprocess or Megatron's preprocess_data.py"
        )
    if len(head) < HEADER.size:
        raise DataError(f"{path}: truncated inside its {HEADER.size}-byte header; copy it again")
    _, version, code, num_sequences, num_ends = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: index format version {version}; this reads version {VERSION}")
    if code not in DTYPE_OF_CODE:
        raise DataError(f"{path}: token dtype code {code}; token ids have one of {sorted(DTYPE_OF_CODE)}")
    return DTYPE_OF_CODE[code], num_sequences, num_ends


class IndexedDatasetBuilder:
    """The builder writes a `.bin` item by item and its `.idx` at the end.

    An item is a sequence; `end_document` ends the document of all items since the previous call.
    """

    def __init__(self, bin_path: str | os.PathLike[str], dtype: Any) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE:
            raise DataError(f"{os.fspath(bin_path)}: tokens of dtype {self.dtype} have no code in the .idx format")
        self._file: BinaryIO = open(bin_path, "wb")  # noqa: SIM115  open until finalize or abandon
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        self._info: CorpusInfo | None = None  # of the corpora of add_index
        self._info_is_known = True

    def add_item(self, tokens: Any) -> None:
        """Append one sequence."""
        data = np.asarray(tokens, dtype=self.dtype)
        self._write(data, [data.size])

    def end_document(self) -> None:
        self._document_ends.append(len(self._lengths))

    def add_document(self, tokens: Any, lengths: list[int]) -> None:
        """Append one document of `len(lengths)` sequences, given as their concatenated tokens."""
        self._write(tokens, lengths)
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append `len(lengths)` documents of one sequence each, given as their concatenated tokens."""
        first = len(self._lengths)
        self._write(tokens, lengths)
        self._document_ends.frombytes(np.arange(first + 1, len(self._lengths) + 1, dtype=np.int64).tobytes())

    def _write(self, tokens: Any, lengths: Any) -> None:
        """Append sequences of these lengths, given as their concatenated tokens."""
        self._info_is_known = False
        self._file.write(np.asarray(tokens, dtype=self.dtype).tobytes())
        self._lengths.frombytes(np.asarray(lengths, dtype=np.int32).tobytes())

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append a full corpus; raises DataError if its dtype or tokenizer differs."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(f"{idx_path(prefix)}: has {other.dtype} tokens and cannot be appended to {self.dtype}")
        if other.info and self._info and other.info.tokenizer_hash != self._info.tokenizer_hash:
            raise DataError(
                f"{os.fspath(prefix)}: was written with the tokenizer {other.info.tokenizer} and cannot be appended to "
                f"a corpus of {self._info.tokenizer}; run preprocess with the same tokenizer"
            )
        self._info_is_known = self._info_is_known and other.info is not None
        self._info = merged(self._info, other.info) if self._info and other.info else self._info or other.info
        first = len(self._lengths)
        for start in range(0, other.num_bytes, 1 << 24):
            self._file.write(other._bytes[start : min(start + (1 << 24), other.num_bytes)].tobytes())
        self._lengths.frombytes(other.sequence_lengths.astype(np.int32).tobytes())
        self._document_ends.frombytes((other.document_indices[1:] + first).astype(np.int64).tobytes())

    def finalize(self, idx_path: str | os.PathLike[str], info: CorpusInfo | None = None) -> None:
        """Flush the `.bin` to disk and write the `.idx` and the record: `info`, or that of the appended corpora.

        An older record under this name is deleted.
        """
        _close_durably(self._file)
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        code = CODE_OF_DTYPE[self.dtype]
        ends = np.frombuffer(self._document_ends, dtype=np.int64)
        head = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(ends))
        parts = [head, lengths.astype("<i4").data, pointers.data, ends.astype("<i8").data]
        record = info_path(os.fspath(idx_path).removesuffix(".idx"))
        record.unlink(missing_ok=True)
        if info := info or (self._info if self._info_is_known else None):
            write_info(record, replace(info, idx_crc32=checksum(*parts)))
        with open(idx_path, "wb") as file:
            for part in parts:
                file.write(part)
            _close_durably(file)

    def abandon(self) -> None:
        """Close the `.bin` without an index, after an error; the caller deletes it."""
        self._file.close()


def _close_durably(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
