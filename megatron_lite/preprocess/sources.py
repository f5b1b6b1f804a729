"""Raw text: the files of a corpus, chunks of them as units of work, and the documents in each chunk.

A `.jsonl` file (also `.json` and `.ndjson`) has one document per line. Any other file is plain text: one document, or
several that lines or blank lines separate. Both may be compressed as `.gz` or `.zst`. Folders are searched for both in
sorted order, without hidden folders and folders of installed packages. Chunks are about a megabyte and keep the order
of the inputs, so the order of documents does not depend on the number of processes.
"""

import errno
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from megatron_lite.errors import DataError
from megatron_lite.files import MOST_BYTES, is_inside
from megatron_lite.preprocess.formats import GZIP, ZSTANDARD, other_format
from megatron_lite.preprocess.languages import LANGUAGE_TAGS, TEXT_SUFFIXES, language_tag
from megatron_lite.text import parse_json

SplitOn = Literal["file", "blank-line", "line"]
BLANK_LINE = re.compile(rb"(?m)^[ \t\r\f\v]*\n")
CHUNK_BYTES = 1 << 20  # large relative to the cost of sending it to a process, small relative to a corpus
PACKED_BYTES = 1 << 12  # compressed at a time; they can become 32,768 times as many
COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors write at the start of a file
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "node_modules", "__pycache__")  # of installed or generated files


class Found(NamedTuple):
    """The files of some inputs, and the skipped parts."""

    files: list[Path]
    unknown: Counter[str]  # skipped files in folders, by suffix
    empty_folders: list[Path]  # without a file of a known suffix
    num_links: int  # in folders, to files outside of them


class Chunk(NamedTuple):
    """Complete files, or complete lines of one file; `input_bytes` is their size on disk."""

    files: tuple[str, ...]
    lines: bytes
    first_line: int
    input_bytes: int
    split_on: SplitOn  # how plain text becomes documents


class Documents(NamedTuple):
    """The texts of a chunk, and the number of documents that are not UTF-8."""

    texts: list[str]
    num_undecodable: int


def find_files(inputs: Sequence[str | os.PathLike[str]]) -> Found:
    """The input files, and every file with a known suffix in the input folders."""
    files: list[Path] = []
    unknown: Counter[str] = Counter()
    empty_folders, num_links = [], 0
    named: list[Path] = []  # other files of a folder that are not text are counted as not UTF-8
    for path in map(Path, inputs):
        if path.is_dir():
            names = (Path(folder, name) for folder, names in _walk(path) for name in names if not name.startswith("."))
            files_or_links = [name for name in names if name.is_file()]  # without dead links
            present = [name for name in files_or_links if not name.is_symlink() or is_inside(name, path)]
            num_links += len(files_or_links) - len(present)
            known = [name for name in present if _is_known(name)]
            named += filter(_is_json_lines, known)
            unknown.update(name.suffix or "none" for name in present if not _is_known(name))
            files += known
            if not known:
                empty_folders.append(path)
        elif path.exists():
            files.append(path)
            named.append(path)
        else:
            raise DataError(f"{path}: no such file or folder; give a .jsonl file, a source file or a folder of them")
    if not files:
        raise DataError(
            f"{', '.join(map(str, inputs)) or 'the input'}: no file with a known suffix; "
            f"looked for {', '.join(JSON_LINES)} (also {', '.join(COMPRESSED)}) and source files such as .py, .c, .md"
        )
    for path in named:
        _check_is_text(path)
    return Found(files, unknown, empty_folders, num_links)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
        yield parent, sorted(names)


def _is_known(path: Path) -> bool:
    # In a folder of sources a .json file is a document about the project, not a corpus.
    plain = _without_compression(path)
    return plain.suffix in (*LANGUAGE_TAGS, *TEXT_SUFFIXES) or plain.suffix.lower() == ".jsonl"


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def _is_json_lines(path: Path) -> bool:
    plain = _without_compression(path)
    return plain.suffix.lower() in JSON_LINES or (plain != path and not plain.suffix)  # corpus.gz


