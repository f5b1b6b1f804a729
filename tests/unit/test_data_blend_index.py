"""The blend equals Megatron's greedy choices, although it decides blocks of samples at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.blend_index import exhaustive_blend, weighted_blend
from tests.helpers import megatron_core

weights_strategy = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8).map(lambda w: np.array(w) / np.sum(w))


def plain_blend(weights, num_samples):
    """The greedy rule applied to one sample after another."""
    counts = np.zeros(len(weights))
    chosen = []
    for i in range(num_samples):
        chosen.append(int(np.argmax(weights * max(i, 1) - counts)))
        counts[chosen[-1]] += 1
    return chosen


def test_blends_equal_the_golden_vectors():
    blend = weighted_blend(np.array([0.3, 0.7]), 10)
    assert blend.dataset.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert blend.sample.tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]
    assert weighted_blend(np.array([0.5, 0.3, 0.2]), 10).dataset.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]


@settings(max_examples=50, deadline=None)
@given(weights=weights_strategy, num_samples=st.integers(1, 500))
def test_blend_equals_the_rule_applied_one_by_one(weights, num_samples):
    assert weighted_blend(weights, num_samples).dataset.tolist() == plain_blend(weights, num_samples)


@settings(max_examples=50, deadline=None)
@given(weights=weights_strategy, num_samples=st.integers(1, 3000))
def test_every_prefix_has_the_requested_proportions(weights, num_samples):
    """No corpus is ever more than one sample ahead of its share, and each is read in order."""
    blend = weighted_blend(weights, num_samples)
    for d, weight in enumerate(weights):
        taken = np.cumsum(blend.dataset == d)
        # 1e-9: `weight * i` is rounded.
        assert (taken <= weight * np.maximum(np.arange(num_samples), 1) + 1 + 1e-9).all()
        assert blend.sample[blend.dataset == d].tolist() == list(range(taken[-1]))


@pytest.mark.parametrize("num_datasets", [1, 2, 3, 10, 60])
@pytest.mark.parametrize("shape", ["random", "equal", "heavy tailed"])
def test_long_blends_equal_the_compiled_helper(num_datasets, shape):
    """Equal weights are all ties; heavy tails leave some corpora thousands of samples between turns."""
    random = np.random.default_rng(num_datasets)
    draws = {"random": random.random, "equal": np.ones, "heavy tailed": lambda n: random.pareto(1, n)}
    weights = draws[shape](num_datasets) + 1e-6
    weights /= weights.sum()
    num_samples = 200_000
    dataset, sample = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
    megatron_core.helpers().build_blending_indices(dataset, sample, weights.tolist(), num_datasets, num_samples, False)
    blend = weighted_blend(weights, num_samples)
    np.testing.assert_array_equal(blend.dataset, dataset)
    np.testing.assert_array_equal(blend.sample, sample)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8), data=st.data())
def test_exhaustive_blend_equals_the_compiled_helper_and_uses_every_sample(sizes, data):
    """A shorter request is the start of the full blend."""
    total = sum(sizes)
    dataset, sample = np.zeros(total, np.int16), np.zeros(total, np.int64)
    megatron_core.helpers().build_exhaustive_blending_indices(dataset, sample, sizes, len(sizes))
    num_samples = data.draw(st.integers(1, total))
    blend = exhaustive_blend(np.array(sizes), num_samples)
    np.testing.assert_array_equal(blend.dataset, dataset[:num_samples])
    np.testing.assert_array_equal(blend.sample, sample[:num_samples])
    assert np.bincount(dataset, minlength=len(sizes)).tolist() == sizes
