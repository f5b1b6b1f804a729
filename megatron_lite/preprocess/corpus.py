"""Text to `.bin/.idx`: tokenize every document once, on many processes, in the order of the inputs.

One process reads and writes; the others tokenize chunks of about a megabyte. Chunks are written in input order, so the
files do not depend on the number of workers. Only complete files get their final names.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from megatron_lite import __version__
from megatron_lite.data.corpus_info import CorpusInfo, info_path
from megatron_lite.data.indexed import bin_path, idx_path
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_hash
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.preprocess.builder import IndexedDatasetBuilder, optimal_dtype
from megatron_lite.preprocess.sources import (
    Chunk,
    Found,
    SplitOn,
    file_bytes,
    find_files,
    read_documents,
    split_into_chunks,
)
from megatron_lite.preprocess.workers import map_in_order
from megatron_lite.targets import Targets
from megatron_lite.text import counted


class PreprocessReport(NamedTuple):
    """`prefix` is the value for data.paths; `text_bytes` is the size of the tokenized UTF-8 text."""

    prefix: Path
    num_documents: int
    num_tokens: int
    text_bytes: int
    num_empty: int
    num_undecodable: int  # documents that are not UTF-8; without a split each is a file
    found: Found


class _Tokens(NamedTuple):
    """The token ids of a chunk's documents in one array, and their lengths."""

    ids: np.ndarray
    lengths: np.ndarray
    text_bytes: int
    num_empty: int
    num_undecodable: int


class _Work(NamedTuple):
    """The options of every worker."""

    tokenizer_spec: str
    json_key: str
    append_eod: bool
    prepend_bos: bool
    with_language_tag: bool
    split_on: SplitOn


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer_spec: str,
    *,
    workers: int,
    json_key: str = "text",
    append_eod: bool = False,
    prepend_bos: bool = False,
    language_tag: bool = False,
    split_on: SplitOn = "file",
    progress: bool = True,
) -> PreprocessReport:
    """Write `{output_prefix}_{json_key}_document.bin` and `.idx`, and their record `.info.json`.

    Empty documents and those that are not UTF-8 are skipped and counted. With `language_tag`, the first line of code is
    CodeGeeX's comment with its language. `prepend_bos` and `append_eod` put the tokenizer's tokens around a document,
    which has no others. `split_on` splits plain text into documents. `progress` shows a bar on a
    terminal.
    """
    if workers < 1:
        raise ConfigError(f"--workers is {workers}; tokenizing needs at least 1 process")
    found = find_files(inputs)
    work = _Work(tokenizer_spec, json_key, append_eod, prepend_bos, language_tag, split_on)
    tokenizer = build_tokenizer(tokenizer_spec)  # a wrong spec is an error before any process starts
    if prepend_bos and tokenizer.bos is None:
        raise ConfigError(f"--prepend-bos: the tokenizer {tokenizer_spec} has no token that starts texts; leave it out")
    prefix = Path(f"{os.fspath(output_prefix)}_{json_key}_document")
    with _disk_errors(prefix), _targets(prefix).replaced() as (temporary_bin, _, temporary_idx):
        builder = IndexedDatasetBuilder(temporary_bin, optimal_dtype(tokenizer.vocab_size))
        try:
            # Closed at once after an error too, whose traceback would keep the workers alive.
            with contextlib.closing(
                _tokenized_chunks(split_into_chunks(found.files, split_on), work, workers)
            ) as chunks:
                report = _write_chunks(chunks, builder, prefix, found, progress)
        except BaseException:
            builder.abandon()
            raise
        if report.num_documents == 0:
            builder.abandon()
            raise DataError(
                f"{', '.join(map(str, inputs))}: nothing to write: {counted(report.num_empty, 'empty document')}, "
                f"{counted(report.num_undecodable, 'document')} not in UTF-8"
            )
        builder.finalize(temporary_idx, _info(report, work, tokenizer))  # and the record beside it
    return report


