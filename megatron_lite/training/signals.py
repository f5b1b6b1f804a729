"""Stopping on request: a signal to any rank, or time that is up, becomes one decision of all ranks at the end of an
iteration.

The same signal often comes twice, because launchers and schedulers both deliver it, and the second one changes nothing.
Only one that comes again when a save already takes long ends the process at once. A thread sees to that: Python's own
handlers wait until the main thread returns from a write that may hang.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from types import FrameType

import torch

from megatron_lite.errors import STOP_SIGNALS
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext

TIME_IS_UP = 1000  # above every signal's number
PATIENCE_SECONDS = 30.0
STDERR = 2  # in a notebook, sys.stderr has no number


class StopRequest:
    """While in force, remembers the first stop signal, and the end of the time that the run has (`deadline`, on the
    monotonic clock)."""

    def __init__(self, deadline: float = math.inf) -> None:
        self._deadline = deadline
        self._received = 0
        self._saves_since = math.inf
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main one handle signals
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
            # A rank that was told to stop has saved, and only its exit code left to give: told again, it would lose it.
            is_over = self._received and "RANK" in os.environ
            signal.signal(number, signal.SIG_IGN if is_over else handler)  # type: ignore[arg-type]
        self._wakes.close()
        self._thread.join()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def _watch(self, woken: socket.socket) -> None:
        """Reads the number of every signal as it comes, whatever the main thread does."""
        is_first = True
        with woken:
            while numbers := woken.recv(64):
                for number in filter(STOP_SIGNALS.__contains__, numbers):
                    name, taken = signal.Signals(number).name, time.monotonic() - self._saves_since
                    if is_first and os.environ.get("RANK", "0") == "0":
                        _say_now(
                            f"{datetime.now():[%Y-%m-%d %H:%M:%S]} {name}: the run will save a checkpoint and stop"
                        )
                    elif not is_first and taken > PATIENCE_SECONDS:
                        _say_now(
                            f"{name} came again after {taken:.0f} s of saving: the run stops without this checkpoint. "
                            "Run the same command again to continue from the one before"
                        )
                        os._exit(1)
                    is_first = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around each save."""
        self._saves_since = time.monotonic()
        yield
        self._saves_since = math.inf

    def agreed(self, ctx: ParallelContext) -> str:
        """Why some rank has to stop, the same on every rank; empty when none has.

        Communicates: one all-reduce of a number over the world.
        """
        own = self._received or (TIME_IS_UP if time.monotonic() > self._deadline else 0)
        number = int(all_reduce(torch.tensor([own], device=ctx.device), ctx.world, op="max").item())
        if number == TIME_IS_UP:
            return "because train.exit_duration has passed"
        return f"after receiving {signal.Signals(number).name}" if number else ""


def _say_now(text: str) -> None:
    """To the error stream from a thread, past what the main one may hold."""
    with suppress(OSError):  # the terminal is gone
        os.write(STDERR, f"{text}\n".encode())
