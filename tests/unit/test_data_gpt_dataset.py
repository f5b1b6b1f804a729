"""Samples in Megatron's order, read through an index that numpy builds."""

import json
import os
import zlib
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data import gpt_dataset
from megatron_lite.data.gpt_dataset import Epochs, GPTDataset, build_index, build_sample_index, epochs_needed
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError
from tests.helpers import megatron_core
from tests.helpers.corpora import write_corpus

# Lengths 5, 3, 7, 4, 6, sequence length 4, seed 1234; checked against Megatron-LM.
GOLDEN = {
    5: (
        Epochs(1, False),
        [4, 0, 1, 2, 3],
        [(0, 0), (0, 4), (1, 2), (2, 1), (3, 2), (3, 6), (4, 3)],
        [5, 2, 3, 1, 0, 4],
    ),
    11: (
        Epochs(2, False),
        [2, 2, 4, 1, 0, 3, 4, 0, 1, 3],
        [(0, 0), (0, 4), (1, 1), (1, 5), (2, 2), (3, 0), (4, 1), (5, 0), (6, 0), (6, 4), (7, 2), (8, 1), (9, 2)],
        [3, 11, 2, 1, 7, 5, 4, 0, 8, 6, 10, 9],
    ),
    14: (
        Epochs(3, True),
        [2, 2, 4, 1, 0, 3, 4, 0, 1, 3, 0, 4, 3, 2, 1],
        [(9, 2), (10, 2), (11, 1), (11, 5), (12, 3), (13, 3), (14, 0)],  # the last seven of 19
        [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 6, 10, 17, 13, 16, 15, 12, 14],
    ),
}

lengths_strategy = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(lambda lengths: sum(lengths) > 0)


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_index_equals_the_golden_vectors(num_samples):
    """One epoch, two mixed, and three with the last shuffled separately."""
    lengths = np.array([5, 3, 7, 4, 6], dtype=np.int32)
    epochs, document, sample, shuffle = GOLDEN[num_samples]
    assert epochs_needed(25, num_samples, 4) == epochs
    index = build_index(lengths, np.arange(5), epochs, 4, 1234)
    assert index.document.tolist() == document
    assert index.sample[-len(sample) :].tolist() == [list(row) for row in sample]
    assert len(index.sample) == len(shuffle) + 1
    assert index.shuffle.tolist() == shuffle
    assert (index.document.dtype, index.sample.dtype, index.shuffle.dtype) == (np.int32, np.int32, np.uint32)


def plain_sample_index(lengths, document, seq_length):
    """The start of each sample in the stream, found token by token."""
    stream = [(place, offset) for place, d in enumerate(document) for offset in range(lengths[d])]
    num_samples = (len(stream) - 1) // seq_length
    return [(0, 0), *(stream[k * seq_length] for k in range(1, num_samples + 1))]


@given(
    lengths=lengths_strategy,
    seq_length=st.integers(1, 12) | st.integers(100, 200),
    block=st.sampled_from([1, 2, 16, gpt_dataset.BLOCK]),
    data=st.data(),
)
def test_sample_index_equals_a_walk_over_the_tokens(lengths, seq_length, block, data):
    """The corner cases are empty documents, documents as long as many samples, samples as long as many documents, and
    blocks of documents without a start."""
    document = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=30)), dtype=np.int32)
    if sum(lengths[d] for d in document) == 0:
        document = np.array([int(np.argmax(lengths))], dtype=np.int32)
    with patch.object(gpt_dataset, "BLOCK", block):
        built = build_sample_index(np.array(lengths, dtype=np.int32), document, seq_length)
    assert built.tolist() == [list(row) for row in plain_sample_index(lengths, document, seq_length)]


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_strategy, seq_length=st.integers(2, 12), seed=st.integers(0, 2**32 - 1))
def test_sample_index_equals_the_compiled_helper(lengths, seq_length, seed):
    sizes = np.array(lengths, dtype=np.int32)
    document = np.tile(np.arange(len(sizes), dtype=np.int32), 3)
    np.random.RandomState(seed).shuffle(document)
    theirs = megatron_core.helpers().build_sample_idx_int32(sizes, document, seq_length, 3, int(sizes.sum()), True, 1)
    np.testing.assert_array_equal(build_sample_index(sizes, document, seq_length), theirs)


def dataset_of(tmp_path, lengths, num_samples, seq_length, seed=1234, first=0, last=None, **overrides):
    indexed = IndexedDataset(write_corpus(tmp_path / "corpus", lengths))
    return GPTDataset(
        indexed,
        np.arange(first, len(lengths) if last is None else last),
        num_samples=num_samples or 0,
        planned_samples=num_samples,
        seq_length=seq_length,
        seed=seed,
        cache_dir=tmp_path / "cache",
        split_name="train",
        **{"vocab_size": None, **overrides},
    )


