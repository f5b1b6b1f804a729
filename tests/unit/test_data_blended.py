"""The three datasets of `data.paths` and `data.split`."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.blended import build_datasets, parse_paths, split_bounds
from megatron_lite.errors import ConfigError, DataError
from tests.helpers import megatron_core
from tests.helpers.corpora import write_corpus


@pytest.fixture
def corpora(tmp_path):
    """Three corpora of different sizes whose tokens do not overlap."""
    random = np.random.default_rng(3)
    return [
        write_corpus(tmp_path / name, random.integers(0, 80, size=size).tolist(), first_token=first)
        for name, size, first in (("a", 40, 0), ("b", 70, 10_000), ("c", 25, 20_000))
    ]


def build(tmp_path, paths, split=(8, 1, 1), num_samples=(150, 10, 4), **overrides):
    options = {
        "seq_length": 16,
        "seed": 7,
        "cache_dir": tmp_path / "cache",
        "vocab_size": None,
        "tokenizer_hash": None,
        **overrides,
    }
    return build_datasets(paths, split, num_samples=num_samples, **options)


@pytest.mark.parametrize("num_samples", [(20, 4, 2), (150, 30, 10), (700, 50, 60)])
@pytest.mark.parametrize("form", ["one", "weighted", "one weighted", "unweighted"])
def test_splits_and_blends_equal_megatron_cores(tmp_path, corpora, form, num_samples):
    """Part of an epoch and several epochs. Megatron's blend may be a few samples longer than requested."""
    a, b, c = corpora
    paths = {"one": [a], "weighted": ["3", a, "6.5", b, "0.5", c], "one weighted": ["1", b], "unweighted": [a, b, c]}
    if form == "unweighted":
        num_samples = (100, 7, 3)
    ours = build(tmp_path, paths[form], num_samples=num_samples)
    theirs = megatron_core.build_splits(paths[form], (8, 1, 1), num_samples, 16, 7)
    for wanted, our_split, their_split in zip(num_samples, ours, theirs, strict=True):
        assert wanted <= len(our_split) <= len(their_split)
        for k in range(len(our_split)):
            np.testing.assert_array_equal(our_split[k], megatron_core.sample_of(their_split, k))


@pytest.mark.parametrize("first, last", [(0, 50), pytest.param(50, 2000, marks=pytest.mark.soak)])
def test_the_orders_of_random_blends_equal_megatron_cores(first, last):
    """Weights whose quotients are rounded: one division more or less moves a tie between two corpora."""
    random = np.random.default_rng(first)
    for _ in range(first, last):
        size = random.integers(1, 13)
        draws = (
            random.choice([0.1, 0.2, 0.3, 0.7, 1 / 3], size),
            random.integers(1, 11, size),
            (random.random(size) + 0.01).round(2),
            10.0 ** random.uniform(-3, 3, size),
        )
        weights = draws[random.integers(len(draws))].tolist()
        paths = [text for number, weight in enumerate(weights) for text in (repr(weight), f"corpus{number}")]
        ours, (dataset, sample) = parse_paths(paths).choices(1000), megatron_core.blend_order(paths, 1000)
        assert (ours.dataset.tolist(), ours.sample.tolist()) == (dataset.tolist(), sample.tolist()), paths


def test_unweighted_corpora_give_every_target_once(tmp_path, corpora):
    sizes = [len(build(tmp_path, [prefix], (1, 0, 0), (1, 0, 0)).train) for prefix in corpora]
    train = build(tmp_path, corpora, (1, 0, 0), (sum(sizes), 0, 0)).train
    targets = np.concatenate([train[k][1:] for k in range(len(train))])
    assert len(set(targets.tolist())) == len(targets) == 16 * sum(sizes)


@pytest.mark.parametrize("field, num_samples", [("iterations", (9999, 1, 1)), ("eval_iterations", (1, 9999, 1))])
def test_more_samples_than_unweighted_corpora_have_are_an_error(tmp_path, corpora, field, num_samples):
    message = rf"one epoch of each corpus, \d+ samples; 9,999 are needed; lower train\.{field}, or put a weight"
    with pytest.raises(DataError, match=message):
        build(tmp_path, corpora, num_samples=num_samples)


@settings(max_examples=60, deadline=None)
@given(
    split=st.tuples(*[st.floats(0, 1000)] * 3).filter(lambda split: sum(split) > 1e-6),
    num_documents=st.integers(0, 10**6),
)
def test_splits_are_disjoint_and_cover_all_documents(split, num_documents):
    """A document in two splits would be validated on after being trained on."""
    bounds = [pair for pair in split_bounds(split, num_documents) if pair is not None]
    edges = [edge for pair in bounds for edge in pair]
    assert edges[0] == 0 and edges[-1] == num_documents
    assert edges == sorted(edges) and edges[1:-1:2] == edges[2::2]


