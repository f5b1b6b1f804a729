"""The check rejects exactly the schedules that hang or compute wrong results; the simulated times are exact."""

import random
from collections import defaultdict, deque
from functools import cache
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline.schedules import Action, build_schedule
from megatron_lite.pipeline.simulate import check, timeline
from megatron_lite.plan.bubbles import bubble, idle_share


class Wrong(Exception):
    """A schedule broke a rule."""


def run(schedule, microbatches, chunks, seed=0):
    """Run a schedule on labels instead of tensors, and raise Wrong unless every gradient is computed once.

    Ranks send (stage, micro-batch) labels through queues and take turns in a random order. An action takes the first
    label of its queue, so an input in another order is a wrong input.
    """
    pp, last = len(schedule), len(schedule) * chunks - 1
    queues = defaultdict(deque)  # (reader, "activation" or "gradient") -> (stage that wrote, micro-batch)
    done, left = set(), [deque(order) for order in schedule]
    turns = random.Random(seed)

    def step(rank):
        """Run the next action of a rank; return False if it has to wait."""
        op, m, chunk = left[rank][0]
        stage = chunk * pp + rank
        if not (op in "FBIW" and 0 <= m < microbatches and 0 <= chunk < chunks):
            raise Wrong("no such action")
        what, source = ("activation", stage - 1) if op == "F" else ("gradient", stage + 1)
        if op != "W" and 0 <= source <= last:
            if not queues[rank, what]:
                return False
            if queues[rank, what].popleft() != (source, m):
                raise Wrong("input of another action")
        if op in "BI" and ("forward", stage, m) not in done:
            raise Wrong("backward without forward")
        if op == "W" and ("input gradient", stage, m) not in done:
            raise Wrong("weight gradient before input gradient")
        for result in {
            "F": ["forward"],
            "B": ["input gradient", "weight gradient"],
            "I": ["input gradient"],
            "W": ["weight gradient"],
        }[op]:
            if (result, stage, m) in done:
                raise Wrong(f"{result} twice")
            done.add((result, stage, m))
        if op == "F" and stage < last:
            queues[(rank + 1) % pp, what].append((stage, m))
        if op in "BI" and stage > 0:
            queues[(rank - 1) % pp, what].append((stage, m))
        left[rank].popleft()
        return True

    while any(left):
        waiting = [rank for rank in range(pp) if left[rank]]
        turns.shuffle(waiting)
        moved = [step(rank) for rank in waiting]
        if not any(moved):
            raise Wrong("deadlock")
    results = {"forward", "input gradient", "weight gradient"}
    if all(action.op == "F" for order in schedule for action in order):
        results = {"forward"}
    if done != set(product(results, range(last + 1), range(microbatches))):
        raise Wrong("something is missing")
    for order, chunk in product(schedule, range(chunks)):
        if {"B", "I"} <= {action.op for action in order if action.chunk == chunk}:
            raise Wrong("full and split backwards of one chunk")


def is_correct(schedule, microbatches, chunks, seed=0):
    try:
        run(schedule, microbatches, chunks, seed)
    except Wrong:
        return False
    return True


def is_accepted(schedule, microbatches, chunks):
    try:
        check(schedule, microbatches, chunks)
    except ConfigError:
        return False
    return True