@pytest.mark.parametrize("seed", [1, 1234, 2**32 - 1])
@pytest.mark.parametrize("num_samples", [1, 30, 55, 100, 155, 160, 311])
def test_samples_equal_megatron_cores(tmp_path, seed, num_samples):
    """One to six epochs, the last shuffled separately or not, with empty documents and documents of many samples."""
    lengths = [*np.random.default_rng(5).integers(0, 60, size=30).tolist(), 0, 0, 700, 0]
    ours = dataset_of(tmp_path, lengths, num_samples, 31, seed)
    theirs, _, _ = megatron_core.build_splits([ours.indexed.prefix], [1, 0, 0], [num_samples, 0, 0], 31, seed)
    assert len(ours) == len(theirs)
    for k in range(len(ours)):
        np.testing.assert_array_equal(ours[k], megatron_core.sample_of(theirs, k))


@pytest.mark.parametrize(("num_samples", "last_separate"), [(179, True), (180, False)])
def test_the_last_epoch_is_shuffled_separately_below_megatrons_threshold(tmp_path, num_samples, last_separate):
    """An epoch has 100 samples. The last is shuffled separately when fewer than 80 of its samples are needed."""
    lengths = [10] * 80 + [1]  # 801 tokens are 100 samples of 8 and the extra label
    ours = dataset_of(tmp_path, lengths, num_samples, 8)
    assert ours.epochs == Epochs(2, last_separate)
    theirs, _, _ = megatron_core.build_splits([ours.indexed.prefix], [1, 0, 0], [num_samples, 0, 0], 8, 1234)
    for k in range(len(ours)):
        np.testing.assert_array_equal(ours[k], megatron_core.sample_of(theirs, k))


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_strategy, seq_length=st.integers(1, 12), seed=st.integers(0, 1000))
def test_one_epoch_reads_every_token_once_as_a_target(tmp_path_factory, lengths, seq_length, seed):
    """Except the first token of the stream and the tokens that do not fill a last sample."""
    if sum(lengths) < seq_length + 1:
        return
    dataset = dataset_of(tmp_path_factory.mktemp("epoch"), lengths, None, seq_length, seed)
    targets = np.concatenate([dataset[k][1:] for k in range(len(dataset))])
    assert len(targets) == len(set(targets.tolist())) == (sum(lengths) - 1) // seq_length * seq_length


def test_neighbouring_samples_share_one_token(tmp_path):
    """The last label of one sample is the first input of the next, so no target is lost between them."""
    dataset = dataset_of(tmp_path, [50], None, 7)
    in_order = [dataset[k] for k in np.argsort(dataset.index.shuffle)]
    assert [sample[0] for sample in in_order] == [0, 7, 14, 21, 28, 35, 42]
    assert [sample[-1] for sample in in_order] == [7, 14, 21, 28, 35, 42, 49]
    assert in_order[0].dtype == np.int64


def test_a_split_reads_only_its_own_documents(tmp_path):
    dataset = dataset_of(tmp_path, [10, 20, 30, 40], 20, 5, first=1, last=3)
    assert {token for k in range(len(dataset)) for token in dataset[k].tolist()} <= set(range(10, 60))


def test_a_corpus_rewritten_under_its_name_gets_a_new_index(tmp_path):
    """By path, size and time, as archives keep them, the new tokens would be read in the order of the old documents."""
    dataset_of(tmp_path, [10, 20, 30], None, 4)
    before = (tmp_path / "corpus.idx").stat()
    lengths = [25, 5, 30]
    write_corpus(tmp_path / "corpus", lengths)
    os.utime(tmp_path / "corpus.idx", ns=(before.st_atime_ns, before.st_mtime_ns))
    indexed = IndexedDataset(tmp_path / "corpus")
    common = {
        "num_samples": 0,
        "planned_samples": None,
        "seq_length": 4,
        "seed": 1234,
        "split_name": "train",
        "vocab_size": None,
    }
    again = GPTDataset(indexed, np.arange(3), cache_dir=tmp_path / "cache", **common)
    np.testing.assert_array_equal(
        again.index.sample, build_sample_index(np.array(lengths), np.array(again.index.document), 4)
    )


