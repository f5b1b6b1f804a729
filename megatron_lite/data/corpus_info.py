"""`PREFIX.info.json` beside a `.bin/.idx` pair: the record of how a corpus was made, above all with which tokenizer.

Token ids mean nothing without their tokenizer. So `preprocess` records a hash of its tokenizer, and training compares
it. A checksum of the `.idx` detects the record of another corpus. Corpora written by Megatron-LM have no record; they
are accepted without a check.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from megatron_lite.crc32 import crc32
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.files import read_file
from megatron_lite.text import parse_strictly


@dataclass(frozen=True)
class CorpusInfo:
    """The content of `PREFIX.info.json`. Unknown keys, such as those of later versions, are ignored."""

    tokenizer: str  # the SPEC given to preprocess
    tokenizer_hash: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    source_bytes: int  # bytes of the UTF-8 text that was tokenized
    options: dict  # settings of the preprocess command, by name
    megatron_lite: str  # version that wrote the corpus
    idx_crc32: str  # CRC-32 of the full .idx file, in hexadecimal


def info_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.info.json")


def checksum(*parts: np.ndarray | bytes | memoryview) -> str:
    """The CRC-32 of the joined parts, in hexadecimal."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return f"{value:08x}"


def read_info(prefix: str | os.PathLike[str], index_crc32: str) -> CorpusInfo | None:
    """The record of the corpus, or None if it has no record. `index_crc32` is the checksum of its `.idx`.

    Raise DataError if the record cannot be read or describes another `.idx`.
    """
    path = info_path(prefix)
    advice = "run preprocess again, or delete this file to disable the tokenizer check"
    try:
        content = parse_strictly(read_file(path))
        values = {field.name: content[field.name] for field in fields(CorpusInfo)}
        for field in fields(CorpusInfo):
            value = values[field.name]
            if type(value) is not field.type or (field.type is int and not -1 <= value <= 1 << 53):
                raise TypeError(f"{field.name} is {value!r}"[:200])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error!r}); {advice}") from error
    if values["idx_crc32"] != index_crc32:
        raise DataError(f"{path}: does not belong to this .idx (checksums differ); {advice}")
    return CorpusInfo(**values)


def check_tokenizers(infos: Iterable[tuple[str, CorpusInfo | None]], wanted: str) -> None:
    """Raise ConfigError unless all records have the tokenizer hash `wanted` or, if that is empty, the same hash.

    `infos` has pairs of prefix and record; corpora without a record are skipped.
    """
    other = "data.tokenizer"
    for prefix, info in infos:
        if info is None:
            continue
        if not wanted:
            wanted, other = info.tokenizer_hash, f"{prefix} ({info.tokenizer})"
        if info.tokenizer_hash != wanted:
            raise ConfigError(
                f"{prefix}: was written with the tokenizer {info.tokenizer} (hash {info.tokenizer_hash[:12]}), but "
                f"{other} has hash {wanted[:12]}; use one tokenizer, or data.tokenizer_check=false for equal token ids"
            )
