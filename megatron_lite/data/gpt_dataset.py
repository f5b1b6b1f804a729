"""Samples of one length from documents of any length: Megatron's document, sample and shuffle index.

The documents of a split, repeated for enough epochs and shuffled, form one stream. A sample starts every `s` tokens and
has `s + 1`: its last label is the first input of the next. Then the samples are shuffled. The order is Megatron's for
the same seed, also in its rule for the last epoch: it is shuffled separately if less than 80 % of it is needed.
The planned number of samples fixes these epochs. A run that reads more appends further ones, each a stream with a
shuffle that depends on the seed and its number alone. So an order never changes, whatever is appended and when.
Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp, here without a compiler.
"""

import os
import zlib
from typing import NamedTuple

import numpy as np

from megatron_lite.data.index_cache import Check, cached_arrays, compare_checksums, index_errors, memory_for
from megatron_lite.data.indexed import IndexedDataset, bin_path
from megatron_lite.errors import DataError

BLOCK = 2**15  # documents
SHARE_OF_LAST_EPOCH = 0.80  # Megatron's threshold; another value is another sample order


class Epochs(NamedTuple):
    """The number of passes over the documents; with the seed and the documents it fixes the order."""

    number: int
    last_separate: bool  # the last epoch is shuffled separately
    appended: int = 0  # streams after these epochs, each of one epoch, or of as many as give a sample


class GPTIndex(NamedTuple):
    """document int32 [epochs * documents]; sample int32 or int64 [N + 1, 2]; shuffle uint32 or int64 [N].

    Row k of `sample` is where sample k starts: a position in `document` and a token offset in that document. Each
    appended stream has one more row, its end.
    """

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