def test_another_seed_has_an_index_of_its_own(tmp_path):
    """A second run of a study would read the samples in the order of the first."""
    indexed = IndexedDataset(write_corpus(tmp_path / "corpus", [5, 3, 7, 4, 6]))

    def order(seed: int, cache: str) -> list[int]:
        common = {"num_samples": 11, "planned_samples": 11, "seq_length": 4, "split_name": "train", "vocab_size": None}
        data = GPTDataset(indexed, np.arange(5), seed=seed, cache_dir=tmp_path / cache, **common)
        return data.index.shuffle.tolist()

    assert order(1, "shared") != order(2, "shared") == order(2, "fresh")


@pytest.mark.parametrize("token", [100, 2**31 - 1, -1])
def test_a_token_beyond_the_vocabulary_is_an_error(tmp_path, token):
    """An embedding would read another rank's row or a zero, or crash the device without naming the cause."""
    prefix = write_corpus(tmp_path / "corpus", [10, 10, 10])
    tokens = np.fromfile(tmp_path / "corpus.bin", np.int32)
    tokens[15] = token
    tokens.tofile(tmp_path / "corpus.bin")
    dataset = GPTDataset(
        IndexedDataset(prefix),
        np.arange(3),
        num_samples=0,
        planned_samples=None,
        seq_length=29,
        seed=1,
        cache_dir=tmp_path,
        split_name="train",
        vocab_size=100,
    )
    with pytest.raises(
        DataError, match=f"corpus.bin: document 1 contains token id {token}, but the vocabulary has 100"
    ):
        dataset[0]


def test_the_largest_id_of_the_vocabulary_is_allowed(tmp_path):
    assert dataset_of(tmp_path, [100], None, 99, vocab_size=100)[0].max() == 99


@pytest.mark.parametrize(
    ("lengths", "num_samples", "message"),
    [
        ([0, 0], 5, "the train split has 2 of 2 documents, 0 tokens, and needs 1;"),
        ([3, 2], None, "the train split has 2 of 2 documents, 5 tokens, and needs 9;"),
    ],
)
def test_a_split_with_too_few_tokens_is_an_error(tmp_path, lengths, num_samples, message):
    """Without tokens no number of epochs is enough. A dataset of one epoch needs one full sample."""
    with pytest.raises(DataError, match=message):
        dataset_of(tmp_path, lengths, num_samples, 8)


def test_a_split_without_documents_is_an_error(tmp_path):
    with pytest.raises(
        DataError, match=r"the train split has 0 of 2 documents, .* give it a larger part of data.split"
    ):
        dataset_of(tmp_path, [30, 30], 5, 8, first=1, last=1)


@pytest.mark.parametrize("num_samples", [10**15, 10**19, 10**30])
def test_more_samples_than_memory_can_index_are_an_error(tmp_path, num_samples):
    """More than an address space, more than NumPy's largest array, and more than its integers."""
    with pytest.raises(
        DataError,
        match=f"corpus: train split: no memory for the index of {num_samples:,} samples .*; lower train.iterations",
    ):
        dataset_of(tmp_path, [5, 3, 7], num_samples, 4)


def forge(cache, name: str, change) -> None:
    """Write another array into an entry of the index cache, with the right checksum."""
    (path,) = cache.glob(f"*-{name}.npy")
    (index,) = cache.glob("*.json")
    content, values = json.loads(index.read_text()), np.load(path)
    changed = change(values)
    values = np.array(changed, np.int64 if changed.min() < 0 else values.dtype)
    content["crc32"][name] = zlib.crc32(values.data)
    index.write_text(json.dumps(content))
    np.save(path, values)


FORGED = {
    "shuffle above": ("shuffle", lambda values: np.full_like(values, 2**31)),
    "shuffle below": ("shuffle", lambda values: np.full(len(values), -5)),
    "sample above": ("sample", lambda values: values + 10**6),
    "sample below": ("sample", lambda values: values - 10**6),
    "offset above": ("sample", lambda values: values + np.array([0, 10**6])),
    "offset below": ("sample", lambda values: values - np.array([0, 10])),
    "samples backwards": ("sample", lambda values: values[::-1]),
    "samples apart": ("sample", lambda values: values * np.array([2, 1])),
    "document above": ("document", lambda values: values + 10**6),
    "document below": ("document", lambda values: values - 10),
}


@pytest.mark.parametrize("case", FORGED)
def test_an_index_whose_places_are_not_in_the_corpus_is_refused(tmp_path, case):
    """Others may have written the cache/ beside their corpus."""
    lengths = [10] * 80 + [1]
    dataset_of(tmp_path, lengths, 100, 8)
    forge(tmp_path / "cache", *FORGED[case])
    data = dataset_of(tmp_path, lengths, 100, 8)
    with pytest.raises(DataError, match=r"corpus: the train split's index in cache/ .* delete"):
        [data[sample] for sample in range(len(data))]