def _targets(prefix: Path) -> Targets:
    paths = bin_path(prefix), info_path(prefix), idx_path(prefix)
    if paths[2].exists() and not paths[1].exists():
        raise DataError(f"{paths[2]}: was not written by megatron-lite; rename it, or choose another --output-prefix")
    return Targets(*paths)


@contextlib.contextmanager
def _disk_errors(prefix: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename if error.errno in (errno.ELOOP, errno.EISDIR) else prefix
        raise DataError(
            f"{where}: cannot be written: {error.strerror or error}; nothing was kept. "
            "Free some space or choose an --output-prefix you can write to"
        ) from error


def _info(report: PreprocessReport, work: _Work, tokenizer: Tokenizer) -> CorpusInfo:
    options = {name: value for name, value in work._asdict().items() if name != "tokenizer_spec"}
    return CorpusInfo(
        tokenizer=work.tokenizer_spec,
        tokenizer_hash=tokenizer_hash(work.tokenizer_spec),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        documents=report.num_documents,
        tokens=report.num_tokens,
        source_bytes=report.text_bytes,
        options=options,
        megatron_lite=__version__,
        idx_crc32="",  # set by the builder
    )


def _write_chunks(
    chunks: Iterator[tuple[Chunk, _Tokens]],
    builder: IndexedDatasetBuilder,
    prefix: Path,
    found: Found,
    progress: bool,
) -> PreprocessReport:
    num_documents = num_tokens = text_bytes = num_empty = num_undecodable = 0
    with tqdm(
        total=sum(map(file_bytes, found.files)),
        unit="B",
        unit_scale=True,
        desc="preprocess",
        disable=None if progress else True,
    ) as bar:
        for chunk, tokens in chunks:
            builder.add_documents(tokens.ids, tokens.lengths)
            num_documents += len(tokens.lengths)
            num_tokens += len(tokens.ids)
            text_bytes += tokens.text_bytes
            num_empty += tokens.num_empty
            num_undecodable += tokens.num_undecodable
            bar.update(chunk.input_bytes)
            seconds = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{num_documents / seconds:,.0f} documents/s" if seconds else "", refresh=False)
    return PreprocessReport(prefix, num_documents, num_tokens, text_bytes, num_empty, num_undecodable, found)


def _tokenized_chunks(
    chunks: Iterator[Chunk], work: _Work, workers: int
) -> Generator[tuple[Chunk, _Tokens], None, None]:
    """Each chunk with its tokens, in the order of `chunks`."""
    make_function = partial(_make_function, work)
    if workers == 1:
        tokenize = make_function()
        return ((chunk, tokenize(chunk)) for chunk in chunks)
    return map_in_order(make_function, chunks, workers)


def _make_function(work: _Work) -> Callable[[Chunk], _Tokens]:
    return partial(_tokenize, work=work, tokenizer=build_tokenizer(work.tokenizer_spec))


def _tokenize(chunk: Chunk, work: _Work, tokenizer: Tokenizer) -> _Tokens:
    documents = read_documents(chunk, json_key=work.json_key, with_language_tag=work.with_language_tag)
    dtype = optimal_dtype(tokenizer.vocab_size)
    ids: list[np.ndarray] = []
    text_bytes = 0
    for text in documents.texts:
        document = tokenizer.encode(text)
        if document:
            if work.prepend_bos and tokenizer.bos is not None:
                document.insert(0, tokenizer.bos)
            if work.append_eod:
                document.append(tokenizer.eod)
            ids.append(np.array(document, dtype=dtype))
            text_bytes += len(text.encode())
    lengths = np.array([len(document) for document in ids], dtype=np.int32)
    num_empty = len(documents.texts) - len(ids)
    joined = np.concatenate(ids) if ids else np.empty(0, dtype)
    return _Tokens(joined, lengths, text_bytes, num_empty, documents.num_undecodable)
