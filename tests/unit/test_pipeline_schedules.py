"""The schedules have the bubbles and peak activations that their papers state."""

from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.schema import ParallelConfig
from megatron_lite.errors import ConfigError
from megatron_lite.pipeline.schedules import SCHEDULES, Action, build_schedule
from megatron_lite.pipeline.simulate import check, timeline
from megatron_lite.plan.bubbles import bubble, peak_live

ranks = st.integers(1, 8)
counts = st.integers(1, 32)
durations = st.integers(1, 9)  # integers, so that every sum is exact


def length(schedule, **cost):
    return max(span.end for span in timeline(schedule, lambda action, rank: cost[action.op]))


def test_the_config_offers_these_schedules():
    """A name in only one of the two would fail after the config is accepted, or could not be configured."""
    assert get_args(ParallelConfig.model_fields["schedule"].annotation) == tuple(SCHEDULES)


def test_1f1b_of_three_ranks_equals_the_figure():
    """Fig. 4 (top) of arXiv 2104.04473, written by hand for three ranks."""
    lines = [" ".join(f"{a.op}{a.microbatch}" for a in order) for order in build_schedule("1f1b", 3, 4, 1)]
    assert lines == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_zb_h1_of_three_ranks_equals_the_list_by_hand():
    """1F1B with the weight gradients r micro-batches late on rank r."""
    lines = [" ".join(f"{a.op}{a.microbatch}" for a in order) for order in build_schedule("zb-h1", 3, 4, 1)]
    assert lines == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaved_of_two_ranks_equals_the_list_by_hand():
    """Groups of two micro-batches: forward in chunk 0, then chunk 1; backward in chunk 1, then chunk 0."""
    lines = [" ".join(map(str, order)) for order in build_schedule("interleaved", 2, 2, 2)]
    assert lines == [
        "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0",
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0",
    ]


@given(name=st.sampled_from(["gpipe", "1f1b"]), pp=ranks, microbatches=counts, forward=durations, backward=durations)
def test_gpipe_and_1f1b_idle_for_pp_minus_1_of_their_slots(name, pp, microbatches, forward, backward):
    """(pp - 1) / (m + pp - 1) for any durations, also with fewer micro-batches than ranks."""
    idle = bubble(build_schedule(name, pp, microbatches, 1), lambda a, rank: forward if a.op == "F" else backward)
    assert idle == pytest.approx((pp - 1) / (microbatches + pp - 1), abs=1e-12)  # rounding of one division


@given(pp=ranks, groups=st.integers(1, 4), chunks=st.integers(2, 4), forward=durations, backward=durations)
def test_interleaving_divides_the_idle_time_by_the_number_of_chunks(pp, groups, chunks, forward, backward):
    """(pp - 1) / (chunks * m + pp - 1) for any durations."""
    schedule = build_schedule("interleaved", pp, groups * pp, chunks)
    idle = bubble(schedule, lambda a, rank: forward if a.op == "F" else backward)
    assert idle == pytest.approx((pp - 1) / (chunks * groups * pp + pp - 1), abs=1e-12)


@given(pp=ranks, more=st.integers(0, 24), forward=durations, inputs=durations, weights=durations)
def test_the_idle_time_of_zb_h1_equals_the_formula(pp, more, forward, inputs, weights):
    """Each rank idles for the paper's (pp - 1) * (F + I - W) with pp or more micro-batches. With long weight
    gradients, the ramp of forwards at the start or of input gradients remains."""
    microbatches = pp + more
    work = microbatches * (forward + inputs + weights)
    taken = length(build_schedule("zb-h1", pp, microbatches, 1), F=forward, I=inputs, W=weights)
    assert taken - work == (pp - 1) * max(forward + inputs - weights, forward, inputs)


@given(pp=ranks, microbatches=counts)
def test_zb_h1_has_the_minimal_length_when_all_passes_take_equally_long(pp, microbatches):
    """Two lower bounds of any schedule. The last rank starts after pp - 1 passes and has 3m passes. The first rank
    receives its first gradient after 2pp - 1 passes and then has 2m, which is more only when m < pp."""
    taken = length(build_schedule("zb-h1", pp, microbatches, 1), F=1, I=1, W=1)
    assert taken == max(pp - 1 + 3 * microbatches, 2 * pp - 1 + 2 * microbatches)
    if microbatches >= pp:
        idle = bubble(build_schedule("zb-h1", pp, microbatches, 1), lambda a, rank: 1)
        assert idle == pytest.approx((pp - 1) / (3 * microbatches + pp - 1), abs=1e-12)


