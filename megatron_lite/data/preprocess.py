"""Text to `.bin/.idx`: tokenize every document once, on many processes, in the order of the inputs.

One process reads and writes, the others tokenize pieces of about a megabyte; pieces are written in the order they
were cut, so the files are the same for any number of workers. They appear under their names only when complete.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from megatron_lite.data.indexed import IndexedDatasetBuilder, bin_path, idx_path, optimal_dtype
from megatron_lite.data.sources import Piece, cut_into_pieces, find_files, read_documents
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.errors import DataError

PIECES_IN_FLIGHT = 4  # a worker: enough that none waits for the writer, few enough that memory stays small


class PreprocessReport(NamedTuple):
    """`prefix` is what data.paths takes; `text_bytes` is the UTF-8 text that was tokenized."""

    prefix: Path
    num_documents: int
    num_tokens: int
    text_bytes: int
    num_empty: int
    num_undecodable: int


class _Tokens(NamedTuple):
    """What became of one piece: its documents' ids in one array, and their lengths."""

    ids: np.ndarray
    lengths: np.ndarray
    text_bytes: int
    num_empty: int
    num_undecodable: int


class _Work(NamedTuple):
    """What every worker is told once."""

    tokenizer_spec: str
    json_key: str
    append_eod: bool
    with_language_tag: bool


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer_spec: str,
    *,
    workers: int,
    json_key: str = "text",
    append_eod: bool = False,
    language_tag: bool = False,
    progress: bool = True,
) -> PreprocessReport:
    """Write `{output_prefix}_{json_key}_document.bin` and `.idx`.

    Empty documents and files that are not UTF-8 are left out and counted. With `language_tag`, code starts with
    CodeGeeX's comment line that names its language.
    """
    files = find_files(inputs)
    work = _Work(tokenizer_spec, json_key, append_eod, language_tag)
    tokenizer = build_tokenizer(tokenizer_spec)  # a mistake in it is told before any process starts
    prefix = Path(f"{os.fspath(output_prefix)}_{json_key}_document")
    mark = f".{os.getpid()}.tmp"
    temporary_bin, temporary_idx = Path(f"{bin_path(prefix)}{mark}"), Path(f"{idx_path(prefix)}{mark}")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(temporary_bin, optimal_dtype(tokenizer.vocab_size))
        try:
            pieces = _tokenized_pieces(cut_into_pieces(files), work, tokenizer, workers)
            report = _write_pieces(pieces, builder, prefix, files, progress)
        except BaseException:
            builder.abandon()
            raise
        if report.num_documents == 0:
            builder.abandon()
            raise DataError(
                f"{', '.join(map(str, inputs))}: nothing to write: {report.num_empty:,} documents are empty and "
                f"{report.num_undecodable:,} files are not UTF-8 text"
            )
        builder.finalize(temporary_idx)
        # An old index must never meet a new .bin, wherever this is interrupted.
        idx_path(prefix).unlink(missing_ok=True)
        os.replace(temporary_bin, bin_path(prefix))
        os.replace(temporary_idx, idx_path(prefix))
    except OSError as error:
        raise DataError(
            f"{prefix}: cannot be written: {error.strerror or error}; nothing was kept. "
            "Free some space or choose an --output-prefix you can write to"
        ) from error
    finally:
        for temporary in (temporary_bin, temporary_idx):
            # Where the folder itself is the trouble, deleting fails as creating did, and that was reported.
            if temporary.exists():
                temporary.unlink()
    return report


def _write_pieces(
    pieces: Iterator[tuple[Piece, _Tokens]],
    builder: IndexedDatasetBuilder,
    prefix: Path,
    files: Sequence[Path],
    progress: bool,
) -> PreprocessReport:
    num_documents = num_tokens = text_bytes = num_empty = num_undecodable = 0
    total_bytes = sum(file.stat().st_size for file in files)
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="preprocess", disable=not progress) as bar:
        for piece, tokens in pieces:
            builder.add_documents(tokens.ids, tokens.lengths)
            num_documents += len(tokens.lengths)
            num_tokens += len(tokens.ids)
            text_bytes += tokens.text_bytes
            num_empty += tokens.num_empty
            num_undecodable += tokens.num_undecodable
            bar.update(piece.input_bytes)
            seconds = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{num_documents / seconds:,.0f} documents/s" if seconds else "", refresh=False)
    return PreprocessReport(prefix, num_documents, num_tokens, text_bytes, num_empty, num_undecodable)


def _tokenized_pieces(
    pieces: Iterator[Piece], work: _Work, tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Piece, _Tokens]]:
    """Each piece with its tokens, in the order of `pieces`."""
    if workers == 1:
        for piece in pieces:
            yield piece, _tokenize(piece, work, tokenizer)
        return
    # Started afresh: a fork would copy the locks of whatever threads this process has.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(work,))
    waiting: deque[tuple[Piece, Future[_Tokens]]] = deque()
    try:
        for piece in pieces:
            waiting.append((piece._replace(lines=b""), pool.submit(_tokenize_in_worker, piece)))
            if len(waiting) > workers * PIECES_IN_FLIGHT:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a tokenizing process died, near {waiting[0][0].files[0] if waiting else 'the end'}; if the system "
            "stopped it for want of memory, use fewer --workers. (A script that calls preprocess needs an "
            "`if __name__ == '__main__':` around the call.)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_in_worker: tuple[_Work, Tokenizer] | None = None  # a process pool has no other place for what its workers share


def _start_worker(work: _Work) -> None:
    global _in_worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _in_worker = (work, build_tokenizer(work.tokenizer_spec))


def _tokenize_in_worker(piece: Piece) -> _Tokens:
    assert _in_worker is not None
    return _tokenize(piece, *_in_worker)


def _tokenize(piece: Piece, work: _Work, tokenizer: Tokenizer) -> _Tokens:
    documents = read_documents(piece, json_key=work.json_key, with_language_tag=work.with_language_tag)
    dtype = optimal_dtype(tokenizer.vocab_size)
    ids: list[np.ndarray] = []
    text_bytes = 0
    for text in documents.texts:
        document = tokenizer.encode(text)
        if document:
            if work.append_eod:
                document.append(tokenizer.eod)
            ids.append(np.array(document, dtype=dtype))
            text_bytes += len(text.encode())
    lengths = np.array([len(document) for document in ids], dtype=np.int32)
    num_empty = len(documents.texts) - len(ids)
    joined = np.concatenate(ids) if ids else np.empty(0, dtype)
    return _Tokens(joined, lengths, text_bytes, num_empty, documents.num_undecodable)
