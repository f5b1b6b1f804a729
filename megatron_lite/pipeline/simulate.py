"""What a schedule does, without doing it: is it right, how long does it take, how much does it hold.

The rules, with stage = chunk * pp + rank: F needs F of the stage before; B and I need their own F and the B or I of
the stage after; W needs its I. A rank does its list in order and waits only for these; a send never waits.

Neighbouring ranks are joined by pipes: forward from rank r to r + 1, backward from r to r - 1, both round the ring
(from the last rank a micro-batch goes on to the next chunk on the first). All chunks share a pipe and what is put in
first comes out first, so reader and writer must have the same order in mind.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline.actions import Action, Schedule

Cost = Callable[[Action, int], float]  # (action, rank) -> duration, in any unit


class Span(NamedTuple):
    """When a rank did what."""

    rank: int
    action: Action
    start: float
    end: float


def check(schedule: Schedule, microbatches: int, chunks: int) -> None:
    """Raises ConfigError unless every gradient is computed once, nothing deadlocks and pipes keep their order.

    A schedule in which no rank has a B, I or W is one for evaluation: it must do every forward once.
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
    """Whether no rank computes any gradient, as in evaluation."""
    return all(action.op == "F" for order in schedule for action in order)


def timeline(schedule: Schedule, cost: Cost) -> list[Span]:
    """Every action with its start and end, when each takes what `cost` says and sends take no time.

    Raises ConfigError with what every stuck rank waits for, when none can go on.
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
                start = max([clock[rank], *(ends[result] for result in inputs)])
                clock[rank] = start + cost(action, rank)
                ends[_Result(_MAKES[action.op], stage, action.microbatch)] = clock[rank]
                spans.append(Span(rank, action, start, clock[rank]))
                left[rank].pop()
        if len(spans) == num_done:
            raise ConfigError("the schedule deadlocks: " + "; ".join(_stuck(left, ends, stages)))
    return spans


def bubble(schedule: Schedule, cost: Cost) -> float:
    """Share of all ranks' time that is spent idle between the first start and the last end, 0..1."""
    return idle_share(timeline(schedule, cost), num_ranks=len(schedule))


def idle_share(spans: list[Span], *, num_ranks: int) -> float:
    """Share of `num_ranks` ranks' time, from the first start to the last end, in which they do nothing, 0..1."""
    length = max(span.end for span in spans) - min(span.start for span in spans)
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (length * num_ranks) if length else 0.0


def peak_live(schedule: Schedule) -> list[int]:
    """For each rank, the most forwards whose activations it holds at once, one for each micro-batch and chunk.

    They are held from F until B, or until W where the backward is cut in two. In evaluation nothing is kept for a
    backward, so only the forward that is being computed counts.
    """
    if is_forward_only(schedule):
        return [1 for _ in schedule]
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(accumulate(change[action.op] for action in order)) for order in schedule]


class _Result(NamedTuple):
    """What an action leaves for others: an output, a gradient of the stage's input, or the weights' gradients."""

    kind: str
    stage: int
    microbatch: int


_MAKES = {"F": "output", "B": "gradient", "I": "gradient", "W": "weights"}


def _inputs(action: Action, stage: int, stages: int) -> list[_Result]:
    """What must be there before `action` can run; `stages` is how many there are along the model."""
    if action.op == "F":
        return [_Result("output", stage - 1, action.microbatch)] if stage else []
    if action.op == "W":
        return [_Result("gradient", stage, action.microbatch)]
    own = _Result("output", stage, action.microbatch)
    return [own] if stage == stages - 1 else [own, _Result("gradient", stage + 1, action.microbatch)]


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
            raise ConfigError(
                f"rank {rank}: {action} is no F (forward), B (backward), I (its input half) or W (weights)"
            )
        if not 0 <= action.microbatch < microbatches:
            raise ConfigError(
                f"rank {rank}: {action} is of micro-batch {action.microbatch}; there are {microbatches}, from 0"
            )
        if not 0 <= action.chunk < chunks:
            raise ConfigError(f"rank {rank}: {action} is of model chunk {action.chunk}; there are {chunks}, from 0")
        if times > 1:
            raise ConfigError(f"rank {rank}: {action} is there {times} times")


def _check_passes(rank: int, order: list[Action], microbatches: int, chunks: int, *, evaluates: bool) -> None:
    """Every micro-batch goes through every chunk once: F, then B or I and W, in that order; or F alone."""
    position = {action: index for index, action in enumerate(order)}
    for microbatch, chunk in product(range(microbatches), range(chunks)):
        forward, whole, inputs, weights = (Action(op, microbatch, chunk) for op in "FBIW")
        cut = inputs in position or weights in position
        if cut and whole in position:
            half = inputs if inputs in position else weights
            raise ConfigError(
                f"rank {rank}: {half} is a part of {whole}, which is there too; use {whole}, or both halves"
            )
        wanted = [forward] if evaluates else [forward, inputs, weights] if cut else [forward, whole]
        for action in wanted:
            if action not in position:
                raise ConfigError(f"rank {rank}: {action} is missing")
        for earlier, later in pairwise(wanted):
            if position[later] < position[earlier]:
                raise ConfigError(f"rank {rank}: {later} before its {earlier}, which it needs")
    # The engine announces the last gradient of a chunk's parameters, of each half apart when the backward is cut.
    for chunk in range(chunks):
        whole, cut = (next((a for a in order if a.op in ops and a.chunk == chunk), None) for ops in ("B", "IW"))
        if whole and cut:
            raise ConfigError(
                f"rank {rank}: chunk {chunk} has {whole} whole and {cut} cut in halves; cut every backward of a chunk "
                "on a rank, or none"
            )


def _check_pipe(schedule: Schedule, rank: int, kind: str, step: int) -> None:
    """The neighbour to which `rank` sends what is of `kind` reads in the order of writing, whatever the chunk."""
    pp = len(schedule)
    neighbour = (rank + step) % pp
    written = [(a.stage(rank, pp) + step, a.microbatch) for a in schedule[rank] if _MAKES[a.op] == kind]
    read = {(a.stage(neighbour, pp), a.microbatch): a for a in schedule[neighbour] if _MAKES[a.op] == kind}
    # What the last stage writes has no reader, and what the first reads no writer.
    sent = set(written)
    turns = [read[key] for key in written if key in read]
    reads = [action for key, action in read.items() if key in sent]
    for due, action in zip(turns, reads, strict=True):
        if action != due:
            raise ConfigError(
                f"rank {neighbour}: {action} reads the {kind} that rank {rank} sent for {due}; a pipe hands out in the "
                "order in which it was filled, so both ranks must do these in one order"
            )
