"""A description of a corpus in bounded time: lengths, ends of documents and tokens, counted or from an even sample.

A corpus may have a billion documents on a slow disk, so only a few thousand places of `.bin` are read.
"""

from collections.abc import Iterator

import numpy as np

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.text import counted

MOST_LENGTHS, MOST_ENDS = 10_000_000, 10_000  # documents
MOST_TOKENS, BLOCK = 20_000_000, 10_000  # tokens, and tokens in each block of them
SHOWN_DOCUMENTS, SHOWN_TOKENS, SHOWN_CHARACTERS = 3, 20, 200
DECILES = range(10, 100, 10)


def corpus_lines(data: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[str]:
    """The lines to print; with a tokenizer also ends of documents and text."""
    sequences, documents = len(data), len(data.document_indices) - 1
    more = "" if sequences == documents else f" in {documents:,} groups (training reads each sequence as a document)"
    yield f"  documents   {sequences:,}{more}"
    yield f"  tokens      {data.num_tokens:,} of dtype {data.dtype.name}, {data.num_bytes / 1e6:,.1f} MB"
    lengths = data.sequence_lengths[:: _step(sequences, MOST_LENGTHS)]
    sampled = _sampled(len(lengths), "document") if len(lengths) < sequences else ""
    low, median, high = np.percentile(lengths, [0, 50, 100])
    yield f"  length      min {low:,.0f}, median {median:,.0f}, mean {lengths.mean():,.1f}, max {high:,.0f}{sampled}"
    deciles = np.percentile(lengths, list(DECILES))
    yield f"  deciles     {' '.join(f'{decile:,.0f}' for decile in deciles)}"
    if tokenizer is not None:
        yield f"  ends        {_ends_line(data, tokenizer.eod)}"
    yield ""
    counts, sampled = token_counts(data)
    yield f"most frequent tokens{sampled}"
    for token in np.argsort(-counts, kind="stable")[:SHOWN_TOKENS].tolist():
        if counts[token]:
            text = "" if tokenizer is None else f"  {_text_of(tokenizer, [token])}"
            yield f"  {token:>8}  {counts[token]:>12,}  {counts[token] / counts.sum():6.2%}{text}"
    if tokenizer is not None:
        yield ""
        yield "first documents"
        for number in range(min(SHOWN_DOCUMENTS, sequences)):
            tokens = data.get(number, 0, min(SHOWN_CHARACTERS, int(data.sequence_lengths[number]))).tolist()
            text = _text_of(tokenizer, tokens)
            yield f"  {number}  {text[:SHOWN_CHARACTERS]}{'...' * (len(text) > SHOWN_CHARACTERS)}"


def token_counts(data: IndexedDataset) -> tuple[np.ndarray, str]:
    """The count of each id of at least 0, and a note about the sample if not all were counted."""
    tokens = data.tokens
    starts = range(0, len(tokens), BLOCK)
    if is_sample := len(tokens) > MOST_TOKENS:
        starts = np.linspace(0, len(tokens) - BLOCK, MOST_TOKENS // BLOCK).astype(np.int64).tolist()
    counts = np.zeros(1, np.int64)
    for start in starts:
        block = tokens[start : start + BLOCK]
        found = np.bincount(block[block >= 0], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts, _sampled(len(starts) * BLOCK, "token") if is_sample else ""


def _ends_line(data: IndexedDataset, eod: int) -> str:
    """The number of documents that end with the end-of-document token."""
    numbers = range(0, len(data), _step(len(data), MOST_ENDS))
    ended = sum(data.get(n, max(0, int(data.sequence_lengths[n]) - 1)).tolist() == [eod] for n in numbers)
    hint = "" if ended else "; preprocess --append-eod writes it"
    sampled = _sampled(len(numbers), "document") if len(numbers) < len(data) else ""
    return f"{ended:,} of {counted(len(numbers), 'document')} end with token {eod} (end of document){hint}{sampled}"


def _step(count: int, most: int) -> int:
    """The step that selects at most `most` of `count` items."""
    return -(-count // most)


def _sampled(count: int, noun: str) -> str:
    return f" (of an even sample of {counted(count, noun)})"


def _text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The decoded tokens, quoted; ids beyond the vocabulary cannot be decoded."""
    if any(not 0 <= token < tokenizer.vocab_size for token in tokens):
        return "(not in the vocabulary)"
    return repr(tokenizer.decode(tokens))
