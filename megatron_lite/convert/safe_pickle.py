"""Pickles of others, decoded as plain data: no code that they name runs, and a stand-in for `pickle` in torch.load.

A pickle can name any function of any module and call it. Here no name is imported: tensors and plain containers have
counterparts in `ALLOWED`, a reader can add `Record`s, and every other name is `Inert`, a class whose objects accept any
operation and ignore it. Time and memory are bounded by the bytes of the pickle.
Source: https://docs.python.org/3/library/pickle.html, "Restricting Globals"; torch/serialization.py for the names.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any, ClassVar

from torch import Tensor
from torch._utils import _rebuild_tensor

from megatron_lite.parallel.dtypes import SAFETENSORS_NAMES

# The optimizer state of a large model has tens of thousands of items, ten deep.
MAX_ITEMS, MAX_DEPTH = 1 << 22, 100
MAX_KEY = 64  # parts of a key: the hash of a tuple is computed again wherever it is a key

# Python's implementation, because the one in C reserves memory for any number of objects that a damaged byte asks for.
PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


# Instructions call methods by name: ADDITEMS calls `add`, SETITEM assigns. So storages and tensors are wrapped.
@dataclass(frozen=True, eq=False)
class StoredStorage:
    """A storage of the file."""

    key: str
    numel: int
    storage: Any


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of the file, a view of the storage `key`."""

    key: str
    tensor: Tensor