def file_bytes(path: Path) -> int:
    """The size of an input file."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _check_is_text(path: Path) -> None:
    """Raise DataError with advice for a file whose content, unpacked, has another format, whatever its name."""
    if not path.is_file():
        if path.exists() and not path.is_fifo():
            raise DataError(f"{path}: is a device, which may never end; give a file, a folder or a pipe")
        return  # a pipe can be read only once
    try:
        with open(path, "rb") as raw:
            start = next(_unpacked_blocks(path, raw), b"")
    except (OSError, EOFError, zlib.error):
        return  # reading it raises the error with the line
    if found := other_format(start):
        suffix = path.suffix.lower()
        within = " within this compressed file" if suffix in COMPRESSED else ""
        ending = {GZIP: ".gz", ZSTANDARD: ".zst"}.get(found, "") if not within and suffix != ".tgz" else ""
        advice = f"give it a name that ends in {ending}" if ending else found.advice
        raise DataError(f"{path}: is {found.name}, which is not supported as input{within}; {advice}")


def split_into_chunks(files: Sequence[Path], split_on: SplitOn) -> Iterator[Chunk]:
    """Chunks of about `CHUNK_BYTES`, in order and uncompressed. Large files that can be split are read in blocks."""
    complete: list[str] = []
    files_bytes = 0
    for path in files:
        is_split = _is_json_lines(path) or (split_on != "file" and file_bytes(path) > CHUNK_BYTES)
        if not is_split:
            complete.append(str(path))
            files_bytes += file_bytes(path)
        if complete and (is_split or files_bytes >= CHUNK_BYTES):
            yield Chunk(tuple(complete), b"", 0, files_bytes, split_on)
            complete, files_bytes = [], 0
        if is_split:
            yield from _line_chunks(path, split_on)
    if complete:
        yield Chunk(tuple(complete), b"", 0, files_bytes, split_on)


def _line_chunks(path: Path, split_on: SplitOn) -> Iterator[Chunk]:
    """Chunks of complete lines; with a split on blank lines, each one but the last ends with a blank line."""
    line, position = 1, 0
    rest: list[bytes] = []  # of a document that continues in the next block
    can_end = _last_blank_line if split_on == "blank-line" and not _is_json_lines(path) else _last_line
    try:
        with open(path, "rb") as raw:
            for block in _complete_lines(_text_blocks(path, raw)):
                end = can_end(block)
                rest.append(block[:end])
                if end:
                    lines, rest = b"".join(rest), []
                    yield Chunk((str(path),), lines, line, raw.tell() - position, split_on)
                    line += lines.count(b"\n")
                    position = raw.tell()
                rest.append(block[end:])
                _check_size("a document", sum(map(len, rest)))
            if lines := b"".join(rest):
                yield Chunk((str(path),), lines, line, raw.tell() - position, split_on)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {line - 1:,}: {error}") from error


def _check_size(what: str, size: int) -> None:
    """Raise OSError for bytes that would fill the memory: a compressed or sparse file of a few bytes has any number."""
    if size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"{what} has more than {MOST_BYTES:,} bytes; give --split-on line or smaller files")


def _complete_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks of complete lines; the last one may lack its newline."""
    rest: list[bytes] = []
    for block in blocks:
        head, newline, tail = block.rpartition(b"\n")
        if newline:
            yield b"".join((*rest, head, newline))
            rest = []
        rest.append(tail)
        _check_size("a line", sum(map(len, rest)))
    yield b"".join(rest)


def _last_line(lines: bytes) -> int:
    return lines.rfind(b"\n") + 1


def _last_blank_line(lines: bytes) -> int:
    """The end of the last blank line in complete lines; 0 without one."""
    return max((match.end() for match in BLANK_LINE.finditer(lines)), default=0)


