"""A simulation of NCCL: all ranks of a layout run real steps one after another, and their communication is played.

On a GPU, collectives of one communicator run in the order in which each rank has started them, and nothing names them.
So two ranks with different orders sum wrong tensors or hang, which Gloo may not show. Here every rank runs over torch's
fake process group (`fake_world.py`), a dispatch mode records what it starts, and three checks follow:

    agreement   the members of a communicator start the same operations, with the same shapes and dtypes
    memory      every tensor is contiguous, as NCCL needs it
    progress    played with one queue on each rank, the run ends: an operation waits for its members, a receive for its
                send, and everything behind it waits too; a send waits for nothing

One queue is the worst case: streams of a GPU may run operations side by side, and `CUDA_DEVICE_MAX_CONNECTIONS=1` makes
them start in order. Real data does not flow, so a step that depends on values may differ on a GPU.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.config.schema import Config
from megatron_lite.optim.param_groups import AdamW
from megatron_lite.parallel.waiting import communicating
from megatron_lite.pipeline import p2p
from megatron_lite.plan.fake_world import META, empty_batch, fake_rank
from megatron_lite.plan.kernels import Recorder, on_gpu
from megatron_lite.plan.source_lines import package_line
from megatron_lite.training.run import Run
from megatron_lite.training.step import local_batches, train_step

PROCESS_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"
NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "recv_": "recv",
    "monitored_barrier_": "barrier",
}


RECEIVING = ("recv_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")  # into their first argument


class Communicator(NamedTuple):
    """Ranks that communicate. Several communicators may have the same ranks; `number` counts them."""

    ranks: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))} (communicator {self.number})"


class Operation(NamedTuple):
    """A collective or message that a rank starts."""

    name: str
    communicator: Communicator
    tensors: tuple[tuple[tuple[int, ...], str], ...]  # shapes and dtypes
    peer: int = -1  # the other rank of a message
    is_contiguous: bool = True
    line: str = ""  # that starts it
    group: str = ""  # the name of its `Group`; empty in torch's own engines, which have none

    def __str__(self) -> str:
        tensors = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in self.tensors)
        return f"{self.name} of {tensors or 'nothing'} at {self.line}"


class Wait(NamedTuple):
    """This rank needs the results of the first operations of a communicator: `awaited` of the `started` ones."""

    communicator: Communicator
    awaited: int
    started: int


class CommunicationRecorder(TorchDispatchMode):
    """Records the operations of this process, and its waits for them, in `events` while it is active."""

    def __init__(self, events: list[Any] | None = None) -> None:
        super().__init__()
        self.events: list[Any] = [] if events is None else events
        self._communicators: dict[str, Communicator] = {}
        self._created: Counter[tuple[int, ...]] = Counter()
        self._started: Counter[Communicator] = Counter()
        self._awaited: Counter[Communicator] = Counter()
        self._nameless: dict[Communicator, list[int]] = defaultdict(list)  # places in `events`
        self._kernels: Recorder | None = None  # that this one has joined

    @property
    def operations(self) -> list[Operation]:
        return [event for event in self.events if isinstance(event, Operation)]

    @contextmanager
    def recording(self, kernels: Recorder | None = None) -> Iterator[None]:
        """A context that also follows the creation of groups. A recorder of kernels that is active is joined."""
        new_group = dist.new_group

        def recorded(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            group = new_group(ranks, *args, **kwargs)
            if isinstance(group, dist.ProcessGroup):
                members = tuple(dist.get_process_group_ranks(group))
                self._created[members] += 1
                self._communicators[group.group_name] = Communicator(members, self._created[members])
            return group

        enter, leave = communicating.__enter__, communicating.__exit__

        def entered(wait: communicating) -> None:
            wait.started = self._started_in(wait)  # type: ignore[attr-defined]
            enter(wait)

        def left(wait: communicating, *error: Any) -> None:
            leave(wait, *error)
            self._wait(wait)

        waits = patch.multiple(communicating, __enter__=entered, __exit__=left)
        self._kernels, active = kernels, self if kernels is None else kernels.joined(self)
        with patch.object(dist, "new_group", recorded), waits, active:
            yield

    def _started_in(self, wait: communicating) -> int:
        return self._started[self._of(wait.group.pg)] if wait.group.pg is not None else 0

    def _wait(self, wait: communicating) -> None:
        """An operation that was started within a wait is its last one; else the wait is for the oldest in flight.

        The wait also names the group of these operations.
        """
        if wait.group.pg is None:
            return
        communicator, started = self._of(wait.group.pg), self._started_in(wait)
        has_started = started > wait.started  # type: ignore[attr-defined]
        self._awaited[communicator] = started if has_started else min(self._awaited[communicator] + 1, started)
        places = self._nameless[communicator]
        while places and len(places) > started - self._awaited[communicator]:
            place = places.pop(0)
            self.events[place] = self.events[place]._replace(group=wait.group.name)
        self.events.append(Wait(communicator, self._awaited[communicator], started))

    def _of(self, group: "dist.ProcessGroup") -> Communicator:
        if group.group_name in self._communicators:
            return self._communicators[group.group_name]
        return Communicator(tuple(dist.get_process_group_ranks(group)), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.observe(func, lambda args, kwargs: func(*args, **kwargs), args, kwargs or {})

    def observe(self, func: Any, run: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """Run an operation, and record it if it communicates."""
        if func.namespace != "c10d":
            return run(args, kwargs)
        op = func._schema.name.removeprefix("c10d::")
        self._record(op, func._schema.arguments, args)
        result = run(args, kwargs)
        if op in RECEIVING:  # the fake process group leaves the memory as it was
            for tensor in _tensors(args[0]):
                self._zero(tensor.detach())
        return result

    def _zero(self, tensor: Tensor) -> None:
        if self._kernels is None:
            tensor.zero_()
        else:
            self._kernels.run(torch.ops.aten.zero_.default, (tensor,), {})

    def _record(self, op: str, parameters: Any, args: Any) -> None:
        given = {each.name: (str(each.type), value) for each, value in zip(parameters, args, strict=False)}
        group = next(dist.ProcessGroup.unbox(value) for kind, value in given.values() if kind == PROCESS_GROUP)
        communicator = self._of(group)
        self._started[communicator] += 1
        tensors = [tensor for _, value in given.values() for tensor in _tensors(value)]
        peer = next((value for name, (_, value) in given.items() if name in ("dst", "src")), -1)
        self._nameless[communicator].append(len(self.events))
        self.events.append(
            Operation(
                NAMES.get(op, op),
                communicator,
                tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors),
                communicator.ranks[peer] if op in ("send", "recv_") else -1,
                all(tensor.is_contiguous() for tensor in tensors),
                package_line(sys._getframe(2), ("parallel/collectives.py", "parallel/waiting.py")),
            )
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        yield from (tensor for tensor in value if isinstance(tensor, Tensor))


def record_rank(
    config: Config, rank: int, world_size: int, *, num_microbatches: int, steps: int = 2, device: torch.device = META
) -> list[Operation]:
    """What a rank starts in its setup and in some steps."""
    with _recorded_rank(config, rank, world_size, device, None) as (recorder, run):
        batches = local_batches([empty_batch(config, device)] * num_microbatches, run.ctx.cp)
        for _ in range(steps):
            train_step(run, batches)
        run.ddp.wait_for_params()
    return recorder.operations


def record_step(config: Config, rank: int, world_size: int, *, num_microbatches: int) -> list[Operation]:
    """What a rank starts in one step."""
    kernels = Recorder()
    with on_gpu(kernels, lines=False), _recorded_rank(config, rank, world_size, META, kernels) as (recorder, run):
        first = len(recorder.events)
        train_step(run, local_batches([empty_batch(config)] * num_microbatches, run.ctx.cp))
        run.ddp.wait_for_params()
        return [event for event in recorder.events[first:] if isinstance(event, Operation)]


@contextmanager
def _recorded_rank(
    config: Config, rank: int, world_size: int, device: torch.device, kernels: Recorder | None
) -> Iterator[tuple[CommunicationRecorder, Run]]:
    """The recorded run of a rank, whose pipes are those of a GPU."""
    recorder = CommunicationRecorder()
    adam = nullcontext() if device != META else patch.object(AdamW, "step", lambda adam: None)  # it reads values
    as_on_a_gpu = patch.object(p2p, "may_open_ahead", lambda device: False)
    with recorder.recording(kernels), adam, as_on_a_gpu, fake_rank(config, rank, world_size, device) as run:
        yield recorder, run


Ranks = Mapping[int, Sequence[Operation]]
"""The operations of each rank."""


def problems(ranks: Ranks) -> list[str]:
    """The findings of all three checks; an empty list for a layout that works."""
    return [*memory_problems(ranks), *(agreement_problems(ranks) or progress_problems(ranks))]


def memory_problems(ranks: Ranks) -> list[str]:
    """A line for each operation of a tensor that is not contiguous."""
    found = {
        f"{operation} on rank {rank}: a tensor is not contiguous, and NCCL would send other memory"
        for rank, operations in ranks.items()
        for operation in operations
        if not operation.is_contiguous
    }
    return sorted(found)


def agreement_problems(ranks: Ranks) -> list[str]:
    """The first difference in each communicator whose members do not start the same operations."""
    by_communicator: dict[Communicator, dict[int, list[Operation]]] = defaultdict(dict)
    for rank, operations in ranks.items():
        for operation in operations:
            by_communicator[operation.communicator].setdefault(rank, []).append(operation)
    found = []
    for communicator, started in by_communicator.items():
        members = [rank for rank in communicator.ranks if rank in ranks]
        first = started.get(members[0], [])
        if any(operation.name in ("send", "recv") for operations in started.values() for operation in operations):
            found += _message_problems(communicator, {rank: started.get(rank, []) for rank in members})
            continue
        for rank in members[1:]:
            if difference := _difference(first, started.get(rank, [])):
                found.append(f"{communicator}: {difference.format(members[0], rank)}")
                break
    return found


def _difference(one: list[Operation], other: list[Operation]) -> str:
    """The first difference of two sequences, with places for their ranks; empty without one."""
    for place in range(max(len(one), len(other))):
        a, b = (operations[place] if place < len(operations) else None for operations in (one, other))
        if a is None or b is None or (a.name, a.tensors) != (b.name, b.tensors):
            return f"operation {place}: rank {{}} starts {a or 'nothing'}, rank {{}} {b or 'nothing'}"
    return ""


def _message_problems(communicator: Communicator, started: dict[int, list[Operation]]) -> list[str]:
    """The first message between two members that is not received as it is sent."""
    found = []
    for sender in started:
        for receiver in started:
            sent = [each for each in started[sender] if each.name == "send" and each.peer == receiver]
            received = [each for each in started[receiver] if each.name == "recv" and each.peer == sender]
            plain = [[each._replace(name="message") for each in operations] for operations in (sent, received)]
            if difference := _difference(*plain):
                found.append(f"{communicator}: {difference.format(f'{sender} (sends)', f'{receiver} (receives)')}")
    return found


def progress_problems(ranks: Ranks) -> list[str]:
    """The operations in which ranks wait forever, with one queue on each rank; an empty list if all end."""
    place = dict.fromkeys(ranks, 0)
    sent: Counter[tuple[Communicator, int, int]] = Counter()
    arrived: dict[tuple[Communicator, int], set[int]] = defaultdict(set)
    finished: dict[int, Counter[Communicator]] = {rank: Counter() for rank in ranks}

    moved = True
    while moved:
        moved = False
        for rank, operations in ranks.items():
            while place[rank] < len(operations):
                operation = operations[place[rank]]
                communicator = operation.communicator
                if operation.name == "send":
                    sent[communicator, rank, operation.peer] += 1
                elif operation.name == "recv":
                    if not sent[communicator, operation.peer, rank]:
                        break
                    sent[communicator, operation.peer, rank] -= 1
                else:
                    number = finished[rank][communicator]
                    arrived[communicator, number].add(rank)
                    if len(arrived[communicator, number]) < sum(member in ranks for member in communicator.ranks):
                        break
                    finished[rank][communicator] += 1
                place[rank] += 1
                moved = True
    return [
        f"rank {rank} waits forever in {operations[place[rank]]} over {operations[place[rank]].communicator}"
        for rank, operations in ranks.items()
        if place[rank] < len(operations)
    ]
