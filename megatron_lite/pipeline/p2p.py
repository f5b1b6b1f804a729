"""Messages between neighbouring pipeline ranks, through pipes that deliver in order.

A pipe leads from one rank to a neighbour. Over NCCL it has its own process group: NCCL runs the operations of a group
in order, so with one group for both directions two neighbours that both send first would deadlock. Over Gloo all pipes
of a pipeline share one group, and each has its tag.

An open receive occupies a GPU until its message comes. If it were opened before the work on which the message depends,
an operation that synchronizes the device (kernel tuning, freeing memory) would deadlock. So on a GPU a receive is
opened when its message is needed, which is early, because the host runs ahead of the device and the receive has its own
stream. On the CPU one receive is opened ahead.
"""

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.context import ParallelContext, new_group


@dataclass(frozen=True)
class Message:
    """The shape, dtype and device of all messages of a run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Pipe:
    """One end of a one-way channel to or from the global rank `peer`."""

    def __init__(self, peer: int, pg: dist.ProcessGroup, tag: int = 0):
        self.peer = peer
        self._pg, self._tag = pg, tag
        self._stream: torch.cuda.Stream | None = None
        self._opened: tuple[dist.Work, Tensor] | None = None
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._num_released = 0  # messages of this run that left `_sending`

    def send(self, tensor: Tensor) -> None:
        """Start to send `tensor` and keep it until it is sent."""
        while self._sending and self._sending[0][0].is_completed():
            self.release(self._num_released + 1)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.peer, group=self._pg, tag=self._tag)
        self._sending.append((work, tensor))  # type: ignore[arg-type]

    def release(self, count: int) -> None:
        """Release the first `count` messages of this run; waits for unsent ones."""
        while self._num_released < count:
            self._sending[0][0].wait()
            self._sending.popleft()
            self._num_released += 1

    def drain(self) -> None:
        """Wait for all messages of this run, and end it."""
        self.release(self._num_released + len(self._sending))
        self._num_released = 0

    def expect(self, received: list[int], message: Message, back: "Pipe") -> None:
        """Prepare for the messages of this run.

        For each of them, `received` is the number of messages of the pipe `back` that the peer had received when it
        sent it. They are released when it arrives, because `is_completed` of Gloo stays False until a `wait`.
        """
        self._received, self._message, self._back = deque(received), message, back
        if message.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(message.device)
        self._open_ahead()

    def receive(self) -> Tensor:
        """The next message; on a GPU it is complete for work that is queued from now on."""
        assert self._received, "more messages are received than were expected"
        work, tensor = self._opened or self._open()
        work.wait()
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._back.release(self._received.popleft())
        self._open_ahead()
        return tensor

    def _open_ahead(self) -> None:
        self._opened = self._open() if self._received and may_open_ahead(self._message.device) else None

    def _open(self) -> tuple[dist.Work, Tensor]:
        message = self._message
        # A receive starts after the work queued in its stream, so in a separate stream it starts at once. Its memory is
        # allocated in that stream, because memory of another stream could still be in use by queued work.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            tensor = torch.empty(message.shape, dtype=message.dtype, device=message.device)
            work = dist.irecv(tensor, self.peer, group=self._pg, tag=self._tag)
        return work, tensor  # type: ignore[return-value]


def may_open_ahead(device: torch.device) -> bool:
    """Return True if a receive can be open while the device does other work."""
    return device.type == "cpu"


@dataclass
class Pipes:
    """A rank's pipes: activations flow from the previous rank to the next, gradients in reverse."""

    forward_in: Pipe | None = None
    forward_out: Pipe | None = None
    backward_in: Pipe | None = None
    backward_out: Pipe | None = None


def connect(ctx: ParallelContext, *, wraps: bool, timeout_seconds: float) -> Pipes:
    """This rank's pipes; with `wraps`, for several model chunks, also from the last rank to the first.

    Collective over the world. Communicates: one element in each pipe.
    """
    pipes, pp = Pipes(), ctx.pp
    if pp.size == 1:
        return pipes
    shared = None if ctx.device.type != "cpu" else new_group(pp.ranks, timeout_seconds)
    # Two hops share a rank, which connects one after the other. In rounds of hops without a common rank no rank waits
    # for a chain of others. The last hop of an odd ring has a round of its own.
    rounds: list[list[int]] = [[], [], []]
    for hop in range(pp.size if wraps else pp.size - 1):
        rounds[2 if hop == pp.size - 1 and pp.size % 2 else hop % 2].append(hop)
    for hops in filter(None, rounds):
        hop = next((hop for hop in hops if pp.rank in (hop, (hop + 1) % pp.size)), None)
        for number, (out_end, in_end) in enumerate((("forward_out", "forward_in"), ("backward_out", "backward_in"))):
            src, dst = (0, 0) if hop is None else (pp.ranks[hop], pp.ranks[(hop + 1) % pp.size])[:: 1 - 2 * number]
            tag, pg = 0, shared
            if shared is None:
                pg = new_group((ctx.rank,) if hop is None else tuple(sorted((src, dst))), timeout_seconds)
            elif hop is not None:
                tag = 2 * hop + number
            if hop is None:
                continue
            assert pg is not None
            is_source = ctx.rank == src
            pipe = Pipe(dst if is_source else src, pg, tag)
            setattr(pipes, out_end if is_source else in_end, pipe)
            # NCCL connects two ranks at their first message, and each waits for the other. In a run, with another order
            # on each rank, that could deadlock; here all ranks have the pipes in one order.
            element = torch.zeros(1, device=ctx.device)
            if is_source:
                dist.send(element, dst, group=pg, tag=tag)
            else:
                dist.recv(element, src, group=pg, tag=tag)
    return pipes
