"""Raw text: which files a corpus is made of, cut into pieces of work, and the documents in each piece.

A `.jsonl` file (also `.json`, `.ndjson`, and compressed as `.gz` or `.zst`) holds a document a line; any other file
is one document. Folders are searched for both, in sorted order; what lies in hidden folders or in those of installed
packages is not part of a project's own text. Pieces are about a megabyte and come in the order of the inputs, so
whoever works on them, and on how many processes, the documents keep their order.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from megatron_lite.data.languages import LANGUAGE_TAGS, TEXT_SUFFIXES, language_tag
from megatron_lite.errors import DataError

PIECE_BYTES = 1 << 20  # large beside the cost of handing it to a process, small beside a corpus
COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
NOT_ONES_OWN = ("site-packages", "dist-packages", "node_modules", "__pycache__")  # installed or made, not written


class Piece(NamedTuple):
    """Whole files, or complete lines of one JSON-lines file; `input_bytes` counts them as they lie on disk."""

    files: tuple[str, ...]
    lines: bytes
    first_line: int
    input_bytes: int


class Documents(NamedTuple):
    """The texts of a piece, and how many of its files are not UTF-8 text."""

    texts: list[str]
    num_undecodable: int


def find_files(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Every file that the inputs name or that lies, with a known suffix, in a folder they name."""
    files: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            names = (Path(folder, name) for folder, names in _walk(path) for name in names if _is_known(Path(name)))
            files += [name for name in names if name.is_file()]  # a link may lead nowhere
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path}: no such file or folder; give a .jsonl file, a source file or a folder of them")
    if not files:
        raise DataError(
            f"{', '.join(map(str, inputs)) or 'the input'}: no file with a known suffix; "
            f"looked for {', '.join(JSON_LINES)} (also {', '.join(COMPRESSED)}) and source files such as .py, .c, .md"
        )
    return files


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_ONES_OWN)
        yield parent, sorted(names)


def _is_known(path: Path) -> bool:
    # In a folder of sources a .json file is a document about the project, not a corpus.
    in_folder = path.suffix in (*LANGUAGE_TAGS, *TEXT_SUFFIXES) or _without_compression(path).suffix == ".jsonl"
    return in_folder and not path.name.startswith(".")


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def _is_json_lines(path: Path) -> bool:
    return path.suffix in COMPRESSED or path.suffix in JSON_LINES


def file_bytes(path: Path) -> int:
    """Size of an input file, which may have gone since it was found."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def cut_into_pieces(files: Sequence[Path]) -> Iterator[Piece]:
    """Pieces of about `PIECE_BYTES`, in order; compressed files are unpacked here."""
    whole: list[str] = []
    whole_bytes = 0
    for path in files:
        if not _is_json_lines(path):
            whole.append(str(path))
            whole_bytes += file_bytes(path)
        if whole and (_is_json_lines(path) or whole_bytes >= PIECE_BYTES):
            yield Piece(tuple(whole), b"", 0, whole_bytes)
            whole, whole_bytes = [], 0
        if _is_json_lines(path):
            yield from _cut_lines(path)
    if whole:
        yield Piece(tuple(whole), b"", 0, whole_bytes)


def _cut_lines(path: Path) -> Iterator[Piece]:
    line, position, rest = 1, 0, b""
    try:
        with open(path, "rb") as raw:
            for block in _unpacked_blocks(path, raw):
                head, newline, tail = block.rpartition(b"\n")
                if not newline:
                    rest += block
                    continue
                lines, rest = rest + head + newline, tail
                yield Piece((str(path),), lines, line, raw.tell() - position)
                line += lines.count(b"\n")
                position = raw.tell()
            if rest:
                yield Piece((str(path),), rest, line, raw.tell() - position)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be read after line {line - 1:,}: {error}") from error


def _unpacked_blocks(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _zstd_blocks(raw)
        return
    stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    while block := stream.read(PIECE_BYTES):
        yield block


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
    # The library's file-like reader takes an archive that breaks off for one that ends.
    frame = None
    while packed := raw.read(PIECE_BYTES // 8):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the compressed data breaks off")


def read_documents(piece: Piece, *, json_key: str, with_language_tag: bool) -> Documents:
    """The documents of one piece; with the tag, code starts with a line that names its language."""
    if piece.lines:
        return Documents(list(_read_lines(piece, json_key, with_language_tag)), 0)
    texts: list[str] = []
    for path in piece.files:
        try:
            text = Path(path).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        texts.append((language_tag(Path(path).suffix) if with_language_tag and text else "") + text)
    return Documents(texts, len(piece.files) - len(texts))


def _read_lines(piece: Piece, json_key: str, with_language_tag: bool) -> Iterator[str]:
    for number, line in enumerate(piece.lines.split(b"\n"), piece.first_line):
        if not line.strip():
            continue
        where = f"{piece.files[0]}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from error
        except RecursionError:
            raise DataError(f"{where}: brackets are nested too deeply; each line must be one JSON object") from None
        if not isinstance(record, dict) or json_key not in record:
            found = ", ".join(map(repr, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
            raise DataError(f"{where}: no key {json_key!r}, the line has {found}; name the text's key with --json-key")
        text = record[json_key]
        if not isinstance(text, str):
            raise DataError(f"{where}: {json_key!r} is {type(text).__name__}, expected a string")
        # JSON can spell half a surrogate pair, which is no text and which no tokenizer takes.
        text = text.encode("utf-8", "replace").decode()
        yield (language_tag(str(record.get("language", ""))) if with_language_tag and text else "") + text
