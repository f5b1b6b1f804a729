"""Pipes between pipeline ranks: whom they lead to, in what order they deliver, and what they hold on to."""

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


def two_ends() -> tuple[Pipe, Pipe]:
    """On each of two ranks, the pipe out to the other and the pipe in from it."""
    pipes = connect(context(pp=2), wraps=False, timeout_seconds=10)
    out, back = (
        (pipes.forward_out, pipes.backward_in) if dist.get_rank() == 0 else (pipes.backward_out, pipes.forward_in)
    )
    assert out is not None and back is not None
    return out, back


def number(value: int) -> Tensor:
    """A message that says which one it is; not contiguous."""
    return torch.arange(6, dtype=torch.float64).view(3, 2).t() + 10 * value


def peers(layouts: list[tuple[dict[str, int], bool]]) -> list[dict[str, int | None]]:
    found = []
    for sizes, wraps in layouts:
        pipes = connect(context(**sizes), wraps=wraps, timeout_seconds=60)
        ends = {end: getattr(pipes, end) for end in ENDS}
        found.append({end: pipe and pipe.peer for end, pipe in ends.items()})
        groups = [pipe._pg for pipe in ends.values() if pipe is not None]
        assert len(set(groups)) == len(groups)  # or NCCL would let two directions wait for each other
    return found


def test_pipes_lead_to_the_neighbours_in_the_same_pipeline(ranks):
    """Activations go up by one stage and gradients down; with several chunks also round from the last to the first."""
    layouts = [({"pp": 4}, False), ({"pp": 4}, True), ({"pp": 2, "dp": 2}, False), ({"pp": 2, "tp": 2}, True)]
    for rank, found in enumerate(ranks(4, peers, layouts)):
        for (sizes, wraps), ends in zip(layouts, found, strict=True):
            step, pp = 4 // sizes["pp"], sizes["pp"]
            place = rank // step
            before = (rank - step) % 4 if wraps or place > 0 else None
            after = (rank + step) % 4 if wraps or place < pp - 1 else None
            assert ends == dict(zip(ENDS, (before, after, after, before), strict=True)), (sizes, wraps)


def test_one_stage_has_no_pipes():
    assert connect(context(), wraps=True, timeout_seconds=60) == Pipes()


def both_ways(count: int) -> list[Tensor]:
    """Both ranks send everything before they receive anything; twice, as in two runs."""
    out, back = two_ends()
    received = []
    for first in (0, 100):
        back.expect([0] * count, MESSAGE, out)
        for value in range(count):
            out.send(number(first + 1000 * dist.get_rank() + value))
        received += [back.receive() for _ in range(count)]
        out.drain()
    return received


def test_messages_come_in_the_order_in_which_they_were_sent(ranks):
    for rank, received in enumerate(ranks(2, both_ways, 5)):
        base = 1000 * (1 - rank)
        wanted = [number(base + value) for value in (*range(5), *range(100, 105))]
        assert torch.equal(torch.stack(received), torch.stack(wanted))


def too_many() -> str:
    out, back = two_ends()
    back.expect([0], MESSAGE, out)
    out.send(number(1))
    back.receive()
    with pytest.raises(AssertionError) as raised:
        back.receive()
    return str(raised.value)


def test_a_message_that_nobody_announced_is_no_silent_wait(ranks):
    assert ranks(2, too_many) == ["more messages are received than were expected"] * 2


def held(references: list[StorageWeakRef]) -> list[bool]:
    return [not reference.expired() for reference in references]


def letting_go() -> list[list[bool]]:
    """Rank 0 sends three messages and gets two answers: the first when rank 1 has one of them, the second after two.

    Once more afterwards: the count starts anew with each run.
    """
    out, back = two_ends()
    found = []
    for _ in range(2):
        if dist.get_rank() == 0:
            back.expect([1, 2], MESSAGE, out)
            messages = [number(value).contiguous() for value in range(3)]
            references = [StorageWeakRef(message.untyped_storage()) for message in messages]
            for message in messages:
                out.send(message)
            del messages, message
            found.append(held(references))
            for _ in range(2):
                back.receive()
                found.append(held(references))
            out.drain()
            found.append(held(references))
        else:
            back.expect([0, 0, 0], MESSAGE, out)
            for value in range(3):
                assert torch.equal(back.receive(), number(value))
                if value < 2:
                    out.send(number(value))
            out.drain()
    return found


def test_a_message_is_held_until_an_answer_says_that_it_has_come(ranks):
    one_run = [[True, True, True], [False, True, True], [False, False, True], [False, False, False]]
    assert ranks(2, letting_go) == [one_run * 2, []]


class Sent:
    """What `isend` returns on a back end that tells when a message has left, as NCCL does."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.done = True


def test_a_message_that_has_left_goes_with_the_next_one():
    works = [Sent(), Sent(), Sent(), Sent()]
    returned = iter(works)
    pipe = Pipe(1, mock.Mock())
    references = []
    with mock.patch.object(dist, "isend", lambda tensor, peer, group: next(returned)):
        for _ in range(3):
            message = number(0).contiguous()
            references.append(StorageWeakRef(message.untyped_storage()))
            pipe.send(message)
            del message
        works[0].done = works[2].done = True  # the second is still on its way
        pipe.send(number(0))
        assert held(references) == [False, True, True]
        pipe.release(1)  # an answer to a message that has left already
        assert held(references) == [False, True, True]
        pipe.drain()
    assert held(references) == [False, False, False]
    assert all(work.done for work in works)


def slow_reader(file: Path) -> bool:
    out, back = two_ends()
    if dist.get_rank() == 0:
        for value in range(3):
            out.send(number(value))
        out.drain()
        return file.exists()
    time.sleep(0.3)
    file.touch()
    back.expect([0, 0, 0], MESSAGE, out)
    for _ in range(3):
        back.receive()
    return True


def test_drain_waits_for_the_reader(ranks, tmp_path):
    assert ranks(2, slow_reader, tmp_path / "reads") == [True, True]


def all_send_first(sizes: dict[str, int], wraps: bool) -> None:
    """Each rank sends to both neighbours before it receives anything.

    As on NCCL, a rank's first message through a group waits in its call until the other end has called too.
    """
    met: set[dist.ProcessGroup] = set()

    def meeting(function):
        def call(tensor, *args, group, **kwargs):
            if group not in met:
                met.add(group)
                dist.barrier(group=group)
            return function(tensor, *args, group=group, **kwargs)

        return call

    names = ("send", "recv", "isend", "irecv")
    with mock.patch.multiple(dist, **{name: meeting(getattr(dist, name)) for name in names}):
        pipes = connect(context(**sizes), wraps=wraps, timeout_seconds=5)
        for pipe, back in ((pipes.forward_in, pipes.backward_out), (pipes.backward_in, pipes.forward_out)):
            if pipe is not None and back is not None:
                pipe.expect([0], MESSAGE, back)
        for pipe in (pipes.forward_out, pipes.backward_out):
            if pipe is not None:
                pipe.send(number(1))
        for pipe in (pipes.forward_in, pipes.backward_in):
            if pipe is not None:
                assert torch.equal(pipe.receive(), number(1))
        for pipe in (pipes.forward_out, pipes.backward_out):
            if pipe is not None:
                pipe.drain()


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("sizes", [{"pp": 4}, {"pp": 2, "dp": 2}], ids=str)
def test_the_first_message_of_a_pipe_meets_its_reader(ranks, sizes, wraps):
    """NCCL connects the ends of a group in its first message, and there each waits for the other: were that left to a
    run, in which all ranks may send first, none would ever read."""
    ranks(4, all_send_first, sizes, wraps)
