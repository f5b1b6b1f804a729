"""How long communication takes: the bytes that each rank sends, over the speed of the links between its group's ranks.

Ranks are placed on machines in order, so many to a machine. A group within one machine uses its links (NVLink); a
larger one is as slow as the network, of which each rank has a share. Sums are rings, which send the fewest bytes.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, J. Parallel Distrib. Comput. 69(2), 2009.
"""

from dataclasses import dataclass
from functools import cache
from math import log2

from megatron_lite.plan.communication import Operation
from megatron_lite.plan.devices import Device


@dataclass(frozen=True)
class Machines:
    """The machines of a job and the links of a device."""

    device: Device
    ranks_per_machine: int
    hidden: tuple[str, ...] = ()  # groups whose communication other code overlaps with products: it takes no time

    def rate(self, ranks: tuple[int, ...]) -> float:
        """The bytes that each of these ranks can send in a second, and receive at the same time.

        The ranks of a group on one machine share its network cards with as many other groups as there are, so each has
        the cards of its members.
        """
        here = _members_on_a_machine(ranks, self.ranks_per_machine)
        if here == len(ranks):
            return self.device.link
        return min(self.device.link, here * self.device.network)

    def latency(self, ranks: tuple[int, ...]) -> float:
        """The time of an operation of no bytes."""
        inside = _members_on_a_machine(ranks, self.ranks_per_machine) == len(ranks)
        hop = self.device.link_latency if inside else self.device.network_latency
        return hop * (1 + log2(len(ranks)))

    def seconds(self, operation: Operation) -> float:
        """The time of an operation in which nothing else is in flight."""
        if operation.group in self.hidden:
            return 0.0
        ranks = operation.communicator.ranks
        return self.latency(ranks) + sent_bytes(operation) / self.rate(ranks)

    def message_seconds(self, size: int, ranks: tuple[int, ...]) -> float:
        """The time of a message between two ranks."""
        return self.latency(ranks) + size / self.rate(ranks)


@cache
def _members_on_a_machine(ranks: tuple[int, ...], ranks_per_machine: int) -> int:
    """The smallest number of these ranks on one of their machines."""
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // ranks_per_machine] = counts.get(rank // ranks_per_machine, 0) + 1
    return min(counts.values())


def tensor_bytes(operation: Operation) -> int:
    """The bytes of the largest tensor of an operation: the gathered one, or the one that is summed."""
    return max((_bytes_of(shape, dtype) for shape, dtype in operation.tensors), default=0)


def sent_bytes(operation: Operation) -> float:
    """The bytes that a rank sends in an operation: in a ring, 2 (n - 1) / n of what n ranks sum."""
    count, size = len(operation.communicator.ranks), tensor_bytes(operation)
    share = (count - 1) / count
    shares = {"all_reduce": 2 * share, "send": 1.0, "recv": 0.0, "broadcast": 1.0, "barrier": 0.0}
    return shares.get(operation.name, share) * size


_SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "bool": 1}


def _bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    size = _SIZES[dtype]
    for extent in shape:
        size *= extent
    return size
