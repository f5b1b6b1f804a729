"""What this rank is waiting for: said when it waits in vain, and told from work when ranks are compared.

One wait at a time, that of training; a thread that works beside it calls `ignore_this_thread`.
"""

import threading
from types import TracebackType
from typing import Any, Protocol

import torch

from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import Group


class LostRanks(TrainingError):
    """A collective has failed: ranks are gone, or time was up."""


class Recorder(Protocol):
    """Takes the time of waits, which are not nested."""

    def begin(self, what: str) -> None: ...

    def end(self, what: str) -> None: ...


class _Training:
    op: str = ""  # empty while nobody is waited for
    group: Group | None = None
    count: int = 0  # of waits that have begun: as long as it grows, there is progress
    recorder: Recorder | None = None


class _ThisThread(threading.local):
    is_training = True


_training, _this_thread = _Training(), _ThisThread()


class waiting:
    """Inside, this rank waits in `op` for the group's other ranks, as the watchdog would say it."""

    def __init__(self, op: str, group: Group):
        self.op, self.group = op, group

    def __enter__(self) -> None:
        if _this_thread.is_training:
            _training.op, _training.group = self.op, self.group
            _training.count += 1
            if _training.recorder is not None:
                _training.recorder.begin(self.op)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _this_thread.is_training:
            if _training.recorder is not None:
                _training.recorder.end(self.op)
            _training.op = ""


class communicating(waiting):
    """The same, where torch's error, which names neither the group nor its ranks, becomes one that does: LostRanks."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            rank = self.group.ranks[self.group.rank]
            raise LostRanks(
                f"rank {rank} got no answer in {named(self.op, self.group)}: {str(error).splitlines()[0]}. Look at the "
                "output of those ranks first; if one of them really computes for so long, raise train.comm_timeout"
            ) from error


def named(op: str, group: Group) -> str:
    """`all_reduce over dp (ranks 0 and 2)`; of many ranks, only the first and the last."""
    ranks = list(map(str, group.ranks))
    listed = f"{', '.join(ranks[:-1])} and {ranks[-1]}" if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
    return f"{op} over {group.name} (ranks {listed})"


def current_wait() -> tuple[str, int]:
    """What training waits for, empty for nothing, and a number that grows with progress; for any thread."""
    op, group = _training.op, _training.group
    return named(op, group) if op and group is not None else "", _training.count


def note_progress() -> None:
    """Told by long work without collectives: there is progress."""
    if _this_thread.is_training:
        _training.count += 1


def record_waits(recorder: Recorder | None) -> None:
    """From now on this takes their time; None: nobody does."""
    _training.recorder = recorder


def ignore_this_thread() -> None:
    """What this thread waits for is no wait of training."""
    _this_thread.is_training = False


def finished(work: Any, op: str, group: Group) -> None:
    """Waits for a collective that was started."""
    with communicating(op, group):
        work.wait()