@pytest.mark.parametrize("pp, microbatches", [(2, 2), (3, 2)])
def test_no_order_of_two_micro_batches_is_shorter_than_zb_h1(pp, microbatches):
    """Every combination of orders of the ranks is tried. In each order, F precedes I and I precedes W."""
    actions = [Action(op, m) for m in range(microbatches) for op in "FIW"]
    orders = [[]]
    for _ in actions:
        # An action may follow when its micro-batch's previous pass is in the order.
        orders = [
            [*order, a]
            for order in orders
            for a in actions
            if a not in order and (a.op == "F" or actions[actions.index(a) - 1] in order)
        ]
    assert len(orders) == 20
    lengths = []
    for schedule in product(orders, repeat=pp):
        try:
            check(list(schedule), microbatches, 1)
        except ConfigError:
            continue
        lengths.append(length(list(schedule), F=1, I=1, W=1))
    assert len(lengths) > 10
    assert min(lengths) == length(build_schedule("zb-h1", pp, microbatches, 1), F=1, I=1, W=1)


@given(pp=ranks, microbatches=counts)
def test_peak_activations_are_those_of_the_papers(pp, microbatches):
    """1F1B exists to save this memory. Every rank of ZB-H1 keeps as much as rank 0 of 1F1B."""
    assert peak_live(build_schedule("gpipe", pp, microbatches, 1)) == [microbatches] * pp
    assert peak_live(build_schedule("1f1b", pp, microbatches, 1)) == [min(microbatches, pp - r) for r in range(pp)]
    assert peak_live(build_schedule("zb-h1", pp, microbatches, 1)) == [min(microbatches, pp)] * pp


@given(pp=ranks, groups=st.integers(1, 4), chunks=st.integers(2, 4))
def test_interleaving_keeps_the_activations_of_its_warm_up_and_one_more(pp, groups, chunks):
    peaks = [min(2 * (pp - 1 - rank) + (chunks - 1) * pp + 1, groups * pp * chunks) for rank in range(pp)]
    assert peak_live(build_schedule("interleaved", pp, groups * pp, chunks)) == peaks


@given(pp=ranks, microbatches=counts, chunks=st.integers(1, 4))
def test_evaluation_keeps_one_forward_and_waits_only_to_fill(pp, microbatches, chunks):
    """With full groups, the last rank starts after pp - 1 slots and then never waits."""
    schedule = build_schedule("forward-only", pp, microbatches, chunks)
    assert peak_live(schedule) == [1] * pp
    if microbatches % pp == 0 or chunks == 1:
        assert length(schedule, F=1) == pp - 1 + microbatches * chunks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 4, 1), f"no schedule '2f2b'; use one of {', '.join([*SCHEDULES, 'forward-only'])}"),
        (("1f1b", 0, 4, 1), "schedule 1f1b needs 1 or more pipeline ranks, got 0"),
        (("gpipe", 2, 0, 1), "schedule gpipe needs 1 or more micro-batches, got 0"),
        (("forward-only", 2, 4, 0), "schedule forward-only needs 1 or more model chunks, got 0"),
        (("interleaved", 4, 8, 1), "interleaved needs 2 or more model chunks per rank, got 1; use 1f1b for 1"),
        (("interleaved", 4, 6, 2), "interleaved needs a multiple of pp (4) micro-batches, got 6"),
        (("gpipe", 4, 8, 2), "schedule gpipe runs 1 model chunk on each rank, got 2; use interleaved"),
        (("1f1b", 4, 8, 2), "schedule 1f1b runs 1 model chunk on each rank, got 2"),
        (("zb-h1", 4, 8, 2), "schedule zb-h1 runs 1 model chunk on each rank, got 2"),
    ],
)
def test_the_error_of_an_impossible_schedule_names_the_requirement(arguments, message):
    with pytest.raises(ConfigError) as error:
        build_schedule(*arguments)
    assert message in str(error.value)


def test_an_invalid_custom_schedule_is_an_error_when_it_is_built(monkeypatch):
    """Without the check, a mistake in a new schedule would make ranks hang."""
    monkeypatch.setitem(SCHEDULES, "backward first", lambda pp, m, chunks: [[Action("B", 0), Action("F", 0)]])
    with pytest.raises(ConfigError, match=r"rank 0: B0\.0 comes before F0\.0"):
        build_schedule("backward first", 1, 1, 1)