@st.composite
def shapes(draw, most_ranks=8, most_microbatches=32):
    """A valid (name, pp, microbatches, chunks)."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "forward-only"]))
    pp = draw(st.integers(1, most_ranks))
    if name == "interleaved":
        return name, pp, pp * draw(st.integers(1, most_microbatches // pp)), draw(st.integers(2, 4))
    chunks = draw(st.integers(1, 4)) if name == "forward-only" else 1
    return name, pp, draw(st.integers(1, most_microbatches)), chunks


@given(shape=shapes(), seed=st.integers(0, 99))
def test_every_schedule_computes_every_gradient_through_queues(shape, seed):
    """A plain engine finds the right input in every queue, whichever rank is faster."""
    name, pp, microbatches, chunks = shape
    run(build_schedule(name, pp, microbatches, chunks), microbatches, chunks, seed)


def mutate(schedule, microbatches, chunks, turns):
    """Change one action at random: swap, drop, repeat or add it, or change its op, micro-batch or chunk."""
    changed = [list(order) for order in schedule]
    order = changed[turns.randrange(len(changed))]
    index = turns.randrange(len(order))
    action = order[index]
    kind = turns.choice(["swap", "swap near", "drop", "repeat", "add", "op", "microbatch", "chunk"])
    if kind == "swap":
        other = turns.randrange(len(order))
        order[index], order[other] = order[other], order[index]
    elif kind == "swap near":
        other = (index + 1) % len(order)
        order[index], order[other] = order[other], order[index]
    elif kind == "drop":
        del order[index]
    elif kind == "repeat":
        order.insert(turns.randrange(len(order) + 1), action)
    elif kind == "add":
        other = Action(turns.choice("FBIW"), turns.randrange(-1, microbatches + 1), turns.randrange(-1, chunks + 1))
        order.insert(turns.randrange(len(order) + 1), other)
    elif kind == "op":
        order[index] = action._replace(op=turns.choice("FBIWX"))
    elif kind == "microbatch":
        order[index] = action._replace(microbatch=turns.randrange(-1, microbatches + 1))
    else:
        order[index] = action._replace(chunk=turns.randrange(-1, chunks + 1))
    return changed


@settings(max_examples=1000)
@given(shape=shapes(most_ranks=4, most_microbatches=8), seed=st.integers(0, 10**9))
def test_a_mutated_schedule_is_accepted_exactly_when_it_is_still_correct(shape, seed):
    """A lenient check lets runs hang or train on wrong gradients; a strict one rejects correct schedules."""
    name, pp, microbatches, chunks = shape
    schedule = build_schedule(name, pp, microbatches, chunks)
    turns = random.Random(seed)
    for _ in range(3):
        changed = mutate(schedule, microbatches, chunks, turns)
        assert is_accepted(changed, microbatches, chunks) == is_correct(changed, microbatches, chunks), changed


@pytest.mark.parametrize(
    "pp, microbatches, ops", [(1, 2, "FB"), (2, 2, "FB"), (2, 1, "FIW"), (3, 1, "FIW"), (2, 3, "F")]
)
def test_of_all_orders_exactly_the_correct_ones_are_accepted(pp, microbatches, ops):
    """Every combination of orders of the ranks is tried."""
    actions = [Action(op, m) for op in ops for m in range(microbatches)]
    verdicts = [
        (is_accepted(schedule, microbatches, 1), is_correct(schedule, microbatches, 1))
        for schedule in map(list, product(map(list, permutations(actions)), repeat=pp))
    ]
    assert all(accepted == right for accepted, right in verdicts)
    assert any(accepted for accepted, _ in verdicts) and not all(accepted for accepted, _ in verdicts)


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_of_all_orders_of_two_chunks_exactly_the_correct_ones_are_accepted(pp):
    """Two ranks send activations in both directions and gradients in both directions."""
    actions = [Action("F", m, chunk) for m in range(2) for chunk in range(2)]
    verdicts = [
        (is_accepted(schedule, 2, 2), is_correct(schedule, 2, 2))
        for schedule in map(list, product(map(list, permutations(actions)), repeat=pp))
    ]
    assert all(accepted == right for accepted, right in verdicts)
    assert any(accepted for accepted, _ in verdicts) and not all(accepted for accepted, _ in verdicts)


def order(text):
    """The actions of one rank, parsed from their printed form."""
    parts = [(word[0], *map(int, word[1:].split("."))) for word in text.split()]
    return [Action(*part) for part in parts]


def broken(name, pp, microbatches, chunks, rank, old, new):
    """A valid schedule with `old` in the list of `rank` replaced by `new`."""
    schedule = [list(actions) for actions in build_schedule(name, pp, microbatches, chunks)]
    text = " ".join(map(str, schedule[rank]))
    assert text.count(old) == 1, text
    schedule[rank] = order(text.replace(old, new))
    return schedule


@pytest.mark.parametrize(
    ("shape", "rank", "old", "new", "message"),
    [
        # a swapped pair that an action of the same rank depends on
        (("1f1b", 4, 8, 1), 2, "F4.0 B3.0 F5.0 B4.0", "B4.0 B3.0 F5.0 F4.0", "rank 2: B4.0 comes before F4.0, which"),
        (("zb-h1", 2, 4, 1), 1, "I1.0 W0.0", "W1.0 W0.0 I1.0", "rank 1: W1.0 occurs 2 times"),
        (("zb-h1", 2, 2, 1), 0, "I1.0 W1.0", "W1.0 I1.0", "rank 0: W1.0 comes before I1.0, which it needs"),
        # an action is missing, repeated, or both full and split
        (("zb-h1", 2, 4, 1), 1, " W3.0", "", "rank 1: W3.0 is missing"),
        (("zb-h1", 2, 4, 1), 1, "I2.0 ", "", "rank 1: I2.0 is missing"),
        (("1f1b", 2, 4, 1), 1, " B3.0", "", "rank 1: B3.0 is missing"),
        (("1f1b", 2, 4, 1), 0, "F2.0 ", "", "rank 0: F2.0 is missing"),
        (("gpipe", 2, 4, 1), 0, "B2.0", "B2.0 B2.0", "rank 0: B2.0 occurs 2 times"),
        (("zb-h1", 2, 4, 1), 0, "W2.0", "B2.0", "rank 0: chunk 0 has both B2.0 and I0.0; split all its backwards"),
        (("zb-h1", 2, 4, 1), 0, "I2.0", "B2.0", "rank 0: chunk 0 has both B2.0 and I0.0; split all its backwards"),
        (("zb-h1", 2, 2, 1), 0, "I1.0 W1.0", "B1.0", "rank 0: chunk 0 has both B1.0 and I0.0; split all"),
        # an action outside the model or the batch
        (("interleaved", 2, 4, 2), 1, "F2.1", "F2.2", "rank 1: F2.2 has model chunk 2, not 0..1"),
        (("interleaved", 2, 4, 2), 1, "F2.1", "F2.0", "rank 1: F2.0 occurs 2 times"),
        (("1f1b", 2, 4, 1), 1, "B3.0", "B4.0", "rank 1: B4.0 has micro-batch 4, not 0..3"),
        (("1f1b", 2, 4, 1), 1, "B3.0", "B3.0 F-1.0", "rank 1: F-1.0 has micro-batch -1, not 0..3"),
        (("1f1b", 2, 4, 1), 1, "B3.0", "B3.0 F3.-1", "rank 1: F3.-1 has model chunk -1, not 0..0"),
        (("1f1b", 2, 4, 1), 1, "B3.0", "S3.0", "rank 1: S3.0 is not an F, B, I or W"),
        # a backward in an evaluation, and a missing forward
        (("forward-only", 2, 4, 1), 0, "F3.0", "F3.0 B0.0", "rank 0: B1.0 is missing"),
        (("forward-only", 2, 4, 2), 1, " F3.1", "", "rank 1: F3.1 is missing"),
        # one rank with another order
        (("gpipe", 3, 3, 1), 1, "F0.0 F1.0 F2.0", "F2.0 F1.0 F0.0", "rank 1: F2.0 receives the output that rank 0"),
        (("gpipe", 3, 3, 1), 1, "B0.0 B1.0 B2.0", "B2.0 B1.0 B0.0", "rank 0: B0.0 receives the gradient that rank 1"),
        (("zb-h1", 2, 2, 1), 1, "I0.0 F1.0 I1.0", "F1.0 I1.0 I0.0", "rank 0: I0.0 receives the gradient"),
        (("forward-only", 2, 2, 2), 1, "F0.1 F1.1", "F1.1 F0.1", "rank 1: F1.1 receives the output"),
    ],
)  # fmt: skip
def test_the_error_of_a_broken_schedule_names_rank_and_action(shape, rank, old, new, message):
    schedule = broken(*shape, rank, old, new)
    assert not is_correct(schedule, shape[2], shape[3])
    with pytest.raises(ConfigError) as error:
        check(schedule, shape[2], shape[3])
    assert str(error.value).startswith(message)


def test_the_order_of_sends_from_the_last_rank_to_the_first_is_checked():
    """Two ranks send activations in both directions; here only the order from rank 1 to rank 0 is wrong."""
    with pytest.raises(
        ConfigError, match=r"^rank 0: F1\.1 receives the output that rank 1 sent for F0\.1; use one order$"
    ):
        check([order("F0.0 F1.0 F1.1 F0.1"), order("F0.0 F1.0 F1.1 F0.1")], 2, 2)


def test_the_error_of_a_deadlock_names_the_action_that_every_rank_waits_for():
    """Each rank's order and the order of sends are valid, so only the simulation finds the deadlock."""
    schedule = [order("F0.0 B0.0 F1.0 B1.0"), order("F0.0 F1.0 B0.0 B1.0")]
    with pytest.raises(ConfigError) as error:
        check(schedule, 2, 1)
    assert str(error.value) == (
        "the schedule deadlocks: rank 0 at B0.0 waits for B0.0 or I0.0 of rank 1; "
        "rank 1 at F1.0 waits for F1.0 of rank 0"
    )


