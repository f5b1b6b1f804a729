"""Simulation of a schedule: its correctness and its duration.

The rules, with stage = chunk * pp + rank: F needs F of the previous stage; B and I need F of their stage and the B or I
of the next stage; W needs I of its stage. A rank executes its list in order; a send never waits.

Pipes connect neighbouring ranks: forward from rank r to r + 1 and backward from r to r - 1. With several chunks, pipes
also connect the last rank with the first. All chunks share a pipe, which delivers messages in the order of sending.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline.actions import Action, Schedule

Cost = Callable[[Action, int], float]  # (action, rank) -> duration, in any unit


class Span(NamedTuple):
    """The time of one action."""

    rank: int
    action: Action
    start: float
    end: float


def check(schedule: Schedule, microbatches: int, chunks: int) -> None:
    """Raise ConfigError unless every gradient is computed once, nothing deadlocks and pipes keep their order.

    A schedule without B, I and W is for evaluation and contains every forward once.
    """
    for rank, order in enumerate(schedule):
        _check_names(rank, order, microbatches, chunks)
    evaluates = is_forward_only(schedule)
    for rank, order in enumerate(schedule):
        _check_passes(rank, order, microbatches, chunks, evaluates=evaluates)
    for rank in range(len(schedule)):
        _check_pipe(schedule, rank, "output", +1)
        _check_pipe(schedule, rank, "gradient", -1)
    timeline(schedule, lambda action, rank: 1.0)


def is_forward_only(schedule: Schedule) -> bool:
    """Return True if no rank computes a gradient, as in evaluation."""
    return all(action.op == "F" for order in schedule for action in order)


def timeline(schedule: Schedule, cost: Cost, delay: float = 0.0) -> list[Span]:
    """Every action with its start and end, if each takes its `cost` and messages between stages take `delay`.

    Raises ConfigError with the missing input of every rank when no rank can continue.
    """
    pp = len(schedule)
    stages = pp * (1 + max(action.chunk for order in schedule for action in order))
    clock, spans = [0.0] * pp, []
    ends: dict[_Result, float] = {}
    left = [list(reversed(order)) for order in schedule]
    while any(left):
        num_done = len(spans)
        for rank in range(pp):
            while left[rank]:
                action = left[rank][-1]
                stage = action.stage(rank, pp)
                inputs = _inputs(action, stage, stages)
                if not all(result in ends for result in inputs):
                    break
                start = max([clock[rank], *(ends[each] + delay * (each.stage != stage) for each in inputs)])
                clock[rank] = start + cost(action, rank)
                ends[_Result(_MAKES[action.op], stage, action.microbatch)] = clock[rank]
                spans.append(Span(rank, action, start, clock[rank]))
                left[rank].pop()
        if len(spans) == num_done:
            raise ConfigError("the schedule deadlocks: " + "; ".join(_stuck(left, ends, stages)))
    return spans


class _Result(NamedTuple):
    """The result of an action: an output, a gradient of the stage's input, or the weights' gradients."""

    kind: str
    stage: int
    microbatch: int


_MAKES = {"F": "output", "B": "gradient", "I": "gradient", "W": "weights"}


def _inputs(action: Action, stage: int, stages: int) -> list[_Result]:
    """The results that `action` needs; `stages` is the number of stages of the model."""
    if action.op == "F":
        return [_Result("output", stage - 1, action.microbatch)] if stage else []
    if action.op == "W":
        return [_Result("gradient", stage, action.microbatch)]
    output = _Result("output", stage, action.microbatch)
    return [output] if stage == stages - 1 else [output, _Result("gradient", stage + 1, action.microbatch)]


def _stuck(left: list[list[Action]], ends: dict[_Result, float], stages: int) -> Iterator[str]:
    pp = len(left)
    for rank, todo in enumerate(left):
        if not todo:
            continue
        inputs = _inputs(todo[-1], todo[-1].stage(rank, pp), stages)
        kind, stage, microbatch = next(result for result in inputs if result not in ends)
        names = [str(Action(op, microbatch, stage // pp)) for op, makes in _MAKES.items() if makes == kind]
        yield f"rank {rank} at {todo[-1]} waits for {' or '.join(names)} of rank {stage % pp}"


def _check_names(rank: int, order: list[Action], microbatches: int, chunks: int) -> None:
    for action, times in Counter(order).items():
        if action.op not in _MAKES:
            raise ConfigError(f"rank {rank}: {action} is not an F, B, I or W")
        if not 0 <= action.microbatch < microbatches:
            raise ConfigError(f"rank {rank}: {action} has micro-batch {action.microbatch}, not 0..{microbatches - 1}")
        if not 0 <= action.chunk < chunks:
            raise ConfigError(f"rank {rank}: {action} has model chunk {action.chunk}, not 0..{chunks - 1}")
        if times > 1:
            raise ConfigError(f"rank {rank}: {action} occurs {times} times")


def _check_passes(rank: int, order: list[Action], microbatches: int, chunks: int, *, evaluates: bool) -> None:
    """Raise ConfigError unless every micro-batch has, in every chunk, F then B, F then I then W, or F in evaluation."""
    position = {action: index for index, action in enumerate(order)}
    for chunk in range(chunks):
        full, half = (next((a for a in order if a.op in ops and a.chunk == chunk), None) for ops in ("B", "IW"))
        if full and half:  # the engine announces the last gradient of a chunk by op
            raise ConfigError(f"rank {rank}: chunk {chunk} has both {full} and {half}; split all its backwards or none")
        for microbatch in range(microbatches):
            wanted = [Action(op, microbatch, chunk) for op in ("F" if evaluates else "FIW" if half else "FB")]
            for action in wanted:
                if action not in position:
                    raise ConfigError(f"rank {rank}: {action} is missing")
            for earlier, later in pairwise(wanted):
                if position[later] < position[earlier]:
                    raise ConfigError(f"rank {rank}: {later} comes before {earlier}, which it needs")


def _check_pipe(schedule: Schedule, rank: int, kind: str, step: int) -> None:
    """Raise ConfigError unless the neighbour receives results of `kind` in the order in which `rank` sends them."""
    pp = len(schedule)
    neighbour = (rank + step) % pp
    sent = [(a.stage(rank, pp) + step, a.microbatch) for a in schedule[rank] if _MAKES[a.op] == kind]
    received = {(a.stage(neighbour, pp), a.microbatch): a for a in schedule[neighbour] if _MAKES[a.op] == kind}
    # The last result along the model has no receiver, and the first stage has no sender.
    keys = set(sent)
    in_order_of_sending = [received[key] for key in sent if key in received]
    in_order_of_receiving = [action for key, action in received.items() if key in keys]
    for expected, action in zip(in_order_of_sending, in_order_of_receiving, strict=True):
        if action != expected:
            raise ConfigError(
                f"rank {neighbour}: {action} receives the {kind} that rank {rank} sent for {expected}; use one order"
            )
