"""Index arrays built once and memory-mapped by every process of a machine.

File names contain a hash of everything that the arrays depend on, and an atomic rename creates each file. So several
processes may build at once, also on machines that share a disk; the lock only avoids duplicate work. A .json file with
checksums is written last. If it is missing, or an array does not match it, the index is built again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.errors import DataError
from megatron_lite.files import atomic_write, not_through_links, read_file
from megatron_lite.text import parse_strictly

MAX_ENTRIES = 1 << 58  # for more entries, NumPy's count of bytes overflows

Check = Callable[[Mapping[str, np.ndarray], Mapping[str, int]], bool]  # of arrays and their checksums


def compare_checksums(arrays: Mapping[str, np.ndarray], checksums: Mapping[str, int]) -> bool:
    """Read all arrays: seconds for the index of a long run."""
    return all(zlib.crc32(np.ascontiguousarray(values).data) == checksums[name] for name, values in arrays.items())


def trust_checksums(arrays: Mapping[str, np.ndarray], checksums: Mapping[str, int]) -> bool:
    """For arrays that another process of this machine has compared."""
    return True


def cached_arrays(
    cache_dir: str | os.PathLike[str],
    name: str,
    description: Mapping[str, Any],
    dims: Mapping[str, int],
    build: Callable[[], Mapping[str, np.ndarray]],
    check: Check = compare_checksums,
) -> dict[str, np.ndarray]:
    """The arrays of `build()`, memory-mapped from `cache_dir`; built only if they are missing or damaged.

    `description` contains everything that the arrays depend on; its hash is in the file names. `dims` has the number of
    dimensions of each array of integers. `check` is of arrays that are present. `index_errors` is for reads: others may
    have written the values.
    """
    text = json.dumps(description, sort_keys=True, indent=1)
    stem = Path(cache_dir) / f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-{name}"
    if (arrays := _load(stem, dims, check)) is not None:
        return arrays
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{stem}.lock", "a", opener=not_through_links) as lock:
            # Some network file systems have no locks; then several processes build the same bytes.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have built the index while this one waited for the lock.
            if (arrays := _load(stem, dims, compare_checksums)) is None:
                _save(stem, text, build())
                arrays = _load(stem, dims, compare_checksums)
    except OSError as error:
        raise DataError(
            f"{stem.parent}: index cannot be written ({error.strerror or error}); set data.cache_dir to another folder"
        ) from error
    assert arrays is not None, f"{stem}: an index that was just written cannot be read"
    return arrays


@contextlib.contextmanager
def memory_for(owner: str, *, num_samples: int, num_entries: int) -> Iterator[None]:
    """A context that builds an index of `num_entries`; a lack of memory becomes a DataError that names `owner`."""
    try:
        if num_entries > MAX_ENTRIES:
            raise MemoryError(f"{num_entries:,} entries")
        yield
    except MemoryError as error:
        raise DataError(
            f"{owner}: no memory for the index of {num_samples:,} samples ({error}); lower train.iterations or, for an "
            "evaluation, train.eval_iterations"
        ) from error


@contextlib.contextmanager
def index_errors(owner: str) -> Iterator[None]:
    """A context that reads an index; a place out of range becomes a DataError."""
    try:
        yield
    except (IndexError, ValueError) as error:
        raise DataError(
            f"{owner}'s index in cache/ or data.cache_dir names places that are not there; delete it"
        ) from error


def _save(stem: Path, description: str, arrays: Mapping[str, np.ndarray]) -> None:
    checksums = {}
    for name, values in arrays.items():
        values = np.ascontiguousarray(values)
        save = partial(np.save, arr=values, allow_pickle=False)
        atomic_write(Path(f"{stem}-{name}.npy"), save, durable=False)
        checksums[name] = zlib.crc32(values.data)
    content = json.dumps({"description": json.loads(description), "crc32": checksums}, indent=1)
    atomic_write(Path(f"{stem}.json"), content, durable=False)


def _load(stem: Path, dims: Mapping[str, int], check: Check) -> dict[str, np.ndarray] | None:
    """The arrays, or None if one of them is missing or damaged."""
    try:
        checksums = parse_strictly(read_file(f"{stem}.json"))["crc32"]
        paths = {name: Path(f"{stem}-{name}.npy") for name in dims}
        if not all(path.is_file() for path in paths.values()):  # NumPy would wait for a pipe
            return None
        arrays = {name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in paths.items()}
        right = all(values.ndim == dims[name] and values.dtype.kind in "iu" for name, values in arrays.items())
        intact = right and check(arrays, checksums)
    except Exception:  # NumPy parses the header of an array as Python
        return None
    return arrays if intact else None
