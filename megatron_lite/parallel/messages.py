"""Small messages between ranks through the store of the process group, for work of unequal length.

A collective has a deadline, because a missing rank must not stop the others forever. The work of one rank, such as a
conversion, may take longer. So the others look for its result in the store without a deadline, while the heartbeat of
the working rank comes. A thread of that rank sends it. It ends with the process, and where the work makes no progress
for `train.hang_timeout`: neither the count of progress nor the processor time of its thread grows.

In each exchange a rank makes a constant number of requests, and some while it waits.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import (
    LOOK_THERE,
    LostRanks,
    communicating,
    current_wait,
    describe,
    ignore_this_thread,
    note_progress,
    trains_here,
)
from megatron_lite.text import named_ranks

LONGEST_PAUSE = 1.0  # seconds between two looks
SLOWEST_HEARTBEAT = 5.0  # seconds


@dataclass
class Limits:
    """Seconds that other ranks may be silent, and that work may make no progress (0: no limit)."""

    silence: float = 600.0
    hang: float = 300.0

    @property
    def period(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.silence / 4, SLOWEST_HEARTBEAT)


limits = Limits()


@dataclass
class _Exchanges:
    """The exchanges of this rank in one group; all its ranks make them in one order."""

    count: int = 0
    keys: list[str] = field(default_factory=list)  # of this rank, which no rank has been known to have read


_exchanges: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Exchanges]] = WeakKeyDictionary()


class Exchange:
    """One exchange of messages between the ranks of a group; `what` names it in messages about lost ranks."""

    def __init__(self, group: Group, what: str) -> None:
        world = dist.group.WORLD
        assert world is not None
        # A background thread makes its exchanges at other times, so they have a separate order.
        place = f"{group.name} {group.ranks[0]} {group.size}{'' if trains_here() else ' background'}"
        self._group, self._what = group, what
        self._state = _exchanges.setdefault(world, defaultdict(_Exchanges))[place]
        self._state.count += 1
        self._number = self._state.count
        self._store: Store = PrefixStore(place, _get_default_store())
        if group.is_first:
            self._state.keys += [f"{self._number} {key}" for key in ("arrived", "problems", "heartbeats")]

    def leave(self, message: bytes, *, is_problem: bool = False) -> None:
        """Store this rank's message for `messages`."""
        with communicating(self._what, self._group):
            self._set(f"{self._group.rank}", message)
            if is_problem:
                self._store.add(f"{self._number} problems", 1)
            if self._store.add(f"{self._number} arrived", 1) == self._group.size:
                self._set("done", b"x" * (self._store.add(f"{self._number} problems", 0) > 0))

    def messages(self) -> list[bytes]:
        """The messages of all ranks, once all have left theirs."""
        self.all_left()
        with communicating(self._what, self._group):
            return self._store.multi_get([f"{self._number} {rank}" for rank in range(self._group.size)])

    def all_left(self) -> bool:
        """Return once all ranks have left their message: True if one of them is a problem."""
        any_problem = self._awaited(self._missing) != b""
        # All ranks have come from the exchanges before this one, so no rank will read their keys.
        keys, self._state.keys = self._state.keys, []
        for key in keys:
            if key.startswith(f"{self._number} "):
                self._state.keys.append(key)
            else:
                self._store.delete_key(key)
        return any_problem

    def publish(self, message: bytes) -> None:
        """Store the message that `published` returns on the other ranks."""
        with communicating(self._what, self._group):
            self._set("done", message)

    def published(self) -> bytes:
        """The message that the group's first rank publishes, once it has."""
        return self._awaited(lambda: [0])

    def working(self) -> "_Heartbeat":
        """A context in which this rank works while others may wait for it."""
        return _Heartbeat(self._store, f"{self._number} heartbeats")

    def _set(self, key: str, message: bytes) -> None:
        self._store.set(f"{self._number} {key}", message)  # pyright: ignore[reportArgumentType]
        self._state.keys += [f"{self._number} {key}"]

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._group.size) if not self._store.check([f"{self._number} {rank}"])]

    def _awaited(self, missing: Callable[[], Sequence[int]]) -> bytes:
        """The value of the key "done"; `missing` returns the indices of the ranks that must still act."""
        key, beats, pause = f"{self._number} done", 0, 1e-4
        heard = looked = time.monotonic()
        with communicating(self._what, self._group):
            while not self._store.check([key]):
                time.sleep(pause)
                pause = min(1.1 * pause, LONGEST_PAUSE, limits.period)
                if (now := time.monotonic()) - looked < limits.period:
                    continue
                looked, before, beats = now, beats, self._store.add(f"{self._number} heartbeats", 0)
                if beats != before:
                    heard = now
                    note_progress()
                elif now - heard > limits.silence:
                    lost = [self._group.ranks[rank] for rank in missing()]
                    raise LostRanks(
                        f"rank {self._group.ranks[self._group.rank]} got no answer in "
                        f"{describe(self._what, self._group)}: {named_ranks(lost)} sent no heartbeat for "
                        f"{now - heard:.1f} s. {LOOK_THERE}"
                    )
            return self._store.get(key)


class _Heartbeat:
    """A context of the work of this thread, with a heartbeat from another thread."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._ended = threading.Event()
        self._is_training = trains_here()
        self._worker = threading.get_ident()

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        ignore_this_thread()
        store, done, since = None, self._work_done(), time.monotonic()
        while not self._ended.wait(limits.period):
            now, before, done = time.monotonic(), done, self._work_done()
            if any(new > old for old, new in zip(before, done, strict=True)):
                since = now
                if self._is_training:
                    note_progress(of_training=True)
            if not limits.hang or now - since < limits.hang:
                # The worker may wait in the other connection.
                store = store or self._store.clone()  # pyright: ignore[reportAttributeAccessIssue]
                store.add(self._key, 1)

    def _work_done(self) -> tuple[int, int]:
        """The count of progress, and hundredths of a second of processor time of the worker."""
        if not hasattr(time, "pthread_getcpuclockid"):
            return current_wait()[1], 0
        return current_wait()[1], int(100 * time.clock_gettime(time.pthread_getcpuclockid(self._worker)))
