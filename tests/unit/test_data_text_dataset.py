"""The texts of a corpus as samples: their order, their borders, and that no sample depends on how it is read."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config.schema import DataConfig
from megatron_lite.data.blended import BlendedDataset, build_datasets
from megatron_lite.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_lite.data.loader import PrefetchingLoader, stacked
from megatron_lite.data.text_dataset import TextDataset, num_documents, permuted
from megatron_lite.errors import DataError
from megatron_lite.plan.data_lines import epochs_of
from megatron_lite.preprocess.builder import IndexedDatasetBuilder
from tests.helpers.corpora import write_corpus

EOD = 7


class Plain:
    """A sample maker that returns the text, with a random number beside it."""

    text_length, eod = 10, EOD

    def __call__(self, tokens, random):
        padded = np.zeros(self.text_length, dtype=np.int64)
        padded[: len(tokens)] = tokens
        return {
            "tokens": padded,
            "labels": np.full(self.text_length, random.randint(1000)),
            "loss_mask": np.ones(self.text_length, dtype=np.float32),
            "lengths": np.array(len(tokens), dtype=np.int32),
        }


@pytest.fixture
def corpus(tmp_path):
    """Documents of 0 to 80 tokens, each token different from every other."""
    lengths = np.random.default_rng(3).integers(0, 80, size=40).tolist()
    return write_corpus(tmp_path / "a", lengths, first_token=100), lengths


def dataset(tmp_path, prefix: str, documents=None, **changes) -> TextDataset:
    indexed = IndexedDataset(prefix)
    options = {
        "num_samples": None,
        "make_sample": Plain(),
        "seed": 5,
        "cache_dir": tmp_path / "cache",
        "split_name": "train",
        "vocab_size": None,
        **changes,
    }
    return TextDataset(indexed, documents or (0, num_documents(indexed)), **options)


@given(size=st.integers(1, 3000), key=st.text(max_size=5))
@settings(max_examples=30, deadline=None)
def test_the_order_has_each_number_once(size, key):
    assert sorted(permuted(place, size, key) for place in range(size)) == list(range(size))


def test_an_order_looks_random_and_depends_on_its_key():
    """The correlation of place and number is that of a random order: below 4 / sqrt(n)."""
    first, second = ([permuted(place, 5000, key) for place in range(5000)] for key in ("a", "b"))
    assert first != second
    for order in (first, second):
        assert abs(np.corrcoef(order, range(5000))[0, 1]) < 4 / 5000**0.5
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 4 / 5000**0.5


def test_an_epoch_has_every_token_once_and_no_text_crosses_a_document(tmp_path, corpus):
    """A token is 100 plus its position, so a text of one document is a range of numbers."""
    prefix, lengths = corpus
    found = dataset(tmp_path, prefix)
    ends = 100 + np.cumsum(lengths)
    texts = [found[sample]["tokens"][: found[sample]["lengths"]] for sample in range(len(found))]
    for text in texts:
        assert 1 <= len(text) <= Plain.text_length and (np.diff(text) == 1).all()
        assert np.searchsorted(ends, text[0], side="right") == np.searchsorted(ends, text[-1], side="right")
    wanted = [
        token for end, length in zip(ends, lengths, strict=True) if length >= 3 for token in range(end - length, end)
    ]
    assert sorted(np.concatenate(texts).tolist()) == wanted
    long = [len(text) for text in texts]
    assert min(long) >= 3 and sorted(long)[len(long) // 2] > 7  # a long document has no short rest


def test_every_epoch_has_another_order_and_other_random_numbers(tmp_path, corpus):
    found = dataset(tmp_path, corpus[0], num_samples=300)
    size = found.samples_per_epoch
    assert len(found) % size == 0 and len(found) >= 300
    epochs = [[found.text(sample) for sample in range(start, start + size)] for start in (0, size)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    numbers = [found[sample]["labels"][0] for sample in range(2 * size)]
    assert len(set(numbers[:size])) > size / 3 and numbers[:size] != numbers[size:]
    assert epochs_of(found, 3 * size) == 3


def test_a_sample_is_a_function_of_seed_and_number(tmp_path, corpus):
    """Neither the number of samples of a run, nor reads before, nor the folder of the index matter."""
    first = dataset(tmp_path, corpus[0], num_samples=4)
    second = dataset(tmp_path / "other", corpus[0], num_samples=1000)
    backwards = [second[sample] for sample in reversed(range(20))]
    for sample, want in enumerate(reversed(backwards)):
        for name, values in first[sample].items():
            np.testing.assert_array_equal(values, want[name])
    other = dataset(tmp_path, corpus[0], seed=6)
    assert any(not np.array_equal(other[k]["tokens"], first[k]["tokens"]) for k in range(5))


@pytest.mark.parametrize("dp, micro", [(1, 8), (1, 2), (2, 2), (4, 1), (4, 2)])
def test_a_global_batch_has_the_same_samples_in_every_layout_and_after_a_resume(tmp_path, corpus, dp, micro):
    found = dataset(tmp_path, corpus[0], num_samples=100)

    def read(step: int, dp: int, micro: int) -> dict[str, torch.Tensor]:
        batches = []
        for rank in range(dp):
            common = {"data": DataConfig(), "eod": EOD, "device": torch.device("cpu")}
            with PrefetchingLoader(found, micro, dp_rank=rank, dp_size=dp, **common) as loader:
                batches.append(loader.get(step * 8, 8 // (micro * dp)))
        order = [batches[rank][number] for number in range(8 // (micro * dp)) for rank in range(dp)]
        return {name: torch.cat([getattr(batch, name) for batch in order]) for name in ("tokens", "labels")}

    for step in (0, 3):  # a resumed run starts to read at step 3
        got, want = read(step, dp, micro), read(step, 1, 8)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_sentences_of_a_document_form_its_texts(tmp_path):
    """Megatron splits documents into sentences, which are sequences of the file. An empty document has none."""
    builder = IndexedDatasetBuilder(bin_path(tmp_path / "s"), np.int32)
    tokens = np.arange(100, 130)
    builder.add_documents(tokens, np.array([4, 5, 6, 7, 8], dtype=np.int32))
    builder.finalize(idx_path(tmp_path / "s"))
    indexed = IndexedDataset(tmp_path / "s")
    indexed.document_indices = np.array([0, 2, 2, 5])
    assert num_documents(indexed) == 3
    options = {"num_samples": None, "make_sample": Plain(), "seed": 1, "cache_dir": tmp_path, "split_name": "train"}
    found = TextDataset(indexed, (0, 3), vocab_size=None, **options)
    texts = sorted(found[sample]["tokens"][: found[sample]["lengths"]].tolist() for sample in range(len(found)))
    assert texts == [list(range(100, 109)), list(range(109, 116)), list(range(116, 123)), list(range(123, 130))]
    last = TextDataset(indexed, (1, 3), vocab_size=None, **options | {"split_name": "valid"})
    assert {last.text(sample).document for sample in range(len(last))} == {2}


def test_end_of_document_tokens_are_left_out(tmp_path):
    prefix = write_corpus(tmp_path / "e", [8, 8], first_token=0)  # token 7 ends the first document
    texts = [dataset(tmp_path, prefix)[sample] for sample in range(2)]
    assert sorted(int(text["lengths"]) for text in texts) == [7, 8]
    assert all(EOD not in text["tokens"] for text in texts)


def test_splits_and_blends_have_disjoint_documents(tmp_path, corpus):
    other = write_corpus(tmp_path / "b", [30] * 20, first_token=50_000)
    options = {"seq_length": 10, "seed": 1, "cache_dir": tmp_path / "c", "vocab_size": None, "tokenizer_hash": None}
    one = build_datasets([corpus[0]], (8, 2, 0), num_samples=(50, 10, 0), make_sample=Plain(), **options)
    assert one.test is None
    tokens = [
        {token for sample in range(len(split)) for token in split[sample]["tokens"].tolist()} - {0}
        for split in (one.train, one.valid)
    ]
    assert not tokens[0] & tokens[1]
    paths = ["1", corpus[0], "3", other]
    blend = build_datasets(paths, (8, 2, 0), num_samples=(400, 10, 0), make_sample=Plain(), **options).train
    assert isinstance(blend, BlendedDataset)
    from_other = sum(blend[sample]["tokens"][0] >= 50_000 for sample in range(400))
    assert 295 <= from_other <= 305


def test_an_unknown_token_and_a_split_without_texts_are_errors(tmp_path, corpus):
    with pytest.raises(DataError, match=r"a\.bin: document \d+ contains token id \d+, but the vocabulary has 90 ids"):
        dataset(tmp_path, corpus[0], vocab_size=90)[0]
    short = write_corpus(tmp_path / "short", [2, 1, 2])
    with pytest.raises(DataError, match="the train split has 3 of 3 documents, none with 3 tokens; give it a larger"):
        dataset(tmp_path, short)


def test_a_batch_of_wrong_fields_is_an_error():
    good = {"tokens": np.zeros(4, dtype=np.int64), "labels": np.zeros(4, dtype=np.int64), "loss_mask": np.ones(4)}
    assert stacked([good, good]).tokens.shape == (2, 4)
    for samples in ([good | {"token_type": np.zeros(4)}], [good, {"tokens": np.zeros(4)}], [{"tokens": np.zeros(4)}]):
        with pytest.raises(
            DataError, match=r"the samples of a batch do not have its fields, equal in all of them.*tokens"
        ):
            stacked(samples)
    with pytest.raises(DataError, match="the samples of a batch do not have its fields"):
        stacked([good, good | {"tokens": np.zeros(5, dtype=np.int64)}])


def test_lengths_of_full_rows_are_left_out():
    """A mask without padding is computed faster."""
    good = {"tokens": np.zeros(4, dtype=np.int64), "labels": np.zeros(4, dtype=np.int64), "loss_mask": np.ones(4)}
    lengths = [good | {"lengths": np.array(length, dtype=np.int32)} for length in (4, 3)]
    assert stacked(lengths[:1]).lengths is None
    assert stacked(lengths).lengths.tolist() == [4, 3]
