"""Samples that are made from one text each: those of encoders and of encoder_decoders.

A document of at most `text_length` tokens is one text; a longer one is divided into texts of nearly equal lengths. An
epoch has every text once. Sample i is a function of the seed and of i alone: a keyed permutation of 0..n-1 gives its
text, and a generator seeded by both draws its masks. So no order is stored, and neither resume nor another layout
changes a sample.
Sources: Luby and Rackoff, SIAM J. Comput. 17(2), 1988, for the permutation; Black and Rogaway, CT-RSA 2002, for its use
on any range.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from megatron_lite.data.index_cache import Check, cached_arrays, compare_checksums, index_errors, memory_for
from megatron_lite.data.indexed import IndexedDataset, bin_path
from megatron_lite.errors import DataError

MIN_TOKENS = 3  # of a text: two and an end-of-document token
ROUNDS = 6  # of the permutation; four suffice for large ranges

Sample = Mapping[str, np.ndarray]
"""The fields of a `Batch` for one row, by name."""


class SampleMaker(Protocol):
    """Makes a sample from the tokens of a text, of which there are at least one and at most `text_length`."""

    text_length: int
    eod: int

    def __call__(self, tokens: np.ndarray, random: np.random.RandomState, /) -> Sample: ...


class Text(NamedTuple):
    """A range of tokens in the file of a corpus."""

    document: int
    start: int
    stop: int


class TextDataset:
    """Samples from the texts of the documents `first <= document < last` of one corpus.

    There are at least `num_samples` (None: one epoch). Every read compares the ids with `vocab_size` (None: no check).
    End-of-document tokens are left out of the texts.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: tuple[int, int],
        *,
        num_samples: int | None,
        make_sample: SampleMaker,
        seed: int,
        cache_dir: str | os.PathLike[str],
        split_name: str,
        vocab_size: int | None,
        check: Check = compare_checksums,
    ) -> None:
        self.indexed, self.make_sample, self.seed = indexed, make_sample, seed
        self.split_name, self.vocab_size = split_name, vocab_size
        self._first, last = documents
        description = {
            "index": [len(indexed), indexed.index_crc32],  # the content, under any name and of any time
            "documents": [self._first, last],
            "text_length": make_sample.text_length,
        }
        count = last - self._first
        with memory_for(f"{indexed.prefix}: {split_name} split", num_samples=num_samples or count, num_entries=count):
            build = lambda: {"ends": self._count(last)}
            arrays = cached_arrays(cache_dir, f"texts-{split_name}", description, {"ends": 1}, build, check)
        self._ends = arrays["ends"]  # int64, the number of texts up to the end of each document
        self.samples_per_epoch = int(self._ends[-1]) if count else 0
        if not self.samples_per_epoch:
            raise DataError(
                f"{indexed.prefix}: the {split_name} split has {count:,} of {num_documents(indexed):,} documents, none "
                f"with {MIN_TOKENS} tokens; give it a larger part of data.split"
            )
        begin, end = (int(document_starts(indexed, border, border)[0]) for border in documents)
        self.tokens_per_epoch = end - begin
        self._size = -(-(num_samples or 1) // self.samples_per_epoch) * self.samples_per_epoch

    def _count(self, last: int) -> np.ndarray:
        lengths = np.diff(document_starts(self.indexed, self._first, last))
        texts = -(-lengths // self.make_sample.text_length)
        texts[lengths < MIN_TOKENS] = 0
        return np.cumsum(texts, dtype=np.int64)

    def __len__(self) -> int:
        return self._size

    def text(self, sample: int) -> Text:
        """The text of a sample."""
        epoch, place = divmod(sample, self.samples_per_epoch)
        number = permuted(place, self.samples_per_epoch, key=f"{self.seed}/{epoch}")
        with index_errors(f"{self.indexed.prefix}: the {self.split_name} split"):
            index = int(np.searchsorted(self._ends, number, side="right"))
            before = int(self._ends[index - 1]) if index else 0
            which, count = number - before, int(self._ends[index]) - before
            start, stop = document_starts(self.indexed, self._first + index, self._first + index + 1).tolist()
            length = stop - start
            if not 0 <= which < count <= length:
                raise ValueError
        return Text(self._first + index, start + which * length // count, start + (which + 1) * length // count)

    def __getitem__(self, sample: int) -> Sample:
        text = self.text(sample)
        tokens = self.indexed.tokens[text.start : text.stop].astype(np.int64)
        if self.vocab_size is not None and int(tokens.view(np.uint64).max()) >= self.vocab_size:
            wrong = next(token for token in tokens.tolist() if not 0 <= token < self.vocab_size)
            raise DataError(
                f"{bin_path(self.indexed.prefix)}: document {text.document} contains token id {wrong}, but the "
                f"vocabulary has {self.vocab_size} ids; run preprocess with data.tokenizer, or correct model.vocab_size"
            )
        real = tokens[tokens != self.make_sample.eod]
        random = np.random.RandomState([self.seed, sample & 0xFFFFFFFF, sample >> 32])
        return self.make_sample(real if len(real) else tokens, random)


def num_documents(indexed: IndexedDataset) -> int:
    """The documents of a corpus; a document can have several sequences, such as sentences."""
    return len(indexed.document_indices) - 1


def document_starts(indexed: IndexedDataset, first: int, last: int) -> np.ndarray:
    """The positions in `indexed.tokens` where the documents from `first` to `last` begin, `last` included; int64."""
    sequences = indexed.document_indices[first : last + 1]
    starts = np.full(len(sequences), indexed.num_tokens, dtype=np.int64)
    inside = sequences < len(indexed)
    starts[inside] = indexed.sequence_pointers[sequences[inside]] // indexed.dtype.itemsize
    return starts


def permuted(place: int, size: int, key: str) -> int:
    """The number at `place` in an order of 0..size-1 that the key chooses, without the other numbers.

    A Feistel network permutes a range of 4^k numbers, and is applied until the result is below `size`.
    """
    bits = max(1, -(-(size - 1).bit_length() // 2))
    while True:
        left, right = divmod(place, 1 << bits)
        for number in range(ROUNDS):
            digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & ((1 << bits) - 1))
        place = (left << bits) | right
        if place < size:
            return place
