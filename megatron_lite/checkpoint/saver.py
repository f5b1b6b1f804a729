"""Saves in the background: a thread of every rank copies the tensors into host memory and writes the copy.

The next forward and backward run while it copies, because they change no saved tensor; the optimizer's step waits (as
in CheckFreq, https://www.usenix.org/conference/fast21/presentation/mohan). The threads communicate over the store, in
the same steps as `store.save`. The memory of the copies is kept for the next save: allocating it takes longer
than copying.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.contents import Contents, rng_of_host
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.agreement import gather_objects, on_all
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.waiting import ignore_this_thread, read

Say = Callable[[str], None]


class PinnedMemory:
    """Host memory for copies from a GPU. torch rounds each pinned tensor up to a power of two bytes, up to twice its
    size; here tensors share blocks of such a size."""

    BLOCK, ALIGNMENT = 2**28, 64  # bytes

    def __init__(self, allocate: Callable[[int], Tensor] | None = None):
        self._allocate = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: torch.Size, *, dtype: torch.dtype) -> Tensor:
        """An empty tensor; one that is larger than half a block has its own memory."""
        size = shape.numel() * dtype.itemsize
        if size > self.BLOCK // 2:
            return self._allocate(size).view(dtype).view(shape)
        if size > len(self._rest):
            self._rest = self._allocate(self.BLOCK)
        taken, self._rest = self._rest[:size], self._rest[-(-size // self.ALIGNMENT) * self.ALIGNMENT :]
        return taken.view(dtype).view(shape)


class Saver:
    """The saves of a run, one after another. All methods and the constructor are collective over the world."""

    def __init__(self, ctx: ParallelContext, *, in_background: bool):
        self._ctx = ctx
        self._in_background = in_background
        self._in_flight: Future[tuple[float, float]] | None = None
        self._label = ""  # of the save in flight
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._waited_seconds = 0.0  # by training, for the save in flight
        self._connections = 0
        self._stream: torch.cuda.Stream | None = None
        if in_background:
            self._connect()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=ignore_this_thread)
            self._copies: dict[tuple[str, str], Tensor] = {}
            self._pinned = PinnedMemory()

    def _connect(self) -> None:
        self._connections += 1
        world = replace(self._ctx.world, name=f"saves {self._connections}")  # exchanges have an order in each name
        self._background = replace(self._ctx, world=world)
        self._failed = False

    def save(
        self,
        root: Path,
        iteration: int,
        say: Say,
        *,
        must_be_done: bool,
        copy_at_once: bool,
        contents: Contents,
        **rest: Any,
    ) -> None:
        """`store.save`, in the background where that is configured and the save need not be done at return.

        No saved tensor may change before `wait_for_copy`; with `copy_at_once` it may change at return. After a failure
        in the background the next save is waited for: training stops if that one fails too.
        """
        self.wait(say)
        contents = replace(contents, rng=rng_of_host(contents.rng, self._ctx))
        world, own = self._ctx.world, float(self._in_background and self._failed)
        last = torch.tensor([own], device=self._ctx.device)
        failed = self._in_background and any(read(all_reduce(last, world, "max"), "all_reduce", world))
        started = time.perf_counter()
        self._label = f"checkpoint from iteration {iteration} to {root}"
        if must_be_done or failed or not self._in_background:
            store.save(root, iteration, ctx=self._ctx, contents=contents, **rest)
            if failed:
                self._connect()  # the ranks may have left the order of exchanges at different places
            self._report_success(say, time.perf_counter() - started)
            return
        original: Contents | None = contents.saved_by(self._ctx)
        before, is_copied = _versions(original), threading.Event()
        ready = torch.cuda.Event() if self._ctx.device.type == "cuda" else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(self._ctx.device))  # after all work that has been launched
        self._waited_seconds = 0.0

        def copy() -> Contents:
            nonlocal original
            assert original is not None
            try:
                copies = self._copied(original, ready)
                _check_unchanged(original, before)
                return copies
            finally:
                original = None  # tensors that exist for this save alone are freed here
                is_copied.set()

        def write() -> tuple[float, float]:
            copies = on_all(copy, self._background.world)
            store.save(root, iteration, ctx=self._background, contents=copies, **rest)
            waited = gather_objects(self._waited_seconds, self._background.world)  # the first rank prints it
            return time.perf_counter() - started, max(waited, default=0.0)

        self._in_flight = self._thread.submit(write)
        self._is_copied = is_copied
        say(f"copying and writing the {self._label} while training continues")
        if copy_at_once:
            is_copied.wait()
        self._waited_seconds = time.perf_counter() - started

    @property
    def is_copying(self) -> bool:
        """True while the tensors of a save in flight may not change."""
        return not self._is_copied.is_set()

    def wait_for_copy(self) -> None:
        """Return when the tensors of a save in flight may change. The optimizer's step calls this first."""
        started = time.perf_counter()
        self._is_copied.wait()
        self._waited_seconds += time.perf_counter() - started

    def report(self, say: Say) -> None:
        """Print the result of a save in the background once it is done."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait(say)

    def wait(self, say: Say) -> None:
        """Wait for the save in flight, and print its result."""
        if self._in_flight is None:
            return
        future, self._in_flight = self._in_flight, None
        started = time.perf_counter()
        try:
            seconds, waited = future.result()
            waited += time.perf_counter() - started
            self._report_success(say, seconds, f", of which training waited {waited:.2f} s")
        except Exception as error:  # of any kind: training itself can continue
            self._failed = True
            say(f"FAILED to save {self._label}: {error}. Training continues, and stops if the next save fails too")

    def close(self, say: Say) -> None:
        """Wait for the save in flight, and stop the thread."""
        self.wait(say)
        if self._in_background:
            self._thread.shutdown()
            self._copies.clear()
            self._pinned = PinnedMemory()

    def _report_success(self, say: Say, seconds: float, more: str = "") -> None:
        say(f"saved {self._label} ({seconds:.1f} s{more})")

    def _copied(self, contents: Contents, ready: torch.cuda.Event | None) -> Contents:
        """Copies in host memory of the values at the event `ready`; a GPU computes meanwhile."""
        if ready is None:
            return contents.map(self._copy_of)
        # One stream for all saves: torch has a pool of 32 and also gives them to others.
        self._stream = self._stream or torch.cuda.Stream(self._ctx.device)
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            copies = contents.map(self._copy_of)
        self._stream.synchronize()
        return copies

    def _copy_of(self, name: str, kind: str, shard: LocalShard) -> LocalShard:
        values, on_gpu = shard.values.detach(), shard.values.is_cuda
        copy = self._copies.get((name, kind))
        if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
            empty = self._pinned.take if on_gpu else torch.empty
            copy = self._copies[name, kind] = empty(values.shape, dtype=values.dtype)
        copy.copy_(values, non_blocking=on_gpu)
        return replace(shard, values=copy)


def _versions(contents: Contents) -> dict[tuple[str, str], int]:
    """The number of in-place changes of each tensor."""
    kinds_of = contents.by_kind().items()
    return {(name, kind): shard.values._version for name, kinds in kinds_of for kind, shard in kinds.items()}


def _check_unchanged(contents: Contents, before: dict[tuple[str, str], int]) -> None:
    for (name, kind), version in _versions(contents).items():
        if version != before[name, kind]:
            raise CheckpointError(
                f"{kind} of {name} changed while it was copied; for a model that changes parameters in forward, set "
                "checkpoint.async_save: false"
            )
