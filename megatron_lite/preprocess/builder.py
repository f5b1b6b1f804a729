"""The writer of Megatron's `.bin/.idx` pair, which `data/indexed.py` reads, and of the record beside it."""

import json
import os
from array import array
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_lite.data.corpus_info import CorpusInfo, checksum, info_path
from megatron_lite.data.indexed import DTYPE_OF_CODE, HEADER, MAGIC, VERSION, IndexedDataset, idx_path
from megatron_lite.errors import DataError

CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


def optimal_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron stores token ids of this vocabulary in: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


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


def merged(first: CorpusInfo, second: CorpusInfo) -> CorpusInfo:
    """The record of the concatenation of two corpora of one tokenizer, without the checksum of its `.idx`."""
    return replace(
        first,
        documents=first.documents + second.documents,
        tokens=first.tokens + second.tokens,
        source_bytes=first.source_bytes + second.source_bytes,
        options=first.options if first.options == second.options else {},
        idx_crc32="",
    )


def write_info(path: Path, info: CorpusInfo) -> None:
    """Write the file and flush it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(asdict(info), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
