"""Prints the collectives that a block of code starts, with the matrix products around them, in order.

For scripts of two or more ranks that `megatron-lite run` starts in the folder above, as those of
docs/tensor-parallelism.md and docs/data-parallelism.md.
"""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite import mpu

COLLECTIVES = {  # the names of torch's operators, and the place of the full tensor among the arguments
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "_linear_pointwise"}


class Record(TorchDispatchMode):
    """Every operator of torch passes through a dispatch mode, collectives and those of backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []  # names and numbers of values

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.name().split("::")[1].split(".")[0]
        if operator.namespace == "c10d" and name in COLLECTIVES:
            kind, place = COLLECTIVES[name]
            tensor = args[place] if isinstance(args[place], torch.Tensor) else args[place][0]
            self.found.append((kind, tensor.numel()))
        elif name in PRODUCTS:
            self.found.append(("product", 0))
        return operator(*args, **(kwargs or {}))


@contextmanager
def collectives(title: str) -> Iterator[None]:
    """Print what the block starts, on rank 0. Values are those of the result of a gather, and of the input of a sum."""
    with Record() as record:
        yield
    equal = [(*entry, len(list(neighbours))) for entry, neighbours in groupby(record.found)]
    found = ", ".join(words(*each) for each in equal) or "nothing"
    say(textwrap.fill(f"{title}: {found}", width=100, subsequent_indent="    "))


def words(name: str, values: int, count: int) -> str:
    return f"{count} {name}{'s' * (count > 1)}" + (f" of {values:,} values" if values else "")


def say(*values: object) -> None:
    """Print on rank 0."""
    if not dist.get_rank():
        print(*values)


def start(**sizes: int) -> None:
    """Connect the ranks, build the groups of `mpu.initialize_model_parallel`, and seed all ranks alike."""
    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(**sizes)
    torch.manual_seed(1)
