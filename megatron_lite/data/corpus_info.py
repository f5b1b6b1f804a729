"""`PREFIX.info.json` beside a `.bin/.idx` pair: the origin of the corpus, above all its tokenizer.

Token ids mean nothing without their tokenizer. So `preprocess` records a hash of its tokenizer, and training compares
it. A checksum of the `.idx` detects the record of another corpus. Corpora of Megatron have no record and are valid too.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from zlib_ng import zlib_ng

from megatron_lite.errors import ConfigError, DataError


@dataclass(frozen=True)
class CorpusInfo:
    """The content of the file; other keys, of later versions, are ignored."""

    tokenizer: str  # the SPEC given to preprocess
    tokenizer_hash: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    source_bytes: int  # UTF-8 text that the tokens stand for
    options: dict  # of preprocess
    megatron_lite: str  # version
    idx_crc32: str  # of the full .idx


def info_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.info.json")


def checksum(*parts: np.ndarray | bytes | memoryview) -> str:
    """CRC-32 of a full `.idx`, in hexadecimal; 10 million documents take a tenth of a second."""
    value = 0
    for part in parts:
        value = zlib_ng.crc32(part, value)
    return f"{value:08x}"


def read_info(prefix: str | os.PathLike[str], index: np.ndarray) -> CorpusInfo | None:
    """The record of a corpus whose `.idx` has the bytes `index`; None without one."""
    path = info_path(prefix)
    advice = "run preprocess again, or delete this file to disable the tokenizer check"
    try:
        content = json.loads(path.read_bytes())
        values = {field.name: content[field.name] for field in fields(CorpusInfo)}
        if wrong := [field.name for field in fields(CorpusInfo) if type(values[field.name]) is not field.type]:
            raise TypeError(f"{wrong[0]} is {values[wrong[0]]!r}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error!r}); {advice}") from error
    if values["idx_crc32"] != checksum(index):
        raise DataError(f"{path}: describes another .idx; {advice}")
    return CorpusInfo(**values)


def check_tokenizers(infos: Iterable[tuple[str, CorpusInfo | None]], wanted: str) -> None:
    """Raise ConfigError if the tokenizer of a corpus has another hash than `wanted` (empty: that of the first corpus).

    `infos` has the prefix and the record of each corpus.
    """
    other = "data.tokenizer differs"
    for prefix, info in infos:
        if info is None:
            continue
        if not wanted:
            wanted, other = info.tokenizer_hash, f"{prefix} with {info.tokenizer}"
        if info.tokenizer_hash != wanted:
            raise ConfigError(
                f"{prefix}: was written with the tokenizer {info.tokenizer} (hash {info.tokenizer_hash[:12]}), but "
                f"{other} (hash {wanted[:12]}); use it, or data.tokenizer_check=false if both give the same ids"
            )
