"""All ranks continue, or all raise the same error: no rank waits in a collective for one that failed."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_lite.errors import CheckpointError, DamagedCheckpoint, MegatronLiteError
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import communicating

T = TypeVar("T")


def on_first(work: Callable[[], T], group: Group) -> T:
    """The result of `work`, done by the group's first rank alone, on every rank; its error too.

    Communicates: one broadcast of a small object.
    """
    if group.size == 1:
        return work()
    result, problem, cause = _attempt(work, group) if group.is_first else (None, None, None)
    answer: list[Any] = [(result, problem)]
    with communicating("broadcast", group):
        dist.broadcast_object_list(answer, src=group.ranks[0], group=group.pg)
    result, problem = answer[0]
    if problem is not None:
        kind, text = problem
        raise kind(text) from cause
    return result


def on_all(work: Callable[[], T], group: Group) -> T:
    """This rank's result of `work`, which all ranks do at the same time; returns when all are done.

    When it fails anywhere, every rank raises the error of the lowest rank where it did; damage comes last.
    Communicates: one all-gather of a small object.
    """
    if group.size == 1:
        return work()
    result, problem, cause = _attempt(work, group)
    gathered: list[Any] = [None] * group.size
    with communicating("all_gather", group):
        dist.all_gather_object(gathered, problem, group=group.pg)
    # What is no damage comes first: no other checkpoint would help.
    problems = sorted(filter(None, gathered), key=lambda problem: problem[0] is DamagedCheckpoint)
    if problems:
        kind, text = problems[0]
        others = len(problems) - 1
        more = f" ({others} more rank{'s' * (others > 1)} failed)" if others else ""
        raise kind(text + more) from cause
    return result  # type: ignore[return-value]


def all_gathered(value: T, group: Group) -> list[T]:
    """Every rank's value in rank order, on every rank."""
    if group.size == 1 or group.pg is None:
        return [value]
    gathered: list[Any] = [None] * group.size
    with communicating("all_gather", group):
        dist.all_gather_object(gathered, value, group=group.pg)
    return gathered


def gather_to_first(value: T, group: Group) -> list[T]:
    """Every rank's value in rank order on the group's first rank, an empty list on the others."""
    if group.size == 1:
        return [value]
    gathered: list[Any] | None = [None] * group.size if group.is_first else None
    with communicating("gather", group):
        dist.gather_object(value, gathered, dst=group.ranks[0], group=group.pg)
    return gathered or []


def _attempt(work: Callable[[], T], group: Group) -> tuple[T | None, tuple[type, str] | None, Exception | None]:
    """Result, kind and text of the error, and the error. A MegatronLiteError keeps its kind; any other becomes a
    CheckpointError, because one that escaped here would leave the other ranks waiting."""
    rank = group.ranks[group.rank]
    try:
        return work(), None, None
    except MegatronLiteError as error:
        return None, (type(error), f"rank {rank}: {error}"), error
    except Exception as error:
        return None, (CheckpointError, f"rank {rank}: {type(error).__name__}: {error}"), error