def test_a_split_of_zero_or_without_samples_is_none(tmp_path, corpora):
    splits = build(tmp_path, corpora[:1], split=(9, 1, 0), num_samples=(10, 0, 5))
    assert splits.train is not None and splits.valid is None and splits.test is None


def test_a_split_without_documents_is_absent(tmp_path):
    """0.1 % of 40 documents rounds to 0. The default split must work for a small corpus."""
    prefix = write_corpus(tmp_path / "few", [50] * 40)
    splits = build(tmp_path, [prefix], split=(969, 30, 1))
    assert splits.train is not None and splits.valid is not None and splits.test is None


def test_a_training_split_without_documents_is_an_error(tmp_path, corpora):
    """Also for one corpus of a blend, because its weight requires samples of it."""
    prefix = write_corpus(tmp_path / "few", [50] * 40)
    with pytest.raises(DataError, match="few: the train split has 0 of 40 documents"):
        build(tmp_path, ["1", corpora[1], "1", prefix], split=(1, 90, 0))


@pytest.mark.parametrize("weights", [("3", "1", "1"), ()])
def test_a_corpus_without_documents_for_a_split_is_left_out_of_that_split(tmp_path, corpora, weights):
    """The test split blends the other corpora in their proportions."""
    few = write_corpus(tmp_path / "few", [50] * 3, first_token=50_000)
    a, b, _ = corpora
    paths = [word for pair in zip(weights, [a, few, b], strict=True) for word in pair] if weights else [a, few, b]
    others = [word for word in paths if word not in (few,)] if not weights else ["3", a, "1", b]
    split = (8, 1, 1)
    ours, theirs = (build(tmp_path, given, split, num_samples=(10, 4, 4)) for given in (paths, others))
    assert ours.test is not None and theirs.test is not None and len(ours.test) == 4
    for k in range(4):
        np.testing.assert_array_equal(ours.test[k], theirs.test[k])
    assert any(ours.train[k].max() >= 50_000 for k in range(10)) or not weights


@pytest.mark.parametrize("split", [(1, 1), (1, 1, 1, 1), (-1, 1, 1), (0, 0, 0), (math.nan, 1, 1), (math.inf, 1, 1)])
def test_a_split_that_is_not_three_shares_is_an_error(split):
    with pytest.raises(ConfigError, match="give three numbers of at least 0, not all 0"):
        split_bounds(split, 10)


@pytest.mark.parametrize(
    ("paths", "prefixes", "weights"),
    [
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["1", "a", "3", "b"], ["a", "b"], [0.25, 0.75]),
        (["2", "a"], ["a"], [1.0]),
        (["1", "2", "3", "4"], ["2", "4"], [0.25, 0.75]),  # prefixes that look like numbers
    ],
)
def test_paths_are_read_in_all_of_megatrons_forms(paths, prefixes, weights):
    blend = parse_paths(paths)
    assert blend.prefixes == prefixes
    assert weights == (None if blend.weights is None else blend.weights.tolist())


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "data.paths is empty"),
        (["1", "a", "b"], "'1' is a weight; put one before every prefix"),
        (["1", "a", "b", "c"], "'1' is a weight; put one before every prefix"),
        (["a", "1", "b", "2"], "'1' is a weight; put one before every prefix"),
        (["0", "a", "1", "b"], r"the weights \[0.0, 1.0\]; each must be a number above 0"),
        (["nan", "a", "1", "b"], r"the weights \[nan, 1.0\]; each must be a number above 0"),
    ],
)
def test_a_wrong_mix_of_weights_and_prefixes_is_an_error(paths, message):
    with pytest.raises(ConfigError, match=message):
        parse_paths(paths)


def test_the_default_cache_is_beside_the_data(tmp_path, corpora):
    build(tmp_path, corpora[:1], cache_dir="")
    assert len(list((tmp_path / "cache").glob("*-shuffle.npy"))) == 3


def test_a_token_beyond_the_vocabulary_is_found_in_a_blend(tmp_path, corpora):
    train = build(tmp_path, ["1", corpora[0], "1", corpora[1]], vocab_size=9_999).train
    with pytest.raises(DataError, match=r"b.bin: document \d+ contains token id 1\d+, but the vocabulary has 9999 ids"):
        [train[k] for k in range(len(train))]


def test_a_blend_index_larger_than_memory_is_an_error(tmp_path, corpora, monkeypatch):
    def too_large(weights, num_samples):
        raise MemoryError("Unable to allocate 1.82 TiB")

    monkeypatch.setattr("megatron_lite.data.blended.weighted_blend", too_large)
    message = r"the blend of .*: train split: no memory for the index of 150 samples \(Unable to allocate"
    with pytest.raises(DataError, match=message):
        build(tmp_path, ["0.5", corpora[0], "0.5", corpora[1]])
