"""Files that are not UTF-8 text: how their content begins, whatever their names, and what to do with them."""

import re
from pathlib import Path
from typing import NamedTuple

from megatron_lite.errors import ConfigError
from megatron_lite.files import read_file


class Format(NamedTuple):
    """A format of files that are not text."""

    name: str
    advice: str


_UNPACK, _EXPORT = "unpack it first", "write its text as .jsonl first, such as with datasets.Dataset.to_json"
GZIP, ZSTANDARD = Format("gzip", _UNPACK), Format("Zstandard", _UNPACK)
FORMATS = {
    rb"\x1f\x8b": GZIP,
    rb"\x28\xb5\x2f\xfd": ZSTANDARD,
    rb"BZh[1-9]1AY&SY": Format("bzip2", _UNPACK),
    rb"\xfd7zXZ\x00": Format("xz", _UNPACK),
    rb"LZIP[\x00\x01]": Format("lzip", _UNPACK),
    rb"\x1f\x9d": Format("compress", _UNPACK),
    rb"\x04\x22\x4d\x18": Format("LZ4", _UNPACK),
    rb"7z\xbc\xaf\x27\x1c": Format("7z", _UNPACK),
    rb"PK\x03\x04": Format("a zip archive", _UNPACK),
    rb"Rar!\x1a\x07": Format("a RAR archive", _UNPACK),
    rb"(?s).{257}ustar[\x00 ]": Format("a tar archive", _UNPACK),
    rb"PAR1[\x00-\x1f]": Format("Parquet", _EXPORT),
    rb"ARROW1\x00|\xff\xff\xff\xff": Format("Arrow", _EXPORT),
    rb"Obj\x01": Format("Avro", _EXPORT),
    rb"\x89HDF": Format("HDF5", _EXPORT),
    rb"\x93NUMPY": Format("an array of numpy", _EXPORT),
    rb"SQLite format 3\x00": Format("an SQLite database", _EXPORT),
    rb"%PDF-\d": Format("PDF", "extract its text first"),
    rb"\xff\xfe|\xfe\xff|\x00\x00\xfe\xff": Format("UTF-16 or UTF-32", "convert it to UTF-8, such as with iconv"),
    rb"(?s)[^\x00]{0,300}\x00": Format("not text, because it has zero bytes", "convert it to UTF-8 text"),
}


def other_format(start: bytes) -> Format | None:
    """The format of content that begins so; None where it may be text."""
    return next((found for pattern, found in FORMATS.items() if re.match(pattern, start)), None)


def read_text(path: Path, wanted: str) -> str:
    """The content of a file in UTF-8, without a byte order mark. Its ends of lines stay as they are.

    Raises ConfigError for a file that cannot be read, whose message asks for `wanted`, or is not UTF-8.
    """
    content = b""
    try:
        content = read_file(path)
        return content.decode("utf-8-sig")  # text mode would end lines at a carriage return too
    except UnicodeDecodeError as error:
        if found := other_format(content):
            raise ConfigError(f"{path}: is {found.name}; {found.advice}") from None
        raise ConfigError(f"{path}: byte {error.start:,} is not UTF-8; convert the file to UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give {wanted}") from None
