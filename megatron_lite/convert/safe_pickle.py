"""Reads the pickle of a torch file without running anything that it names.

A pickle may name any function of any module, and call it. Here a name is never looked up: the few that make a
tensor's description and plain containers are answered with our own, all others with `Inert`, a class whose objects take
whatever is done to them and do nothing. So nothing is imported, and of the file nothing but data gets in.
Source: https://docs.python.org/3/library/pickle.html, "Restricting Globals"; torch/serialization.py for the names.
"""

import pickle
from collections.abc import Callable, Iterable
from math import prod
from typing import IO, Any, ClassVar, NamedTuple

import torch


class Storage(NamedTuple):
    """A run of numbers in the file, on which tensors are views."""

    key: str
    dtype: torch.dtype
    numel: int


class StoredTensor(NamedTuple):
    """A tensor in the file: a view of `storage` from element `offset` on."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def span(self) -> int:
        """Elements from the first to the last one, both included."""
        return (
            1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) if prod(self.shape) else 0
        )

    @property
    def is_contiguous(self) -> bool:
        expected = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return all(n == 1 or got == want for n, got, want in zip(self.shape, self.stride, expected, strict=True))

    def narrow(self, dim: int, start: int, length: int) -> "StoredTensor":
        """As of a tensor."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self._replace(offset=self.offset + start * self.stride[dim], shape=shape)


class Inert:
    """What stands for any object that is not looked at."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    add = extend = append


class Dict(dict):
    """Any dict; what state dicts carry beside their items is left out."""

    def __init__(self, items: Iterable[tuple[Any, Any]] = ()):
        for key, value in items:
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        # Megatron-LM has tuples of dtypes as keys. Hashing nested pairs of one tuple takes 2 ** depth steps.
        if isinstance(key, tuple) and any(isinstance(part, tuple) for part in key):
            raise pickle.UnpicklingError("a key of a dict is a tuple of tuples")
        super().__setitem__(key, value)

    def __setstate__(self, state: Any) -> None:
        pass


class Namespace(Dict):
    """An argparse.Namespace, as its values by name."""

    def __setstate__(self, state: Any) -> None:
        self.update(Dict(state.items()))


DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


# The optimizer state of a large model has tens of thousands of items, ten deep.
MAX_ITEMS, MAX_DEPTH = 1 << 22, 100

# Python's own implementation, not the one in C: that one reserves memory for whatever number of objects a damaged byte
# asks for.
PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


def check_nesting(content: Any) -> None:
    """Raises UnpicklingError for containers in containers that would take forever to walk or to print.

    A list of twice the same list of twice the same list and so on is a short pickle, and 2 ** depth items.
    """
    left = MAX_ITEMS
    waiting = [iter((content,))]
    while waiting:
        for item in waiting[-1]:
            left -= 1
            if isinstance(item, dict | list | tuple) and not isinstance(item, StoredTensor):
                waiting.append(iter(item.values() if isinstance(item, dict) else item))
                break
        else:
            waiting.pop()
        if left < 0 or len(waiting) > MAX_DEPTH:
            raise pickle.UnpicklingError(f"its containers nest more than {MAX_DEPTH} deep, or repeat each other")


class Unpickler(PythonUnpickler):
    """`load` gives the pickle's content, with a `StoredTensor` for each tensor."""

    dispatch: ClassVar[dict[int, Callable]] = {**PythonUnpickler.dispatch}
    # What no torch file has: the one reserves as much memory as it says, the other makes integers of more than 255
    # bytes, which Python will not write down, be it as a name or in a message.
    del dispatch[pickle.BYTEARRAY8[0]], dispatch[pickle.LONG4[0]]

    def __init__(self, file: IO[bytes]):
        super().__init__(file, encoding="utf-8", errors="replace")
        self.storages: dict[str, Storage] = {}

    def load(self) -> Any:
        content = super().load()
        check_nesting(content)
        return content

    def load_empty_dictionary(self) -> None:
        self.append(Dict())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(Dict(zip(items[::2], items[1::2], strict=True)))

    def load_empty_set(self) -> None:
        self.append(Inert())

    def load_frozenset(self) -> None:
        self.pop_mark()
        self.append(Inert())

    dispatch[pickle.EMPTY_DICT[0]], dispatch[pickle.DICT[0]] = load_empty_dictionary, load_dict
    dispatch[pickle.EMPTY_SET[0]], dispatch[pickle.FROZENSET[0]] = load_empty_set, load_frozenset

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): Dict,
            ("argparse", "Namespace"): Namespace,
            ("torch", "Size"): tuple,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
        }
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        return known.get((module, name), Inert)

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, numel, *view = pid
        if not (type(kind) is type(key) is str):
            raise pickle.UnpicklingError("a storage has no name")
        if kind != "storage" or any(part is not None for part in view) or not (type(numel) is int and numel >= 0):
            raise pickle.UnpicklingError(f"{kind} {key} is not a plain storage")
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"storage {key} has an unknown number format")
        return self.storages.setdefault(key, Storage(key, dtype, numel))

    def load_build(self) -> None:
        # The original would set attributes of whatever it finds, of functions and classes too.
        if not isinstance(self.stack[-2], Inert | Dict | Namespace):
            raise pickle.UnpicklingError(f"it would change a {type(self.stack[-2]).__name__}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    @staticmethod
    def _tensor(storage: Storage, offset: int, shape: tuple, stride: tuple, *_: Any) -> StoredTensor:
        tensor = StoredTensor(storage, offset, tuple(shape), tuple(stride))
        numbers = (offset, *tensor.shape, *tensor.stride)
        if not (isinstance(storage, Storage) and all(type(number) is int and number >= 0 for number in numbers)):
            raise pickle.UnpicklingError("a tensor's description is no such")
        if offset + tensor.span > storage.numel or prod(shape) > storage.numel:
            raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} is larger than its storage")
        return tensor

    @staticmethod
    def _parameter(tensor: StoredTensor, *_: Any) -> StoredTensor:
        return tensor