@given(shape=shapes(), seed=st.integers(0, 10**9))
def test_an_action_ends_after_its_longest_chain_of_dependencies(shape, seed):
    """Compared with a recursion over dependencies, with a random duration for every action and rank."""
    name, pp, microbatches, chunks = shape
    schedule = build_schedule(name, pp, microbatches, chunks)
    dice = random.Random(seed)
    cost = {(action, rank): dice.randrange(10) for rank in range(pp) for action in schedule[rank]}
    position = {(action, rank): index for rank in range(pp) for index, action in enumerate(schedule[rank])}
    last = pp * chunks - 1

    @cache
    def end(action, rank):
        op, m, chunk = action
        stage, before = chunk * pp + rank, []
        if index := position[action, rank]:
            before.append((schedule[rank][index - 1], rank))
        if op == "F" and stage > 0:
            before.append((Action("F", m, (stage - 1) // pp), (stage - 1) % pp))
        if op in "BI" and stage < last:
            before.append((Action(op, m, (stage + 1) // pp), (stage + 1) % pp))
        return max([end(*one) for one in before], default=0) + cost[action, rank]

    for action, rank in sorted(cost, key=lambda key: position[key]):  # shallow recursions first
        end(action, rank)
    spans = timeline(schedule, lambda action, rank: cost[action, rank])
    assert {(span.action, span.rank): span.end for span in spans} == {key: end(*key) for key in cost}
    assert all(span.end - span.start == cost[span.action, span.rank] for span in spans)


def test_idle_time_is_counted_from_the_first_start_to_the_last_end():
    """A measured timeline starts at any time. Actions of zero duration have no idle time."""
    schedule = build_schedule("gpipe", 2, 1, 1)
    spans = timeline(schedule, lambda action, rank: 1.0)
    later = [span._replace(start=span.start + 5, end=span.end + 5) for span in spans]
    assert idle_share(later, num_ranks=2) == idle_share(spans, num_ranks=2) == bubble(schedule, lambda a, r: 1.0) == 0.5
    assert bubble(schedule, lambda action, rank: 0.0) == 0.0
