"""Messages between neighbouring pipeline ranks, through pipes that deliver in the order in which they were filled.

A pipe leads one way, from one rank to its neighbour, and has a process group of its own. NCCL runs what was started in
one group in that order, so with one group for both directions two neighbours that each send first would wait for each
other for ever; Gloo cannot show that hang.

Nor can it show another: an open receive occupies a GPU until the message comes, so if one were opened before the work
that the message depends on, whatever waits for the whole device meanwhile (a kernel being tuned, memory being given
back) would wait for ever. So there receives are opened when their message is needed, which is early: the host runs
ahead of the device, and a receive goes around the queue of work. Where nothing waits for a whole device they are opened
one ahead, and a message is not held up by the question whether it may come.
"""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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
        self._stream: torch.cuda.Stream | None = None
        self._opened: tuple[dist.Work, Tensor] | None = None
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._num_gone = 0  # messages of this run that are no longer in `_sending`

    def send(self, tensor: Tensor) -> None:
        """Starts to send; the tensor is held until it is known to have left."""
        while self._sending and self._sending[0][0].is_completed():
            self.forget(self._num_gone + 1)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.peer, group=self._pg)
        assert work is not None
        self._sending.append((work, tensor))

    def forget(self, count: int) -> None:
        """Lets go of the first `count` messages of this run; waits for those that have not left."""
        while self._num_gone < count:
            self._sending[0][0].wait()
            self._sending.popleft()
            self._num_gone += 1

    def drain(self) -> None:
        """Returns when everything that was sent has left: the end of a run."""
        self.forget(self._num_gone + len(self._sending))
        self._num_gone = 0

    def expect(self, taken: list[int], message: Message, back: "Pipe") -> None:
        """Announces the messages that this run will receive.

        For each, `taken` has how many messages of the pipe `back` the peer had received when it sent this one. So they
        can be let go when it comes. Gloo would not tell: to its `is_completed` nothing has left before it was waited
        for, and what is sent would be held to the end of the run.
        """
        self._taken, self._message, self._back = deque(taken), message, back
        if message.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(message.device)
        self._open_ahead()

    def receive(self) -> Tensor:
        """The next message, when it has come; on a GPU, when work that is queued from now on will find it there."""
        assert self._taken, "more messages are received than were expected"
        work, tensor = self._opened or self._open()
        work.wait()
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._back.forget(self._taken.popleft())
        self._open_ahead()
        return tensor

    def _open_ahead(self) -> None:
        self._opened = self._open() if self._taken and may_open_ahead(self._message.device) else None

    def _open(self) -> tuple[dist.Work, Tensor]:
        message = self._message
        # A receive starts after what is queued in the stream that it is called in: in one of its own, at once. Its
        # memory is of that stream too, as in another one's it could still be in use by queued work.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            tensor = torch.empty(message.shape, dtype=message.dtype, device=message.device)
            work = dist.irecv(tensor, self.peer, group=self._pg)
        assert work is not None
        return work, tensor


def may_open_ahead(device: torch.device) -> bool:
    """Whether a receive may be open while other work is done on the device."""
    return device.type == "cpu"


@dataclass
class Pipes:
    """A rank's ends: activations come from the previous rank and go to the next, gradients the other way."""

    forward_in: Pipe | None = None
    forward_out: Pipe | None = None
    backward_in: Pipe | None = None
    backward_out: Pipe | None = None


def connect(ctx: ParallelContext, *, wraps: bool, timeout_seconds: float) -> Pipes:
    """This rank's pipes. `wraps`: the last rank also hands over to the first, as several model chunks need.

    Collective over the world: torch wants every rank to make every group, in the same order.
    Communicates: a number through each pipe.
    """
    pipes = Pipes()
    pp = ctx.grid.pp
    greetings: list[Callable[[Tensor], object]] = []
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
                    greetings.append(partial(dist.send, dst=dst, group=pg))
                elif ctx.rank == dst:
                    setattr(pipes, in_end, Pipe(src, pg))
                    greetings.append(partial(dist.recv, src=src, group=pg))
    # In a group's first message NCCL connects its two ranks, and each waits in that call for the other. In a run, where
    # each rank has an order of its own, they could wait in a circle; here all ranks have the pipes in one order.
    for greet in greetings:
        greet(torch.zeros(1, device=ctx.device))
    return pipes
