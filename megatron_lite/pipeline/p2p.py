"""Messages between neighbouring pipeline ranks, through pipes that deliver in the order in which they were filled.

A pipe leads one way, from one rank to its neighbour, and has a process group of its own. NCCL runs what was started in
one group in that order, so with one group for both directions two neighbours that each send first would wait for each
other for ever; Gloo cannot show that hang.
"""

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.context import ParallelContext


@dataclass(frozen=True)
class Message:
    """What every message of a run looks like, agreed before it: none carries its own shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Pipe:
    """One end of a one-way channel to or from the rank `peer`, a global one."""

    def __init__(self, peer: int, pg: dist.ProcessGroup):
        self.peer = peer
        self._pg = pg
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._expected: tuple[dist.Work, Tensor] | None = None
        self._left = 0

    def send(self, tensor: Tensor) -> None:
        """Starts to send; the tensor is held until it has left."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.peer, group=self._pg)
        assert work is not None
        self._sending.append((work, tensor))

    def drain(self) -> None:
        """Returns when everything that was sent has left."""
        while self._sending:
            self._sending[0][0].wait()
            self._sending.popleft()

    def expect(self, count: int, message: Message) -> None:
        """Announces how many messages this run will receive; the first may come from now on."""
        self._left, self._message = count, message
        self._post()

    def receive(self) -> Tensor:
        """The next message. The one after it may come from now on, while this one is being computed with."""
        assert self._expected is not None, "more messages are received than were expected"
        work, tensor = self._expected
        work.wait()
        self._post()
        return tensor

    def _post(self) -> None:
        self._expected = None
        if self._left:
            self._left -= 1
            message = self._message
            tensor = torch.empty(message.shape, dtype=message.dtype, device=message.device)
            work = dist.irecv(tensor, self.peer, group=self._pg)
            assert work is not None
            self._expected = work, tensor


@dataclass
class Pipes:
    """A rank's ends: activations come from the previous rank and go to the next, gradients the other way."""

    forward_in: Pipe | None = None
    forward_out: Pipe | None = None
    backward_in: Pipe | None = None
    backward_out: Pipe | None = None

    def drain(self) -> None:
        for pipe in (self.forward_out, self.backward_out):
            if pipe is not None:
                pipe.drain()


def connect(ctx: ParallelContext, *, wraps: bool, timeout_seconds: float) -> Pipes:
    """This rank's pipes. `wraps`: the last rank also hands over to the first, as several model chunks need.

    Collective over the world: torch wants every rank to make every group, in the same order.
    """
    pipes = Pipes()
    pp = ctx.grid.pp
    for ranks in ctx.grid.groups("pp") if pp > 1 else ():
        for upper in range(pp if wraps else pp - 1):
            above, below = ranks[upper], ranks[(upper + 1) % pp]
            for src, dst, out_end, in_end in (
                (above, below, "forward_out", "forward_in"),
                (below, above, "backward_out", "backward_in"),
            ):
                pg: Any = dist.new_group([src, dst], timeout=timedelta(seconds=timeout_seconds))
                if ctx.rank == src:
                    setattr(pipes, out_end, Pipe(dst, pg))
                elif ctx.rank == dst:
                    setattr(pipes, in_end, Pipe(src, pg))
    return pipes
