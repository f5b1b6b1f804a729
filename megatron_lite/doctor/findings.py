"""The findings of `doctor`: a line for each check, from the answers of all ranks.

A check that may fail on one rank is a question to all of them, and an error is an answer, so all ranks continue with
the next check. Conclusions from the answers are equal on every rank.
"""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from megatron_lite.errors import MegatronLiteError
from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.parallel.context import Group
from megatron_lite.text import listed, named_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "warn", "FAIL", "skip"]  # FAIL: training would fail
    what: str
    text: str

    def __str__(self) -> str:
        return f" {self.level:<5} {self.what}: {self.text}"


@dataclass(frozen=True)
class Answer(Generic[T]):
    """The value that a rank has found, or the reason why it found none."""

    rank: int
    host: str
    value: T | None
    problem: str  # empty without one


def ask(question: Callable[[], T], world: Group) -> "list[Answer[T]]":
    """Every rank's answer in rank order, on every rank; an error on one rank is its answer.

    Communicates: one all-gather of a small object.
    """
    value, problem = None, ""
    try:
        value = question()
    except Exception as error:
        problem = described(error)
    answers = all_gather_objects((socket.gethostname(), value, problem), world)
    return [Answer(rank, *answer) for rank, answer in enumerate(answers)]


def described(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, MegatronLiteError) and text else f"{type(error).__name__}: {text}"


def problems(what: str, answers: Iterable[Answer], advice: str = "") -> list[Finding]:
    """A finding for each different problem, with the ranks that have it."""
    whose: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.problem:
            whose.setdefault(answer.problem, []).append(answer)
    after = f"; {advice}" if advice else ""
    return [Finding("FAIL", what, f"{where(those)}: {problem}{after}") for problem, those in whose.items()]


def where(answers: Sequence[Answer]) -> str:
    """`ranks 0 to 3 on host-a and rank 5 on host-b`."""
    of_host: dict[str, list[int]] = {}
    for answer in answers:
        of_host.setdefault(answer.host, []).append(answer.rank)
    return listed([f"{named_ranks(ranks)} on {host}" for host, ranks in of_host.items()])


def readable(size: float) -> str:
    """A size such as `0.5 MiB` or `47.3 GiB`."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"


def hosts_of(answers: Iterable[Answer]) -> list[str]:
    """Every host once, in the order of ranks."""
    return list(dict.fromkeys(answer.host for answer in answers))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
