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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from megatron_lite.parallel import waiting
from megatron_lite.parallel.context import Group
from megatron_lite.text import named_ranks

LONGEST_PAUSE = 1.0  # seconds between two looks
SLOWEST_HEARTBEAT = 5.0  # seconds


class Limits:
    """Seconds that other ranks may be silent, and that work may make no progress (0: no limit)."""

    def __init__(self, silence: float = 600.0, hang: float = 300.0) -> None:
        self.silence, self.hang = silence, hang

    @property
    def period(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.silence / 4, SLOWEST_HEARTBEAT)


limits = Limits()
# By group the numbers of its exchanges, which all its ranks make in one order, and the keys that this rank has set.
_exchanges: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[count, list[str]]]] = WeakKeyDictionary()


class Exchange:
    """One exchange of messages between the ranks of a group; `what` names it in messages about lost ranks."""

    def __init__(self, group: Group, what: str) -> None:
        assert dist.group.WORLD is not None
        # A background thread makes its exchanges at other times, so they have a separate order.
        place = f"{group.name} {group.ranks[0]} {group.size}{'' if waiting.trains_here() else ' background'}"
        of_world = _exchanges.setdefault(dist.group.WORLD, defaultdict(lambda: (count(), [])))
        numbers, self._keys = of_world[place]
        self._group, self._what, self._number = group, what, next(numbers)
        self._keys += [f"{self._number} {key}" for key in ("arrived", "problems", "heartbeats") if group.is_first]
        self._store: Any = PrefixStore(place, _get_default_store())

    def leave(self, message: bytes, *, is_problem: bool = False) -> None:
        """Store this rank's message for `messages`."""
        with waiting.communicating(self._what, self._group):
            self._set(f"{self._group.rank}", message)
            self._store.add(f"{self._number} problems", int(is_problem))
            if self._store.add(f"{self._number} arrived", 1) == self._group.size:
                self._set("done", b"x" * (self._store.add(f"{self._number} problems", 0) > 0))

    def messages(self) -> list[bytes]:
        """The messages of all ranks, once all have left theirs."""
        self.all_left()
        with waiting.communicating(self._what, self._group):
            return self._store.multi_get([f"{self._number} {rank}" for rank in range(self._group.size)])

    def all_left(self) -> bool:
        """Return once all ranks have left their message: True if one of them is a problem."""
        any_problem = self._awaited(self._missing) != b""
        with waiting.communicating(self._what, self._group):
            while self._keys and not self._keys[0].startswith(f"{self._number} "):
                self._store.delete_key(self._keys.pop(0))  # all ranks are past that exchange, so none will read it
        return any_problem

    def publish(self, message: bytes) -> None:
        """Store the message that `published` returns on the other ranks."""
        with waiting.communicating(self._what, self._group):
            self._set("done", message)

    def published(self) -> bytes:
        """The message that the group's first rank publishes, once it has."""
        return self._awaited(lambda: [0])

    def _set(self, key: str, message: bytes) -> None:
        self._keys.append(f"{self._number} {key}")
        self._store.set(f"{self._number} {key}", message)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._group.size) if not self._store.check([f"{self._number} {rank}"])]

    def _awaited(self, missing: Callable[[], Sequence[int]]) -> bytes:
        """The value of the key "done"; `missing` returns the indices of the ranks that must still act."""
        key, beats, pause = f"{self._number} done", 0, 1e-4
        heard = looked = time.monotonic()
        with waiting.communicating(self._what, self._group):
            while not self._store.check([key]):
                time.sleep(pause)
                pause = min(1.1 * pause, LONGEST_PAUSE, limits.period)
                if (now := time.monotonic()) - looked < limits.period:
                    continue
                looked, before, beats = now, beats, self._store.add(f"{self._number} heartbeats", 0)
                if beats != before:
                    heard = now
                    waiting.note_progress()
                elif now - heard > limits.silence:
                    lost = named_ranks([self._group.ranks[rank] for rank in missing()])
                    raise waiting.LostRanks(
                        f"rank {self._group.ranks[self._group.rank]} got no answer in "
                        f"{waiting.describe(self._what, self._group)}: {lost} sent no heartbeat for {now - heard:.1f} "
                        f"s. {waiting.LOOK_THERE}"
                    )
            return self._store.get(key)

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context of work in this thread, for which other ranks may wait, with a heartbeat from another thread."""
        ended = threading.Event()
        arguments = (ended, threading.get_ident(), waiting.trains_here())
        thread = threading.Thread(target=self._beat, args=arguments, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _beat(self, ended: threading.Event, worker: int, trains: bool) -> None:
        waiting.ignore_this_thread()
        store, done, since = None, work_done(worker), time.monotonic()
        while not ended.wait(limits.period):
            now = time.monotonic()
            if work_done(worker) != done:
                since = now
                waiting.note_progress(of_training=trains)
                done = work_done(worker)  # with this note, which is not progress of the work
            if not limits.hang or now - since < limits.hang:
                store = store or self._store.clone()  # the worker may wait in the other connection
                store.add(f"{self._number} heartbeats", 1)


def work_done(thread: int) -> tuple[int, int]:
    """The count of progress, and hundredths of a second of processor time of a thread where the system has them."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return waiting.current_wait()[1], int(100 * time.clock_gettime(clock(thread))) if clock else 0
