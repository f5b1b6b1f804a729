"""Saving while training goes on: what is saved is copied into host memory, and the copy is written.

A thread of every rank does both. While it copies, the next forward and backward run, which change nothing that is
saved; only the optimizer's step waits (as in CheckFreq, https://www.usenix.org/conference/fast21/presentation/mohan).
The threads agree over a connection of their own, in the same steps as when training waits: see `store.save`. The memory
of the copy is kept for the next one, because to get it from the system takes longer than the copying.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.agreement import all_gathered, on_all
from megatron_lite.parallel.context import ParallelContext, apart
from megatron_lite.parallel.shard import Held

Say = Callable[[str], None]


class Saver:
    """Saves checkpoints of a run, one after another. Collective over the world, as is making one."""

    def __init__(self, ctx: ParallelContext, *, in_background: bool, timeout_seconds: float):
        self._ctx = ctx
        self._in_background = in_background
        self._under_way: Future[float] | None = None
        self._doing = ""
        self._failed = False
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._waited = 0.0
        self._timeout_seconds = timeout_seconds
        if in_background:
            self._connect()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._copies: dict[tuple[str, str], Tensor] = {}

    def _connect(self) -> None:
        self._background = replace(self._ctx, world=apart(self._ctx.world, self._timeout_seconds, backend="gloo"))
        self._failed = False

    def save(
        self,
        root: Path,
        iteration: int,
        say: Say,
        *,
        must_be_done: bool,
        copy_at_once: bool,
        weights: Mapping[str, Held],
        optimizer_state: Mapping[str, Mapping[str, Held]],
        **rest: Any,
    ) -> None:
        """As `store.save`; in the background if that was asked for and the result need not be there at return. Then
        nothing of what is saved may change before `wait_for_copy`; with `copy_at_once`, it may at return.

        After a save in the background has failed, the next one is waited for: training ends if that fails too.
        """
        self.wait(say)
        failed = self._in_background and any(all_gathered(self._failed, self._ctx.world))
        say(f" saving checkpoint at iteration {iteration:7d} to {root}")
        started = time.perf_counter()
        self._doing = f"checkpoint from iteration {iteration:7d} to {root}"
        if must_be_done or failed or not self._in_background:
            store.save(root, iteration, ctx=self._ctx, weights=weights, optimizer_state=optimizer_state, **rest)
            if failed:
                self._connect()  # after a time-out a connection is of no more use
            self._say_saved(say, time.perf_counter() - started)
            return
        mine = store.written_here(self._ctx, weights, optimizer_state)
        ready = self._now()
        self._is_copied.clear()
        self._waited = 0.0

        def copy() -> dict[str, dict[str, Held]]:
            try:
                return self._copied(mine, ready)
            finally:
                self._is_copied.set()

        def write() -> float:
            began = time.perf_counter()
            copies = on_all(copy, self._background.world)
            store.save(root, iteration, ctx=self._background, weights={}, optimizer_state=copies, **rest)
            return time.perf_counter() - began

        self._under_way = self._thread.submit(write)
        say("  it is copied and written while training goes on")
        if copy_at_once:
            self.wait_for_copy()

    def wait_for_copy(self) -> None:
        """Returns when everything that is being saved may change; before a step of the optimizer."""
        began = time.perf_counter()
        self._is_copied.wait()
        self._waited += time.perf_counter() - began

    def report(self, say: Say) -> None:
        """Tells how the save in the background has ended, once it has."""
        if self._under_way is not None and self._under_way.done():
            self.wait(say)

    def wait(self, say: Say) -> None:
        """Returns when no save is under way, and tells how it has ended."""
        if self._under_way is None:
            return
        future, self._under_way = self._under_way, None
        began = time.perf_counter()
        try:
            seconds = future.result()
            self._waited += time.perf_counter() - began
            self._say_saved(say, seconds, f", of which training waited {self._waited:.2f} s")
        except Exception as error:  # whatever it was, training has what it needs to go on
            self._failed = True
            say(f"  FAILED to save {self._doing}: {error}. Training goes on, and will stop if the next save fails too")

    def close(self, say: Say) -> None:
        """Waits, and ends the thread."""
        self.wait(say)
        if self._in_background:
            self._thread.shutdown()
            self._copies.clear()

    def _say_saved(self, say: Say, seconds: float, more: str = "") -> None:
        say(f"  successfully saved {self._doing} ({seconds:.1f} s{more})")

    def _now(self) -> "torch.cuda.Event | None":
        """On a GPU, the end of all work that was started until now."""
        if self._ctx.device.type != "cuda":
            return None
        now = torch.cuda.Event()
        now.record(torch.cuda.current_stream(self._ctx.device))
        return now

    def _copied(
        self, mine: Mapping[str, Mapping[str, Held]], ready: "torch.cuda.Event | None"
    ) -> dict[str, dict[str, Held]]:
        """Copies in host memory of what there was when `ready` came; a GPU works on meanwhile."""
        if ready is None:
            return self._copies_of(mine)
        stream = torch.cuda.Stream(self._ctx.device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            copies = self._copies_of(mine)
        stream.synchronize()
        return copies

    def _copies_of(self, mine: Mapping[str, Mapping[str, Held]]) -> dict[str, dict[str, Held]]:
        return {
            name: {kind: self._copy_of(name, kind, held) for kind, held in kinds.items()}
            for name, kinds in mine.items()
        }

    def _copy_of(self, name: str, kind: str, held: Held) -> Held:
        values, on_gpu = held.values.detach(), held.values.is_cuda
        copy = self._copies.get((name, kind))
        if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
            copy = self._copies[name, kind] = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
        copy.copy_(values, non_blocking=on_gpu)
        return replace(held, values=copy)