def epochs_needed(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> Epochs:
    """The fewest epochs that give `num_samples` samples; one epoch when that is None."""
    if num_samples is None:
        return Epochs(1, False)
    count = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    if count == 1:
        return Epochs(1, False)
    from_last = num_samples - ((count - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    return Epochs(count, from_last < int(SHARE_OF_LAST_EPOCH * per_epoch))


def with_appended(planned: Epochs, tokens_per_epoch: int, num_samples: int, seq_length: int) -> Epochs:
    """The planned epochs, and as many streams after them as give `num_samples` samples."""
    stream = epochs_needed(tokens_per_epoch, 1, seq_length)
    in_plan, in_stream = ((epochs.number * tokens_per_epoch - 1) // seq_length for epochs in (planned, stream))
    return planned._replace(appended=max(0, -(-(num_samples - in_plan) // in_stream)))


def build_index(lengths: np.ndarray, document_ids: np.ndarray, epochs: Epochs, seq_length: int, seed: int) -> GPTIndex:
    """The three arrays for documents of these `lengths` [all documents], of which `document_ids` are read."""
    index = _build_stream(lengths, document_ids, epochs, seq_length, seed)
    if not epochs.appended:
        return index
    tokens_per_epoch = int(lengths[document_ids].sum(dtype=np.int64))
    stream = epochs_needed(tokens_per_epoch, 1, seq_length)
    size = (stream.number * tokens_per_epoch - 1) // seq_length
    document = np.empty((epochs.appended, stream.number * len(document_ids)), np.int32)
    sample = np.empty((epochs.appended, size + 1, 2), np.int64)
    shuffle = np.empty((epochs.appended, size), np.int64)
    for number in range(epochs.appended):
        more = _build_stream(lengths, document_ids, stream, seq_length, [seed, number])
        document[number] = more.document
        sample[number] = more.sample + np.array([len(index.document) + number * document.shape[1], 0])
        shuffle[number] = more.shuffle.astype(np.int64) + len(index.sample) + number * (size + 1)
    return GPTIndex(
        np.concatenate((index.document, document.reshape(-1))),
        np.concatenate((index.sample, sample.reshape(-1, 2))),
        np.concatenate((index.shuffle, shuffle.reshape(-1))),
    )


def _build_stream(
    lengths: np.ndarray, document_ids: np.ndarray, epochs: Epochs, seq_length: int, seed: int | list[int]
) -> GPTIndex:
    random = np.random.RandomState(seed)  # its three draws must come in this order
    document = _document_index(document_ids, epochs, random)
    sample = build_sample_index(lengths, document, seq_length)
    num_samples = len(sample) - 1
    num_mixed = num_samples
    if epochs.last_separate:
        tokens_per_epoch = int(lengths[document_ids].sum(dtype=np.int64))
        num_mixed = ((epochs.number - 1) * tokens_per_epoch - 1) // seq_length
    return GPTIndex(document, sample, _shuffle_index(num_mixed, num_samples, random))


def _document_index(document_ids: np.ndarray, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    mixed = np.tile(document_ids.astype(np.int32), epochs.number - epochs.last_separate)
    random.shuffle(mixed)
    if not epochs.last_separate:
        return mixed
    last = document_ids.astype(np.int32)
    random.shuffle(last)
    return np.concatenate((mixed, last))


def _shuffle_index(num_mixed: int, num_samples: int, random: np.random.RandomState) -> np.ndarray:
    dtype = np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle = np.arange(num_samples, dtype=dtype)
    random.shuffle(shuffle[:num_mixed])
    random.shuffle(shuffle[num_mixed:])
    return shuffle


def build_sample_index(lengths: np.ndarray, document: np.ndarray, seq_length: int) -> np.ndarray:
    """The start of each sample of the stream `document`: [N + 1, 2], the first row (0, 0).

    Start k > 0 is token `k * s` of the stream, in the first document that ends after it. The index is built by blocks
    of documents, which stay in cache. A block with few starts searches for each. In other blocks the starts in
    document i are those up to `(end_i - 1) // s` that no earlier document has; i is repeated once for each.
    """
    dtype = np.int64 if len(document) > np.iinfo(np.int32).max else np.int32
    parts, end, start = [np.zeros((1, 2), dtype)], 0, 1
    for first in range(0, len(document), BLOCK):
        block = lengths.take(document[first : first + BLOCK])
        ends = block.cumsum(dtype=np.int64)
        ends += end
        end = int(ends[-1])
        after = max(start, (end - 1) // seq_length + 1)
        tokens = np.arange(start, after) * seq_length
        if len(tokens) < len(block) // 8:
            holder = ends.searchsorted(tokens, side="right")
        else:
            last_start = np.maximum((ends - 1) // seq_length, 0)  # an empty first document gives -1
            holder = np.arange(len(block)).repeat(np.diff(last_start, prepend=start - 1))
        part = np.empty((len(tokens), 2), dtype)
        part[:, 0] = holder + first
        part[:, 1] = tokens - (ends - block)[holder]
        parts.append(part)
        start = after
    return np.concatenate(parts)


def count_tokens(indexed: IndexedDataset, document_ids: np.ndarray, split_name: str, least: int) -> int:
    """The tokens of a split of a corpus; raise DataError for fewer than `least`."""
    count = int(indexed.sequence_lengths[document_ids].sum(dtype=np.int64))
    if count < least:
        raise DataError(
            f"{indexed.prefix}: the {split_name} split has {len(document_ids):,} of {len(indexed):,} documents, "
            f"{count:,} tokens, and needs {least:,}; give it a larger part of data.split"
        )
    return count


class GPTDataset:
    """Samples of `seq_length + 1` token ids from the documents `document_ids` of one corpus.

    There are at least `num_samples`, in Megatron's order of `planned_samples` (None: one epoch) for `seed`, after which
    epochs are appended. Every read compares the ids with `vocab_size` (None: no check), which takes a thousandth of a
    training step.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        document_ids: np.ndarray,
        *,
        num_samples: int,
        planned_samples: int | None,
        seq_length: int,
        seed: int,
        cache_dir: str | os.PathLike[str],
        split_name: str,
        vocab_size: int | None,
        check: Check = compare_checksums,
    ) -> None:
        self.indexed = indexed
        self.seq_length = seq_length
        self.split_name = split_name
        self.vocab_size = vocab_size
        least = seq_length + 1 if planned_samples is None else 1
        self.tokens_per_epoch = count_tokens(indexed, document_ids, split_name, least)
        planned = epochs_needed(self.tokens_per_epoch, planned_samples, seq_length)
        self.epochs = with_appended(planned, self.tokens_per_epoch, num_samples, seq_length)
        description = {
            "index": [len(indexed), indexed.index_crc32],  # the content, under any name and of any time
            "documents": [len(document_ids), zlib.crc32(np.ascontiguousarray(document_ids).data)],
            "epochs": self.epochs,
            "seq_length": seq_length,
            "seed": seed,
        }
        asked = max(num_samples, planned_samples or self.tokens_per_epoch // seq_length)
        entries = (self.epochs.number + self.epochs.appended) * len(document_ids) + asked
        with memory_for(f"{indexed.prefix}: {split_name} split", num_samples=asked, num_entries=entries):
            arrays = cached_arrays(
                cache_dir,
                f"gpt-{split_name}",
                description,
                {"document": 1, "sample": 2, "shuffle": 1},
                lambda: build_index(indexed.sequence_lengths, document_ids, self.epochs, seq_length, seed)._asdict(),
                check,
            )
        self.index = GPTIndex(**arrays)

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, sample: int) -> np.ndarray:
        """int64 [s + 1]: inputs are all but the last id, labels all but the first."""
        with index_errors(f"{self.indexed.prefix}: the {self.split_name} split"):
            row = int(self.index.shuffle[sample])
            (first, first_offset), (last, last_offset) = self.index.sample[row : row + 2].tolist()
            documents = self.index.document[first : last + 1].tolist()
            begins = [first_offset] + [0] * (last - first)
            parts = [
                self.indexed.get(document, begin, last_offset + 1 - begin if at == last - first else None)
                for at, (document, begin) in enumerate(zip(documents, begins, strict=True))
            ]
            if min(row, first, *begins, *documents) < 0 or sum(map(len, parts)) != self.seq_length + 1:
                raise ValueError
        tokens = np.concatenate(parts, dtype=np.int64)
        # Read as unsigned, a negative id is a huge one: one comparison finds both.
        if self.vocab_size is not None and int(tokens.view(np.uint64).max()) >= self.vocab_size:
            document, token = next(
                (document, token)
                for document, part in zip(documents, parts, strict=True)
                for token in part.tolist()
                if not 0 <= token < self.vocab_size
            )
            raise DataError(
                f"{bin_path(self.indexed.prefix)}: document {document} contains token id {token}, but the vocabulary "
                f"has {self.vocab_size} ids; run preprocess with data.tokenizer, or correct model.vocab_size"
            )
        return tokens
