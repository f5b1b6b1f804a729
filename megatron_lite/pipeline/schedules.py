"""Pipeline schedules as data: for each rank, the list of its actions in order.

A new schedule is a function that returns such lists, and a line in `SCHEDULES`. `build_schedule` simulates the lists
first, so a wrong one is an error and never a hang.
"""

from collections.abc import Callable, Iterable
from functools import cache

from megatron_lite.errors import ConfigError
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.simulate import check


def gpipe(pp: int, microbatches: int) -> Schedule:
    """Every forward, then every backward; each rank keeps the activations of all micro-batches.

    Source: GPipe, arXiv 1811.06965, Fig. 2c (there the order of the backwards is reversed).
    """
    order = [Action(op, m) for op in "FB" for m in range(microbatches)]
    return [list(order) for _ in range(pp)]


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """Each backward as soon as possible; the same duration as GPipe, but rank r keeps at most pp - r micro-batches.

    Source: PipeDream-Flush, Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503, section 3.2.
    """
    forwards = [Action("F", m) for m in range(microbatches)]
    backwards = [Action("B", m) for m in range(microbatches)]
    return [_alternate(forwards, backwards, warmup=pp - 1 - rank) for rank in range(pp)]


def interleaved(pp: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` model chunks on each rank: a `chunks` times shorter bubble for `chunks` times more sends.

    Micro-batches pass in groups of pp: the group through chunk 0, then through chunk 1, and so on.
    Source: Megatron-LM, arXiv 2104.04473, section 2.2 and Fig. 4 (bottom).
    """
    if chunks < 2:
        raise ConfigError(f"schedule interleaved needs 2 or more model chunks per rank, got {chunks}; use 1f1b for 1")
    if microbatches % pp:
        raise ConfigError(f"schedule interleaved needs a multiple of pp ({pp}) micro-batches, got {microbatches}")
    forwards = _in_groups("F", pp, microbatches, range(chunks))
    backwards = _in_groups("B", pp, microbatches, reversed(range(chunks)))
    return [_alternate(forwards, backwards, warmup=2 * (pp - 1 - rank) + (chunks - 1) * pp) for rank in range(pp)]


def zero_bubble_h1(pp: int, microbatches: int) -> Schedule:
    """1F1B with every backward split in I and W, and W of rank r deferred by r micro-batches.

    The previous rank does not wait for W, and W fills the time in which 1F1B drains. A deferred W keeps its
    activations, so every rank keeps pp micro-batches, like rank 0 of 1F1B. With pp or more micro-batches a rank idles
    for pp - 1 times F + I - W, or F or I if one of them is longer.
    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1 (ZB-H1).
    """
    schedule = []
    for rank, base in enumerate(one_f_one_b(pp, microbatches)):
        order = []
        for action in base:
            order.append(action if action.op == "F" else Action("I", action.microbatch))
            if action.op == "B" and action.microbatch >= rank:
                order.append(Action("W", action.microbatch - rank))
        remaining = range(max(0, microbatches - rank), microbatches)
        schedule.append(order + [Action("W", m) for m in remaining])
    return schedule


def forward_only(pp: int, microbatches: int, chunks: int) -> Schedule:
    """Forwards only, for evaluation, in groups of pp micro-batches; the last group may be smaller."""
    order = _in_groups("F", pp, microbatches, range(chunks))
    return [list(order) for _ in range(pp)]


def _alternate(forwards: list[Action], backwards: list[Action], *, warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[len(backwards) - warmup :]


def _in_groups(op: str, pp: int, microbatches: int, chunks: Iterable[int]) -> list[Action]:
    """`op` of every micro-batch in every chunk: pp micro-batches through all `chunks`, then the next pp."""
    order = list(chunks)
    return [
        Action(op, m, chunk)
        for first in range(0, microbatches, pp)
        for chunk in order
        for m in range(first, min(first + pp, microbatches))
    ]


Maker = Callable[[int, int, int], Schedule]  # (pp, microbatches, chunks)


def _with_one_chunk(name: str, make: Callable[[int, int], Schedule]) -> Maker:
    def make_with_one_chunk(pp: int, microbatches: int, chunks: int) -> Schedule:
        if chunks != 1:
            raise ConfigError(f"schedule {name} runs 1 model chunk on each rank, got {chunks}; use interleaved")
        return make(pp, microbatches)

    return make_with_one_chunk


# The keys are the values of parallel.schedule.
SCHEDULES: dict[str, Maker] = {
    "gpipe": _with_one_chunk("gpipe", gpipe),
    "1f1b": _with_one_chunk("1f1b", one_f_one_b),
    "interleaved": interleaved,
    "zb-h1": _with_one_chunk("zb-h1", zero_bubble_h1),
}


@cache
def build_schedule(name: str, pp: int, microbatches: int, chunks: int) -> Schedule:
    """The checked schedule `name` of `SCHEDULES`, or "forward-only". Callers share it and must not change it."""
    makers = SCHEDULES | {"forward-only": forward_only}
    if name not in makers:
        raise ConfigError(f"there is no schedule {name!r}; use one of {', '.join(makers)}")
    for what, count in (("pipeline ranks", pp), ("micro-batches", microbatches), ("model chunks", chunks)):
        if count < 1:
            raise ConfigError(f"schedule {name} needs 1 or more {what}, got {count}")
    schedule = makers[name](pp, microbatches, chunks)
    check(schedule, microbatches, chunks)
    return schedule
