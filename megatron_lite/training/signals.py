"""Requests to stop: all ranks decide together, at the end of an iteration, after a signal to any rank or a deadline.

Counts of requests are summed with the loss of an iteration, so they cost no collective. A request that comes later in
that iteration is decided with the loss of the next one. Sums are equal on every rank, so all ranks save together.

Launchers and schedulers often deliver a signal twice, so a second one changes nothing. The exception is a second signal
during a long save, which ends the process at once. A thread watches for it, because Python's signal handlers wait for
the main thread, which may hang in a write.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from types import FrameType

import torch
from torch import Tensor

from megatron_lite.errors import STOP_SIGNALS
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.waiting import read

TIME_IS_UP = 1000  # above every signal's number
REQUESTS = (*sorted(STOP_SIGNALS), TIME_IS_UP)  # of several requests the last is the reason
PATIENCE_SECONDS = 30.0
STDERR = 2  # in a notebook, sys.stderr has no number


class StopRequest:
    """A context that records the first stop signal. `deadline` is a time of the monotonic clock."""

    def __init__(self, deadline: float = math.inf) -> None:
        self.reason = ""  # on which the ranks have agreed, equal on all of them; empty without one
        self._deadline = deadline
        self._received = 0
        self._saves_since = math.inf
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread handles signals
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        self._wakes, woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(woken,), name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._previous:
            return
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            # After a stop, another signal would replace the exit code of this rank.
            has_stopped = self._received and "RANK" in os.environ
            signal.signal(number, signal.SIG_IGN if has_stopped else handler)  # type: ignore[arg-type]
        self._wakes.close()
        self._thread.join()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def _watch(self, woken: socket.socket) -> None:
        """Read the number of each signal, also while the main thread is blocked."""
        is_first = True
        with woken:
            while numbers := woken.recv(64):
                for number in filter(STOP_SIGNALS.__contains__, numbers):
                    name, taken = signal.Signals(number).name, time.monotonic() - self._saves_since
                    if is_first and os.environ.get("RANK", "0") == "0":
                        _print_now(
                            f"{datetime.now():[%Y-%m-%d %H:%M:%S]} {name}: the run will save a checkpoint and stop"
                        )
                    elif not is_first and taken > PATIENCE_SECONDS:
                        _print_now(
                            f"{name} again after {taken:.0f} s of saving: the run stops without this checkpoint; run "
                            "the same command again to continue from the one before"
                        )
                        os._exit(1)
                    is_first = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context for each save."""
        self._saves_since = time.monotonic()
        yield
        self._saves_since = math.inf

    def requests(self, device: torch.device) -> Tensor:
        """[len(REQUESTS)] in fp64, 1 for the request that this rank has. `decide` needs the sums over the world."""
        own = self._received or (TIME_IS_UP if time.monotonic() > self._deadline else 0)
        counts = torch.zeros(len(REQUESTS), dtype=torch.float64, device=device)
        if own:  # a copy from the host would wait for a GPU
            counts[REQUESTS.index(own)].fill_(1.0)
        return counts

    def decide(self, counts: Sequence[float]) -> None:
        """Set the reason to stop from the number of ranks that have each request."""
        present = [number for number, count in zip(REQUESTS, counts, strict=True) if count]
        if present and present[-1] == TIME_IS_UP:
            self.reason = "because train.exit_duration has passed"
        elif present:
            self.reason = f"after receiving {signal.Signals(present[-1]).name}"

    def agreed(self, ctx: ParallelContext) -> str:
        """The reason to stop, decided now. Communicates: the counts of requests over the world."""
        device = ctx.device if ctx.world.size > 1 else torch.device("cpu")
        self.decide(read(all_reduce(self.requests(device), ctx.world), "requests to stop", ctx.world))
        return self.reason


def _print_now(text: str) -> None:
    """Write to the error stream from a thread, without the lock that the main thread may hold."""
    with suppress(OSError):  # without a terminal
        os.write(STDERR, f"{text}\n".encode())
