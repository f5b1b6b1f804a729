"""All ranks continue, or all raise the same error, so that no rank waits for one that failed.

Objects travel as pickles. Bytes from a network are not trusted: only plain data and data classes of this package are
unpickled, unlike in torch's collectives of objects.
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
    """The result or error of `work`, which only the group's first rank calls, on every rank.

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
    """This rank's result of `work`, which every rank calls; returns when all ranks have finished.

    If it fails anywhere, every rank raises the error of the lowest failed rank; damage comes last.
    Communicates: one all-gather of a small object.
    """
    if group.size == 1:
        return work()
    result, problem, cause = _attempt(work, group)
    gathered = all_gather_objects(problem, group)
    # Another checkpoint helps against damage only, so other errors come first.
    problems = sorted(filter(None, gathered), key=lambda problem: problem[0] is DamagedCheckpoint)
    if problems:
        (kind, text), *others = problems
        more = f" ({counted(len(others), 'more rank')} failed)" if others else ""
        raise kind(text + more) from cause
    return result  # type: ignore[return-value]


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Every rank's value in rank order, on every rank."""
    if group.size == 1 or group.pg is None:
        return [value]
    local, sizes = _padded(value, group)
    return [unpack(row[:size]) for row, size in zip(all_gather(local[None], group, dim=0), sizes, strict=True)]


def gather_objects(value: T, group: Group) -> list[T]:
    """Every rank's value in rank order on the group's first rank, an empty list on the others."""
    if group.size == 1:
        return [value]
    local, sizes = _padded(value, group)
    rows = [torch.empty_like(local) for _ in sizes] if group.is_first else None
    with communicating("gather", group):
        dist.gather(local, rows, dst=group.ranks[0], group=group.pg)
    return [unpack(row[:size]) for row, size in zip(rows, sizes, strict=True)] if rows else []


def pack(value: Any, group: Group) -> Tensor:
    """The bytes of an object, on the device that the group's collectives need."""
    device = "cpu" if "cpu:" in dist.get_backend_config(group.pg) else "cuda"
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def unpack(packed: Tensor) -> Any:
    """The inverse of `pack`; raises UnpicklingError for a class that ranks do not send."""
    return _Unpickler(io.BytesIO(packed.cpu().numpy().tobytes())).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a data class of an imported module; an import by a name from the network would run code."""
        found = getattr(sys.modules.get(module), name, None) if module.startswith("megatron_lite.") else None
        data_class = found if isinstance(found, type) and found.__module__ == module else object
        if is_dataclass(data_class) or issubclass(data_class, (BaseModel, MegatronLiteError, tuple)):
            return data_class
        if module.startswith("pathlib") and name == "PosixPath":
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not a class that ranks send each other")


def _padded(value: Any, group: Group) -> tuple[Tensor, list[int]]:
    """This rank's bytes, padded to the longest in the group, and every rank's number of bytes."""
    packed = pack(value, group)
    sizes = all_gather(torch.tensor([packed.numel()], device=packed.device), group, dim=0).tolist()
    return torch.nn.functional.pad(packed, (0, max(sizes) - packed.numel())), sizes


def _attempt(work: Callable[[], T], group: Group) -> tuple[T | None, tuple[type, str] | None, Exception | None]:
    """Result, class and text of the error, and the error. One that escaped would leave the other ranks waiting, so
    errors of other libraries become TrainingErrors."""
    rank = group.ranks[group.rank]
    try:
        return work(), None, None
    except MegatronLiteError as error:
        return None, (type(error), f"rank {rank}: {error}"), error
    except Exception as error:
        return None, (TrainingError, f"rank {rank}: {type(error).__name__}: {error}"), error