def _text_blocks(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    """The unpacked bytes of a file without its byte order mark."""
    blocks = _unpacked_blocks(path, raw)
    yield next(blocks, b"").removeprefix(BYTE_ORDER_MARK)
    yield from blocks


def _unpacked_blocks(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        yield from _unpacked(raw, partial(zlib.decompressobj, 31), zlib.error)
    elif suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{raw.name}: reading .zst needs a package: pip install zstandard") from error
        yield from _unpacked(raw, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)
    else:
        while block := raw.read(CHUNK_BYTES):
            yield block


def _unpacked(raw: BinaryIO, new_frame: Callable[[], Any], problem: type[Exception]) -> Iterator[bytes]:
    """The unpacked bytes of frames, one after another; zeros may fill the last block of a tape.

    The libraries' file-like readers do not detect a truncated archive, or read zeros one by one.
    """
    frame, zeros = None, 0
    while packed := raw.read(PACKED_BYTES):
        while packed:
            if frame is None and not packed.strip(b"\0"):
                zeros += len(packed)
                if zeros > CHUNK_BYTES:
                    raise OSError(errno.EFBIG, f"more than {CHUNK_BYTES:,} zero bytes follow the compressed data")
                break
            frame = frame or new_frame()
            try:
                block = frame.decompress(packed)
            except problem as error:
                raise OSError(str(error)) from error
            yield block
            packed = frame.unused_data
            if frame.eof:
                frame, packed = None, packed.lstrip(b"\0")
    if frame is not None:
        raise EOFError("the compressed data is truncated")


def read_documents(chunk: Chunk, *, json_key: str, with_language_tag: bool) -> Documents:
    """The documents of a chunk; with the tag, the first line of code is a comment with its language."""
    if _is_json_lines(Path(chunk.files[0])):
        return Documents(list(_read_lines(chunk, json_key, with_language_tag)), 0)
    texts: list[str] = []
    num_undecodable = 0
    for path in chunk.files:
        tag = language_tag(_without_compression(Path(path)).suffix) if with_language_tag else ""
        for document in _split(chunk.lines or _content(path), chunk.split_on):
            try:
                texts.append((tag if document else "") + document.decode())
            except UnicodeDecodeError:
                num_undecodable += 1
    return Documents(texts, num_undecodable)


def _content(path: str) -> bytes:
    try:
        blocks, size = [], 0
        with open(path, "rb") as raw:
            for block in _text_blocks(Path(path), raw):
                blocks.append(block)
                size += len(block)
                _check_size("a document", size)
        return b"".join(blocks)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _split(text: bytes, split_on: SplitOn) -> list[bytes]:
    """The documents of plain text, without blank lines and without the newline at the end of a document."""
    if split_on == "file":
        return [text]
    if split_on == "line":
        return [line.removesuffix(b"\r") for line in text.split(b"\n") if line.strip()]
    return [part.rstrip(b"\r\n") for part in BLANK_LINE.split(text + b"\n") if part.strip()]


def _read_lines(chunk: Chunk, json_key: str, with_language_tag: bool) -> Iterator[str]:
    for number, line in enumerate(chunk.lines.split(b"\n"), chunk.first_line):
        if not line.strip():
            continue
        where = f"{chunk.files[0]}:{number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from error
        if not isinstance(record, dict) or json_key not in record:
            found = ", ".join(map(repr, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
            raise DataError(f"{where}: no key {json_key!r}, the line has {found}; name the text's key with --json-key")
        text = record[json_key]
        if not isinstance(text, str):
            raise DataError(f"{where}: {json_key!r} is {type(text).__name__}, expected a string")
        # JSON can contain half a surrogate pair, which is not text.
        text = text.encode("utf-8", "replace").decode()
        yield (language_tag(str(record.get("language", ""))) if with_language_tag and text else "") + text