class Inert:
    """The counterpart of any object that a reader does not need."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        return super().__new__(cls)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    add = extend = append


class Dict(dict):
    """The counterpart of any dict; the attributes of a state dict are left out."""

    def __init__(self, items: Iterable[tuple[Any, Any]] = ()):
        for key, value in items:
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        # Megatron-LM has tuples of dtypes as keys. Hashing nested pairs of one tuple takes 2 ** depth steps.
        if isinstance(key, tuple) and (len(key) > MAX_KEY or any(isinstance(part, tuple) for part in key)):
            raise pickle.UnpicklingError("a key of a dict is a tuple of tuples, or a long one")
        super().__setitem__(key, value)


class Namespace(Dict):
    """The counterpart of argparse.Namespace: its values by name."""


class Record:
    """The counterpart of an object of a class that a reader knows. Its state is plain data and is not interpreted."""

    state: Any = None

    def __new__(cls) -> "Record":
        return super().__new__(cls)

    def field(self, name: str, *types: type) -> Any:
        """A value of the state, of one of these types and not of a subclass."""
        value = self.state.get(name) if isinstance(self.state, Dict) else None
        if type(value) not in types:
            raise TypeError(f"{name} of {type(self).__name__} is a {type(value).__name__}")
        return value


def _tensor(
    stored: StoredStorage,
    offset: int,
    shape: tuple,
    stride: tuple,
    _grad: Any = None,
    _hooks: Any = None,
    bits: Any = None,
) -> StoredTensor:
    if bits:  # torch.load negates or conjugates the values
        raise pickle.UnpicklingError(f"a tensor is a view with {bits}; save its clone()")
    if not isinstance(stored, StoredStorage) or not len(shape) == len(stride) <= 64:
        raise pickle.UnpicklingError("a tensor has no storage, or no shape")
    if not all(type(number) is int and number >= 0 for number in (offset, *shape, *stride)):
        raise pickle.UnpicklingError("a tensor's shape is not of natural numbers")
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if prod(shape) else 0
    # A stride of 0 would let a file of a few bytes fill the memory.
    if offset + span > stored.numel or prod(shape) > stored.numel:
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} is larger than its storage")
    tensor = _rebuild_tensor(stored.storage, offset, tuple(shape), tuple(stride))
    return StoredTensor(stored.key, tensor)


def first(value: Any, *_: Any) -> Any:
    """The counterpart of a function that wraps its first argument."""
    return value


ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Dict,
    ("argparse", "Namespace"): Namespace,
    ("torch", "Size"): first,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): first,
}


def check_nesting(content: Any, max_items: int) -> None:
    """Raise UnpicklingError for nested containers that would take forever to walk or to print.

    A list of twice the same list of twice the same list and so on is a short pickle, and 2 ** depth items.
    """
    left = max_items
    waiting = [iter((content,))]
    while waiting:
        for item in waiting[-1]:
            left -= 1
            if isinstance(item, dict | list | tuple):
                waiting.append(iter(item.values() if isinstance(item, dict) else item))
                break
        else:
            waiting.pop()
        if left < 0 or len(waiting) > MAX_DEPTH:
            raise pickle.UnpicklingError(f"its containers nest more than {MAX_DEPTH} deep, or repeat each other")


class _Unpickler(PythonUnpickler):
    """`load` returns the content of a pickle, with a `StoredTensor` for each tensor."""

    module: ClassVar["SafePickle"]
    dispatch: ClassVar[dict[int, Callable]] = {**PythonUnpickler.dispatch}
    # No torch file has these: BYTEARRAY8 reserves memory before it reads, LONG4 makes integers too long to print,
    # extensions are objects that the process has imported, and PERSID is text. torch.load refuses DUP.
    unused = (pickle.BYTEARRAY8, pickle.LONG4, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.DUP)
    for opcode in (*unused, pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ):
        del dispatch[opcode[0]]

    def __init__(self, file: IO[bytes], **_: Any):
        super().__init__(file, encoding="utf-8", errors="replace")
        self._left = self.module.max_items

    def load(self) -> Any:
        content = super().load()
        check_nesting(content, self.module.max_items)
        return content

    def find_class(self, module: str, name: str) -> Any:
        return self.module.allowed.get((module, name), Inert)

    def _count(self, items: Any) -> None:
        # Passing one tuple of a million arguments a million times is a short pickle.
        self._left -= 1 + len(items)
        if self._left < 0:
            raise pickle.UnpicklingError("its objects have more arguments and values than it can hold")

    def load_reduce(self) -> None:
        self._count(self.stack[-1])
        super().load_reduce()

    def load_newobj(self) -> None:
        self._count(self.stack[-1])
        super().load_newobj()

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(Dict(zip(items[::2], items[1::2], strict=True)))

    def load_frozenset(self) -> None:
        self.pop_mark()
        self.append(Inert())

    def load_build(self) -> None:
        # Python's own would set attributes of any object, of functions and classes too.
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif isinstance(target, Namespace):
            self._count(state)
            target.update(Dict(state.items()))
        elif not isinstance(target, Inert | Dict):
            raise pickle.UnpicklingError(f"it would change a {type(target).__name__}")

    def load_storage(self) -> None:
        # torch.load sets `persistent_load`.
        self.append(self.module.stored_storage(self.stack.pop(), self.persistent_load))

    dispatch |= {
        pickle.EMPTY_DICT[0]: lambda self: self.append(Dict()),
        pickle.DICT[0]: load_dict,
        pickle.EMPTY_SET[0]: lambda self: self.append(Inert()),
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BUILD[0]: load_build,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BINPERSID[0]: load_storage,
    }


class SafePickle:
    """The `pickle_module` of one call of torch.load.

    `records` has the bytes of each record of a zip archive; older files have none.
    """

    __name__ = "safe_pickle"  # torch.load reads it

    def __init__(
        self,
        file_bytes: int,
        records: Mapping[str, int] | None,
        allowed: Mapping[tuple[str, str], Any] = ALLOWED,
        pickle_bytes: int = 0,
    ):
        self.Unpickler = type("Unpickler", (_Unpickler,), {"module": self})
        self.allowed, self.max_items = allowed, max(MAX_ITEMS, pickle_bytes)
        self._storages: dict[str, StoredStorage] = {}
        self._bytes_left, self._records = file_bytes, records

    def load(self, file: IO[bytes], **_: Any) -> Any:
        """The facts around the content of a file from before torch 1.6: numbers, a dict and the keys of storages."""
        content = self.Unpickler(file).load()
        if isinstance(content, list | tuple) and not (
            all(type(key) is str for key in content) and set(content) == self._storages.keys()
        ):
            raise pickle.UnpicklingError("the keys of its storages are not those of its tensors")
        return content

    def stored_storage(self, pid: Any, persistent_load: Callable[[Any], Any]) -> StoredStorage:
        """The storage that a persistent id describes, if the file has as many bytes."""
        kind, storage_type, key, location, numel, *view = pid
        if not type(kind) is type(key) is type(location) is str:
            raise pickle.UnpicklingError("a storage has no name")
        if kind != "storage" or any(part is not None for part in view) or not (type(numel) is int and numel >= 0):
            raise pickle.UnpicklingError(f"{kind} {key} is not a plain storage")
        dtype = getattr(storage_type, "dtype", None)
        if dtype not in SAFETENSORS_NAMES:
            raise pickle.UnpicklingError(f"storage {key} has an unknown dtype")
        if key not in self._storages:
            size = numel * dtype.itemsize
            self._bytes_left -= size
            limit = self._bytes_left + size if self._records is None else self._records.get(f"data/{key}", 0)
            if size > limit or self._bytes_left < 0:
                raise pickle.UnpicklingError(f"storage {key} has {size:,} bytes, the file has {limit:,} for it")
            self._storages[key] = StoredStorage(key, numel, persistent_load(pid))
        return self._storages[key]


def decode(data: bytes, records: Mapping[tuple[str, str], Any]) -> Any:
    """The content of a pickle that has no tensors, with a `Record` for each object of a class in `records`."""
    allowed = {("collections", "OrderedDict"): Dict, ("torch", "Size"): first, **records}
    # In memory: a file would reserve as many bytes as a damaged length asks for.
    return SafePickle(0, None, allowed, len(data)).Unpickler(io.BytesIO(data)).load()
