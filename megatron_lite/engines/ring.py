"""LocalDDP with an all-reduce of our own from sends and receives: `parallel.ddp: ring_all_reduce`, `tree_all_reduce`.

`moves.py` has the messages of both algorithms, and the order of their sums. A sum has defined bits, whatever the
backend and its version do.

A bucket's first message starts when its last gradient has arrived, and its later steps run during backward:
- With Gloo a thread runs the steps: Gloo completes a message only inside `wait`, so without a thread a step would wait
  for the next hook. A thread for each bucket begins when the bucket before it is summed.
- With NCCL the steps of a bucket are queued at once, in a stream of their own. The host waits for none of them.

So the messages between two ranks have one order, that of the buckets, and need no tags. The messages of a step are one
batch: NCCL starts the send and the receive of a rank together, so a ring does not deadlock. The group is a duplicate,
because messages of a thread may not mix with the collectives of training.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.ddp.buffer import Bucket
from megatron_lite.ddp.data_parallel import ToWrap
from megatron_lite.ddp.local import LocalDDP
from megatron_lite.ddp.wrap import bucket_mb
from megatron_lite.engines.moves import ALGORITHMS, Steps, num_chunks
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import Group, duplicate_group
from megatron_lite.parallel.waiting import communicating, finished

MOST_CHILDREN = 2  # messages that a rank adds in one step


def sum_in_steps(x: Tensor, steps: Steps, group: Group) -> list[dist.Work]:
    """Sum x over the group by these messages, in place and in its dtype; return the messages of this rank.

        x    [K]    contiguous, of the same size on all ranks; padded, in a copy, to a multiple of the chunks

    On a GPU the sum is complete for a stream that waits for the messages: a rank sends every sum that it adds.
    """
    messages: list[dist.Work] = []
    if x.numel() == 0:
        return messages
    count, rank = num_chunks(steps), group.rank
    padded = torch.nn.functional.pad(x, (0, -x.numel() % count)) if x.numel() % count else x
    chunks = padded.view(count, -1)
    arrived = chunks.new_empty(MOST_CHILDREN, chunks.shape[1])
    for moves in steps:
        out, into = ([move for move in moves if rank == getattr(move, end)] for end in ("source", "target"))
        values = [arrived[place] if move.adds else chunks[move.chunk] for place, move in enumerate(into)]
        sends = [dist.P2POp(dist.isend, chunks[move.chunk], group.ranks[move.target], group.pg) for move in out]
        pairs = zip(values, into, strict=True)
        receives = [dist.P2POp(dist.irecv, value, group.ranks[move.source], group.pg) for value, move in pairs]
        started = dist.batch_isend_irecv(sends + receives) if out or into else []
        for message in started:
            message.wait()
        for value, move in zip(values, into, strict=True):
            if move.adds:
                chunks[move.chunk].add_(value)
        messages += started
    if padded is not x:
        x.copy_(padded[: x.numel()])
    return messages


def wrap(given: ToWrap) -> "MessagesDDP":
    """The engine of `parallel.ddp: ring_all_reduce` and `tree_all_reduce`. Collective over dp."""
    config, name = given.config, given.config.parallel.ddp
    dp = duplicate_group(given.dp, config.train.comm_timeout)
    # NCCL connects all ranks of a group in its first operation, and a step of a tree has only some of them.
    all_reduce(torch.zeros(1, device=given.ctx.device), dp)
    settings = {"bucket_mb": bucket_mb(config.parallel.bucket_mb, dp.size), "grad_dtype": given.grad_dtype}
    return MessagesDDP(given.chunks, given.params, given.table, dp, algorithm=name, **settings)


class MessagesDDP(LocalDDP):
    """LocalDDP that sums a bucket by the messages of an algorithm, in the bucket's dtype."""

    def __init__(self, *arguments: Any, algorithm: str, **settings: Any):
        super().__init__(*arguments, **settings)
        self._algorithm, self._steps = algorithm, ALGORITHMS[algorithm](self._dp.size)
        device = self._current.buckets[0].flat.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._runs_in_thread = dist.get_backend(self._dp.pg) == "gloo"
        self._last: Future[object] | None = None  # the sum of the newest bucket

    def _reduce(self, bucket: Bucket) -> Callable[[], object]:
        total = partial(sum_in_steps, bucket.flat, self._steps, self._dp)
        if self._runs_in_thread:
            self._last = running = _in_thread(total, self._last)
            return partial(self._wait, running)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(bucket.flat.device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            messages = total()
        return lambda: [finished(message, self._algorithm, self._dp) for message in messages]

    def _wait(self, running: "Future[object]") -> None:
        with communicating(self._algorithm, self._dp):
            running.result()


def _in_thread(work: Callable[[], object], before: "Future[object] | None") -> "Future[object]":
    """The result of `work` in a new thread, once the work before it has ended without an error."""
    result: Future[object] = Future()

    def run() -> None:
        try:
            if before is not None:
                before.result()
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name="all-reduce", daemon=True).start()
    return result
