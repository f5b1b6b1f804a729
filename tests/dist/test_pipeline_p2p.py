"""Pipes between pipeline ranks: their peers, the order of messages, and the memory of sent messages."""

import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.p2p import Message, Pipe, Pipes, connect

CPU = torch.device("cpu")
MESSAGE = Message((2, 3), torch.float64, CPU)
ENDS = ("forward_in", "forward_out", "backward_in", "backward_out")


def context(**sizes: int) -> ParallelContext:
    return ParallelContext.create(Grid(**sizes), CPU, timeout_seconds=60)


def pipes_to_the_other_rank() -> tuple[Pipe, Pipe]:
    """The outgoing and the incoming pipe of this rank, on two ranks."""
    pipes = connect(context(pp=2), wraps=False, timeout_seconds=10)
    out, back = (
        (pipes.forward_out, pipes.backward_in) if dist.get_rank() == 0 else (pipes.backward_out, pipes.forward_in)
    )
    assert out is not None and back is not None
    return out, back


def make_message(value: int) -> Tensor:
    """A message that contains `value`; not contiguous."""
    return torch.arange(6, dtype=torch.float64).view(3, 2).t() + 10 * value


def peers_of_pipes(layouts: list[tuple[dict[str, int], bool]]) -> list[dict[str, int | None]]:
    found = []
    for sizes, wraps in layouts:
        pipes = connect(context(**sizes), wraps=wraps, timeout_seconds=60)
        ends = {end: getattr(pipes, end) for end in ENDS}
        found.append({end: pipe and pipe.peer for end, pipe in ends.items()})
        ways = [(pipe._pg, pipe._tag) for pipe in ends.values() if pipe is not None]
        assert len(set(ways)) == len(ways)  # messages of two pipes would be mixed
    return found


def test_pipes_connect_neighbours_of_the_same_pipeline(ranks):
    """Activations go to the next stage and gradients to the previous one; with several chunks, the last stage is also
    connected to the first. A wrong peer would mix replicas."""
    layouts = [({"pp": 4}, False), ({"pp": 4}, True), ({"pp": 2, "dp": 2}, False), ({"pp": 2, "tp": 2}, True)]
    for rank, found in enumerate(ranks(4, peers_of_pipes, layouts)):
        for (sizes, wraps), ends in zip(layouts, found, strict=True):
            step, pp = 4 // sizes["pp"], sizes["pp"]
            place = rank // step
            previous = (rank - step) % 4 if wraps or place > 0 else None
            following = (rank + step) % 4 if wraps or place < pp - 1 else None
            assert ends == dict(zip(ENDS, (previous, following, following, previous), strict=True)), (sizes, wraps)


def test_a_single_stage_has_no_pipes():
    """A stage that sent to itself would hang."""
    assert connect(context(), wraps=True, timeout_seconds=60) == Pipes()


def exchange_messages(count: int) -> list[Tensor]:
    """Both ranks send `count` messages before they receive any; twice, as in two runs. Returns the received ones."""
    out, back = pipes_to_the_other_rank()
    received = []
    for first in (0, 100):
        back.expect([0] * count, MESSAGE, out)
        for value in range(count):
            out.send(make_message(first + 1000 * dist.get_rank() + value))
        received += [back.receive() for _ in range(count)]
        out.drain()
    return received


def test_messages_arrive_in_the_order_of_sending(ranks):
    """Messages have no tags: out of order, an activation would go to another micro-batch."""
    for rank, received in enumerate(ranks(2, exchange_messages, 5)):
        base = 1000 * (1 - rank)
        wanted = [make_message(base + value) for value in (*range(5), *range(100, 105))]
        assert torch.equal(torch.stack(received), torch.stack(wanted))


def receive_more_than_expected() -> str:
    out, back = pipes_to_the_other_rank()
    back.expect([0], MESSAGE, out)
    out.send(make_message(1))
    back.receive()
    with pytest.raises(AssertionError) as raised:
        back.receive()
    return str(raised.value)


def test_receiving_more_messages_than_expected_raises_an_error(ranks):
    """Without the error, the rank would wait until the timeout for a message that is never sent."""
    assert ranks(2, receive_more_than_expected) == ["more messages are received than were expected"] * 2


def are_allocated(references: list[StorageWeakRef]) -> list[bool]:
    return [not reference.expired() for reference in references]


