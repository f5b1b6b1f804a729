"""Saving while training goes on: what is saved is copied into host memory, and the copy is written.

A thread of every rank does both. While it copies, the next forward and backward run, which are to change nothing that
is saved; the optimizer's step waits (as in CheckFreq, https://www.usenix.org/conference/fast21/presentation/mohan).
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
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.agreement import all_gather_objects, on_all
from megatron_lite.parallel.context import ParallelContext, duplicate_group
from megatron_lite.parallel.waiting import ignore_this_thread

Say = Callable[[str], None]


class Saver:
    """Saves checkpoints of a run, one after another. Collective over the world, as is making one."""

    def __init__(self, ctx: ParallelContext, *, in_background: bool, timeout_seconds: float):
        self._ctx = ctx
        self._in_background = in_background
        self._under_way: Future[tuple[float, float]] | None = None
        self._doing = ""
        self._failed = False
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._waited = 0.0
        self._timeout_seconds = timeout_seconds
        self._stream: torch.cuda.Stream | None = None
        if in_background:
            self._connect()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=ignore_this_thread)
            self._copies: dict[tuple[str, str], Tensor] = {}

    def _connect(self) -> None:
        self._background = replace(
            self._ctx, world=duplicate_group(self._ctx.world, self._timeout_seconds, backend="gloo")
        )
        self._failed = False

    def save(
        self,
        root: Path,
        iteration: int,
        say: Say,
        *,
        must_be_done: bool,
        copy_at_once: bool,
        weights: Mapping[str, LocalShard],
        optimizer_state: Mapping[str, Mapping[str, LocalShard]],
        **rest: Any,
    ) -> None:
        """As `store.save`; in the background if that was asked for and the result need not be there at return. Then
        nothing of what is saved may change before `wait_for_copy`; with `copy_at_once`, it may at return.

        After a save in the background has failed, the next one is waited for: training ends if that fails too.
        """
        self.wait(say)
        failed = self._in_background and any(all_gather_objects(self._failed, self._ctx.world))
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
        before, ready, is_copied = _versions(mine), self._now(), threading.Event()
        self._waited = 0.0

        def copy() -> dict[str, dict[str, LocalShard]]:
            nonlocal mine
            try:
                copies = self._copied(mine, ready)
                _check_unchanged(before, _versions(mine))
                return copies
            finally:
                mine = {}  # some of it may have been made for this save: its memory is free from here on
                is_copied.set()

        def write() -> tuple[float, float]:
            copies = on_all(copy, self._background.world)
            store.save(root, iteration, ctx=self._background, weights={}, optimizer_state=copies, **rest)
            return time.perf_counter() - started, max(all_gather_objects(self._waited, self._background.world))

        self._under_way = self._thread.submit(write)
        self._is_copied = is_copied
        say("  it is copied and written while training goes on")
        if copy_at_once:
            is_copied.wait()
        self._waited = time.perf_counter() - started

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
            seconds, waited = future.result()
            waited += time.perf_counter() - began
            self._say_saved(say, seconds, f", of which training waited {waited:.2f} s")
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
        self, mine: Mapping[str, Mapping[str, LocalShard]], ready: "torch.cuda.Event | None"
    ) -> dict[str, dict[str, LocalShard]]:
        """Copies in host memory of what there was when `ready` came; a GPU works on meanwhile."""
        if ready is None:
            return self._copies_of(mine)
        # One for all saves: torch has 32, and hands them out to others again and again.
        self._stream = self._stream or torch.cuda.Stream(self._ctx.device)
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            copies = self._copies_of(mine)
        self._stream.synchronize()
        return copies

    def _copies_of(self, mine: Mapping[str, Mapping[str, LocalShard]]) -> dict[str, dict[str, LocalShard]]:
        return {
            name: {kind: self._copy_of(name, kind, held) for kind, held in kinds.items()}
            for name, kinds in mine.items()
        }

    def _copy_of(self, name: str, kind: str, held: LocalShard) -> LocalShard:
        values, on_gpu = held.values.detach(), held.values.is_cuda
        copy = self._copies.get((name, kind))
        if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
            copy = self._copies[name, kind] = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
        copy.copy_(values, non_blocking=on_gpu)
        return replace(held, values=copy)


def _versions(mine: Mapping[str, Mapping[str, LocalShard]]) -> dict[tuple[str, str], int]:
    """How often each tensor has been changed in place."""
    return {(name, kind): held.values._version for name, kinds in mine.items() for kind, held in kinds.items()}


def _check_unchanged(before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]) -> None:
    if changed := [f"{kind} of {name}" for name, kind in before if before[name, kind] != after[name, kind]]:
        raise CheckpointError(
            f"{changed[0]} was changed while it was copied, before Saver.wait_for_copy, which train_step calls for the "
            "optimizer; if the model changes parameters of its own in forward, set checkpoint.async_save: false"
        )
