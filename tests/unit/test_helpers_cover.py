"""The cover that `make test` runs has each pair of features of the whole list."""

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cover import cover, in_tiers, pairs
from tests.helpers.layouts import PACKING
from tests.helpers.parity import features

CASES = st.lists(st.frozensets(st.sampled_from("abcdefgh"), min_size=1), min_size=1, max_size=30)


@given(CASES)
def test_the_cover_has_every_pair_and_no_case_without_a_new_one(cases):
    """A pair that no chosen case has would be tested by nothing but `make soak`."""
    chosen = [cases[position] for position in cover(cases, pairs)]
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, cases))
    assert len(chosen) <= len(set().union(*map(pairs, cases)))


def test_cheap_cases_come_first():
    assert cover(["ab", "ba", "c"], pairs, cost={"ab": 4.0, "ba": 1.0, "c": 1.0}.__getitem__) == [1, 2]


def test_a_new_feature_adds_its_pairs_by_itself():
    cases = [("a", "b"), ("a", "b", "c"), ("b", "c")]
    assert [bool(case.marks) for case in in_tiers(cases, pairs)] == [True, False, True]
    assert [bool(case.marks) for case in in_tiers([*cases, ("a", "d")], pairs)] == [True, False, True, False]


def test_a_layout_has_its_sizes_and_its_switches_as_features():
    """A cover without sequence parallelism would miss its mistakes. True equals 1, and a size of 1 is not a feature."""
    switched = {"changes": {"parallel__tensor": 2, "parallel__sequence": True} | PACKING, "ranks": 2}
    switched["changes"] |= {"train__micro_batch_size": 1}
    assert features(switched) == {"tensor=2", "parallel__sequence=True", "packed"}
