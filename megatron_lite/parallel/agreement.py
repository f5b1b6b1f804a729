"""All ranks continue, or all raise the same error: no rank waits in a collective for one that failed.

Objects are sent as pickles, and a network can bring other bytes than those that a rank has sent. So only plain data and
classes of this package that hold data are unpickled, unlike in torch's own collectives of objects.
"""

import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from megatron_lite.errors import DamagedCheckpoint, MegatronLiteError, TrainingError
from megatron_lite.parallel.collectives import all_gather, broadcast
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import communicating
from megatron_lite.text import counted

T = TypeVar("T")


def on_first(work: Callable[[], T], group: Group) -> T:
    """The result of `work`, done by the group's first rank alone, on every rank; its error too.

    Communicates: one broadcast of a small object.
    """
    if group.size == 1:
        return work()
    result, problem, cause = _attempt(work, group) if group.is_first else (None, None, None)
    packed = pack((result, problem), group)
    size = broadcast(torch.tensor(packed.numel(), device=packed.device), group, src=0)
    received = broadcast(packed if group.is_first else packed.new_empty(int(size)), group, src=0)
    if not group.is_first:
        result, problem = unpack(received)
    if problem is not None:
        kind, text = problem
        raise kind(text) from cause
    return result  # type: ignore[return-value]


def on_all(work: Callable[[], T], group: Group) -> T:
    """This rank's result of `work`, which all ranks do at the same time; returns when all are done.

    When it fails anywhere, every rank raises the error of the lowest rank where it did; damage comes last.
    Communicates: one all-gather of a small object.
    """
    if group.size == 1:
        return work()
    result, problem, cause = _attempt(work, group)
    gathered = all_gather_objects(problem, group)
    # What is no damage comes first: no other checkpoint would help.
    problems = sorted(filter(None, gathered), key=lambda problem: problem[0] is DamagedCheckpoint)
    if problems:
        kind, text = problems[0]
        others = len(problems) - 1
        more = f" ({counted(others, 'more rank')} failed)" if others else ""
        raise kind(text + more) from cause
    return result  # type: ignore[return-value]


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Every rank's value in rank order, on every rank."""
    if group.size == 1 or group.pg is None:
        return [value]
    mine, sizes = _padded(value, group)
    return [unpack(row[:size]) for row, size in zip(all_gather(mine[None], group, dim=0), sizes, strict=True)]


def gather_objects(value: T, group: Group) -> list[T]:
    """Every rank's value in rank order on the group's first rank, an empty list on the others."""
    if group.size == 1:
        return [value]
    mine, sizes = _padded(value, group)
    rows = [torch.empty_like(mine) for _ in sizes] if group.is_first else None
    with communicating("gather", group):
        dist.gather(mine, rows, dst=group.ranks[0], group=group.pg)
    return [unpack(row[:size]) for row, size in zip(rows, sizes, strict=True)] if rows else []


def pack(value: Any, group: Group) -> Tensor:
    """The bytes of an object, where the group's collectives take tensors: on the CPU, or on this rank's GPU."""
    device = "cpu" if "cpu:" in dist.get_backend_config(group.pg) else "cuda"
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def unpack(packed: Tensor) -> Any:
    """The object that `pack` has made bytes of; raises UnpicklingError for a class that no rank sends."""
    return _Unpickler(io.BytesIO(packed.cpu().numpy().tobytes())).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A class of a module that this rank has imported: to import one by a name from the network would run it."""
        found = getattr(sys.modules.get(module), name, None) if module.startswith("megatron_lite.") else None
        own = found if isinstance(found, type) and found.__module__ == module else object
        if is_dataclass(own) or issubclass(own, (BaseModel, MegatronLiteError, tuple)):
            return own
        if module.startswith("pathlib") and name == "PosixPath":
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not a class that ranks send each other")


def _padded(value: Any, group: Group) -> tuple[Tensor, list[int]]:
    """This rank's bytes, padded to the longest of the group's; how many bytes each rank has."""
    packed = pack(value, group)
    sizes = all_gather(torch.tensor([packed.numel()], device=packed.device), group, dim=0).tolist()
    return torch.nn.functional.pad(packed, (0, max(sizes) - packed.numel())), sizes


def _attempt(work: Callable[[], T], group: Group) -> tuple[T | None, tuple[type, str] | None, Exception | None]:
    """Result, kind and text of the error, and the error. A MegatronLiteError keeps its kind; any other becomes a
    TrainingError, because one that escaped here would leave the other ranks waiting."""
    rank = group.ranks[group.rank]
    try:
        return work(), None, None
    except MegatronLiteError as error:
        return None, (type(error), f"rank {rank}: {error}"), error
    except Exception as error:
        return None, (TrainingError, f"rank {rank}: {type(error).__name__}: {error}"), error