def send_and_get_answers() -> list[list[bool]]:
    """On rank 0, which messages are still allocated after sending, after each answer, and after the drain.

    Rank 0 sends three messages and gets two answers: the first after rank 1 has received one message, the second after
    two. All this happens twice, because counts must be reset between runs.
    """
    out, back = pipes_to_the_other_rank()
    found = []
    for _ in range(2):
        if dist.get_rank() == 0:
            back.expect([1, 2], MESSAGE, out)
            messages = [make_message(value).contiguous() for value in range(3)]
            references = [StorageWeakRef(message.untyped_storage()) for message in messages]
            for message in messages:
                out.send(message)
            del messages, message
            found.append(are_allocated(references))
            for _ in range(2):
                back.receive()
                found.append(are_allocated(references))
            out.drain()
            found.append(are_allocated(references))
        else:
            back.expect([0, 0, 0], MESSAGE, out)
            for value in range(3):
                assert torch.equal(back.receive(), make_message(value))
                if value < 2:
                    out.send(make_message(value))
            out.drain()
    return found


def test_a_sent_message_stays_allocated_until_its_answer(ranks):
    """Freed earlier, its memory could be overwritten before it is sent; freed later, memory would grow."""
    one_run = [[True, True, True], [False, True, True], [False, False, True], [False, False, False]]
    assert ranks(2, send_and_get_answers) == [one_run * 2, []]


class FakeWork:
    """The result of `isend` on a backend that reports when a message has been sent, as NCCL does."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.done = True


def test_a_completed_message_is_freed_when_the_next_one_is_sent():
    """On NCCL a message need not wait for an answer; but messages are freed only in order."""
    works = [FakeWork(), FakeWork(), FakeWork(), FakeWork()]
    returned = iter(works)
    pipe = Pipe(1, mock.Mock())
    references = []
    with mock.patch.object(dist, "isend", lambda tensor, peer, group, tag: next(returned)):
        for _ in range(3):
            message = make_message(0).contiguous()
            references.append(StorageWeakRef(message.untyped_storage()))
            pipe.send(message)
            del message
        works[0].done = works[2].done = True  # the second is still in flight
        pipe.send(make_message(0))
        assert are_allocated(references) == [False, True, True]
        pipe.release(1)  # an answer to a message that is already freed
        assert are_allocated(references) == [False, True, True]
        pipe.drain()
    assert are_allocated(references) == [False, False, False]
    assert all(work.done for work in works)


def drain_with_slow_receiver(file: Path) -> bool:
    """Whether rank 1 had started to receive when the drain of rank 0 returned."""
    out, back = pipes_to_the_other_rank()
    if dist.get_rank() == 0:
        for value in range(3):
            out.send(make_message(value))
        out.drain()
        return file.exists()
    time.sleep(0.3)
    file.touch()
    back.expect([0, 0, 0], MESSAGE, out)
    for _ in range(3):
        back.receive()
    return True


def test_drain_waits_for_the_receiver(ranks, tmp_path):
    """A rank that exits before its last message is received would break the connection."""
    assert ranks(2, drain_with_slow_receiver, tmp_path / "receiving") == [True, True]


def all_send_first(sizes: dict[str, int], wraps: bool) -> None:
    """Send to both neighbours on every rank before any receive.

    As on NCCL, the first call of a rank in a group blocks until the other rank has called too.
    """
    connected: set[dist.ProcessGroup] = set()

    def block_in_first_call(function):
        def call(tensor, *args, group, **kwargs):
            if group not in connected:
                connected.add(group)
                dist.barrier(group=group)
            return function(tensor, *args, group=group, **kwargs)

        return call

    names = ("send", "recv", "isend", "irecv")
    with mock.patch.multiple(dist, **{name: block_in_first_call(getattr(dist, name)) for name in names}):
        pipes = connect(context(**sizes), wraps=wraps, timeout_seconds=5)
        for pipe, back in ((pipes.forward_in, pipes.backward_out), (pipes.backward_in, pipes.forward_out)):
            if pipe is not None and back is not None:
                pipe.expect([0], MESSAGE, back)
        for pipe in (pipes.forward_out, pipes.backward_out):
            if pipe is not None:
                pipe.send(make_message(1))
        for pipe in (pipes.forward_in, pipes.backward_in):
            if pipe is not None:
                assert torch.equal(pipe.receive(), make_message(1))
        for pipe in (pipes.forward_out, pipes.backward_out):
            if pipe is not None:
                pipe.drain()


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("sizes", [{"pp": 4}, {"pp": 2, "dp": 2}], ids=str)
def test_connect_prevents_a_deadlock_of_first_messages(ranks, sizes, wraps):
    """NCCL connects the two ranks of a group in their first calls, which block until both have called. In a run all
    ranks may send first, so without a connection before it none would ever receive."""
    ranks(4, all_send_first, sizes, wraps)
