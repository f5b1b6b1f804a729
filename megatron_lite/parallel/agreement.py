"""All ranks continue, or all raise the same error, so that no rank waits for one that failed.

Objects travel as pickles, through the store of the process group (`messages.py`). Bytes from a network are not trusted:
only plain data and data classes of this package are unpickled, unlike in torch's collectives of objects.
"""

import hashlib
import io
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from megatron_lite.errors import DamagedCheckpoint, MegatronLiteError, TrainingError
from megatron_lite.parallel.collectives import all_reduce, broadcast
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.messages import Exchange
from megatron_lite.parallel.waiting import trains_here
from megatron_lite.text import counted

T = TypeVar("T")
LARGE_BYTES = 1 << 16  # of a result: more goes around the store, which one process serves


def on_first(work: Callable[[], T], group: Group) -> T:
    """The result or error of `work`, which only the group's first rank calls, on every rank.

    The others wait without a deadline while its heartbeat comes. Callable in a background thread.
    Communicates: the result through the store; a large one in a broadcast over the group.
    """
    if group.size == 1:
        return work()
    exchange, cause = Exchange(group, "on_first"), None
    if group.is_first:
        with exchange.working():
            result, problem, cause = _attempt(work, group)
        content = pickle.dumps((result, problem))
        is_large = len(content) > LARGE_BYTES and trains_here()
        exchange.publish(b"%d" % len(content) if is_large else b"=" + content)
        if is_large:
            broadcast(_on_device(content, group), group, src=0)
    else:
        content = exchange.published()
        if not content.startswith(b"="):
            content = broadcast(_on_device(bytes(int(content)), group), group, src=0).cpu().numpy().tobytes()
            content = b"=" + content
        result, problem = unpack(content[1:])
    if problem is not None:
        raise _error(problem) from cause
    return result  # type: ignore[return-value]


def on_all(work: Callable[[], T], group: Group) -> T:
    """This rank's result of `work`, which every rank calls; returns when all ranks have finished.

    Ranks that have finished wait without a deadline while the heartbeat of another one comes. If the work fails
    anywhere, every rank raises the error of the lowest failed rank; damage comes last. Callable in a background thread.
    Communicates: the number of failed ranks through the store, and errors if there are any.
    """
    if group.size == 1:
        return work()
    exchange = Exchange(group, "on_all")
    with exchange.working():
        result, problem, cause = _attempt(work, group)
    exchange.leave(pickle.dumps(problem) if problem else b"", is_problem=problem is not None)
    if exchange.all_left():
        # Another checkpoint helps against damage only, so other errors come first.
        problems = [unpack(each) for each in exchange.messages() if each]
        (kind, text, attributes), *others = sorted(problems, key=lambda problem: problem[0] is DamagedCheckpoint)
        more = f" ({counted(len(others), 'more rank')} failed)" if others else ""
        raise _error((kind, text + more, attributes)) from cause
    return result  # type: ignore[return-value]


def same(value: Any, group: Group) -> bool:
    """Whether the values of all ranks are equal, on every rank. `value` has a JSON form.

    Communicates: two integers, the smallest and the largest hash.
    """
    if group.size == 1:
        return True
    text = json.dumps(value, sort_keys=True, default=str).encode()
    hashed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    device = _on_device(b"", group).device
    largest, smallest = all_reduce(torch.tensor([hashed, -hashed], device=device), group, "max").tolist()
    return largest == -smallest


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Every rank's value in rank order, on every rank: for small groups, or values of ranks that differ."""
    if group.size == 1 or group.pg is None:
        return [value]
    exchange = Exchange(group, "all_gather_objects")
    exchange.leave(pickle.dumps(value))
    return [unpack(each) for each in exchange.messages()]


def gather_objects(value: T, group: Group) -> list[T]:
    """Every rank's value in rank order on the group's first rank, an empty list on the others.

    The first rank gets the bytes of all pickles, without padding.
    """
    if group.size == 1:
        return [value]
    exchange = Exchange(group, "gather_objects")
    exchange.leave(pickle.dumps(value))
    return [unpack(each) for each in exchange.messages()] if group.is_first else []


def _on_device(content: bytes, group: Group) -> Tensor:
    """Bytes on the device that the group's collectives need."""
    device = "cpu" if "cpu:" in dist.get_backend_config(group.pg) else "cuda"
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)).to(device)


def unpack(pickled: bytes) -> Any:
    """The object that another rank has pickled; raises UnpicklingError for a class that ranks do not send."""
    return _Unpickler(io.BytesIO(pickled)).load()


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


Problem = tuple[type, str, dict[str, Any]]
"""Class, text and attributes of an error."""


def _attempt(work: Callable[[], T], group: Group) -> tuple[T | None, Problem | None, Exception | None]:
    """Result, problem and error. An error that escaped would leave the other ranks waiting, so errors of other
    libraries become TrainingErrors."""
    rank = group.ranks[group.rank]
    try:
        return work(), None, None
    except MegatronLiteError as error:
        return None, (type(error), f"rank {rank}: {error}", vars(error)), error
    except Exception as error:
        return None, (TrainingError, f"rank {rank}: {type(error).__name__}: {error}", {}), error


def _error(problem: Problem) -> MegatronLiteError:
    kind, text, attributes = problem
    error = kind(text)
    vars(error).update(attributes)
    return error
