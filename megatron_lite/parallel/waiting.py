"""The collective in which this rank waits: for the message when it fails, for the watchdog and for timing.

There is one wait at a time, that of training. A background thread calls `ignore_this_thread`.
"""

import threading
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import Group
from megatron_lite.text import named_ranks

What = TypeVar("What", contravariant=True)


LOOK_THERE = (
    "Look at the output of those ranks first; if one of them really computes for so long, raise train.comm_timeout"
)


class LostRanks(TrainingError):
    """A collective failed: a rank is gone, or the timeout passed."""


class Recorder(Protocol[What]):
    """Takes the times of waits or actions, which are not nested."""

    def begin(self, what: What, /) -> None: ...

    def end(self, what: What, /) -> None: ...


class _Training:
    wait: "waiting | None" = None
    count: int = 0  # waits so far, and other progress
    recorder: Recorder[str] | None = None


class _ThisThread(threading.local):
    is_training = True


_training, _this_thread = _Training(), _ThisThread()


class waiting:
    """Inside, this rank waits in `op` for the other ranks of the group."""

    def __init__(self, op: str, group: Group):
        self.op, self.group = op, group

    def __enter__(self) -> None:
        if _this_thread.is_training:
            _training.wait = self
            _training.count += 1
            if _training.recorder is not None:
                _training.recorder.begin(self.op)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if _this_thread.is_training:
            if _training.recorder is not None:
                _training.recorder.end(self.op)
            _training.wait = None


class communicating(waiting):
    """`waiting`, and an error of torch, which names neither group nor ranks, becomes LostRanks, which does."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            rank, reason = self.group.ranks[self.group.rank], str(error).splitlines()[0]
            raise LostRanks(
                f"rank {rank} got no answer in {describe(self.op, self.group)}: {reason}. {LOOK_THERE}"
            ) from error


def describe(op: str, group: Group) -> str:
    """`all_reduce over dp (ranks 0 and 2)`."""
    return f"{op} over {group.name} ({named_ranks(group.ranks)})"


def current_wait() -> tuple[str, int]:
    """The wait of training, empty for none, and a count that grows with progress; callable from any thread."""
    wait = _training.wait
    return describe(wait.op, wait.group) if wait else "", _training.count


def note_progress(*, of_training: bool = False) -> None:
    """Count progress, in long work without collectives; `of_training`: also where another thread reports it."""
    if of_training or _this_thread.is_training:
        _training.count += 1


def trains_here() -> bool:
    """Whether this thread trains: False after `ignore_this_thread`."""
    return _this_thread.is_training


def record_waits(recorder: Recorder[str] | None) -> None:
    """Report later waits to `recorder`; None stops that."""
    _training.recorder = recorder


def ignore_this_thread() -> None:
    """Leave out the waits of this thread, which does not train."""
    _this_thread.is_training = False


def read(x: Tensor, what: str, group: Group) -> list[Any]:
    """The values of a small tensor. On a GPU the host waits here for all work before it, and for its collectives."""
    with waiting(what, group):
        return x.tolist()


def finished(work: Any, op: str, group: Group) -> None:
    """Wait for a collective in flight."""
    with communicating(op, group):
        work.wait()
