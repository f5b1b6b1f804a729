"""Attention masks as values.

With each mask of this project a query sees one range of keys. A causal mask ends the range at the query, a sliding
window begins it near the query, documents begin and end it at their borders, and padding ends it at the last real
token. The intersection of ranges is a range, so all masks compose. An implementation of attention needs the start and
the end of each query's range. Both grow along the sequence, so it can skip the keys outside the ranges of a block of
queries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError, DataError

Cached = TypeVar("Cached")


class Rectangle(NamedTuple):
    """Queries `q0 <= query < q1` of a sequence and the keys `k0 <= key < k1` that they see; if `causal`, the two ranges
    are equal and a query sees no later key."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


class KeyRanges(NamedTuple):
    """The keys `first <= key < end` that each query sees, none where `end <= first`.

    Both are int32 [b, s], or [1, s] where all sequences have the same, and do not decrease along s.
    """

    first: Tensor
    end: Tensor


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys that a query sees: those that every given condition allows.

        causal      not after the query
        window      the largest number of keys on each side of the query, the query's own key included; 0: no limit
        lengths     int [b]: only the first `lengths[row]` keys of a row; the others are padding
        documents   int [b, s]: only keys of the query's document; ids do not decrease along a row

    A query without any key has output 0 and a log-sum-exp of -inf.
    `causal`, `window` and `documents` compare positions, so they need as many queries as keys.
    """

    causal: bool = True
    window: int = 0
    lengths: Tensor | None = None
    documents: Tensor | None = None
    _cache: dict[str, tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ConfigError(f"the window of a mask is {self.window}; use 0 for none, or a positive number of keys")
        documents = self.documents
        # On a GPU the comparison would wait for all kernels in the queue.
        if documents is not None and documents.device.type == "cpu" and (documents.diff(dim=1) < 0).any():
            raise DataError("document ids decrease along a sequence; number the documents of a row in their order")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The conditions of this mask; `full` if there are none."""
        given = {
            "causal": self.causal,
            "window": self.window > 0,
            "lengths": self.lengths is not None,
            "documents": self.documents is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given) or ("full",)

    def with_window(self, window: int) -> "Mask":
        """This mask with another window, the same object in every call."""
        if window == self.window:
            return self
        return self.cached(f"window {window}", (), lambda: replace(self, window=window))

    def narrowed(self, window: int) -> "Mask":
        """This mask with this window too; 0 is none."""
        return self if window == 0 or 0 < self.window <= window else self.with_window(window)

    def ranges(self, num_queries: int, num_keys: int, device: torch.device) -> KeyRanges:
        """The range of keys of each query. It is computed once for all layers that share this mask."""
        key = (num_queries, num_keys, device)
        return self.cached("ranges", key, lambda: self._ranges(num_queries, num_keys, device))

    def _ranges(self, num_queries: int, num_keys: int, device: torch.device) -> KeyRanges:
        self._check_sizes(num_queries, num_keys)
        query = torch.arange(num_queries, dtype=torch.int32, device=device)[None]
        first, end = torch.zeros_like(query), torch.full_like(query, num_keys)
        if self.causal:
            end = query + 1
        if self.window:
            first = (query - (self.window - 1)).clamp(min=0)
            end = end.minimum(query + self.window)
        if self.documents is not None:
            # Document ids do not decrease, so a search finds the borders of each query's document.
            documents = self.documents.contiguous()
            first = first.maximum(torch.searchsorted(documents, documents, out_int32=True))
            end = end.minimum(torch.searchsorted(documents, documents, out_int32=True, right=True))
        if self.lengths is not None:
            end = end.minimum(self.lengths.to(torch.int32)[:, None])
        rows = max(len(first), len(end))
        return KeyRanges(first.expand(rows, -1).contiguous(), end.expand(rows, -1).contiguous())

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """The mask as a bool tensor, [b, 1, s, s] or [1, 1, s, s]: True where a query sees a key."""
        first, end = self.ranges(num_queries, num_keys, device)
        key = torch.arange(num_keys, dtype=torch.int32, device=device)
        return ((first[..., None] <= key) & (key < end[..., None]))[:, None]

    def rectangles(self, num_queries: int, num_keys: int) -> list[list[Rectangle]]:
        """The rectangles of a mask without a window, in order of the queries: a list for each row.

        On a GPU the first call waits for the document ids.
        """
        assert not self.window
        key = (num_queries, num_keys)
        return self.cached("rectangles", key, lambda: self._rectangles(num_queries, num_keys))

    def _rectangles(self, num_queries: int, num_keys: int) -> list[list[Rectangle]]:
        self._check_sizes(num_queries, num_keys)
        documents = [[num_queries]] if self.documents is None else [_sizes(row) for row in self.documents.cpu()]
        lengths = [num_keys] if self.lengths is None else self.lengths.tolist()
        return [
            list(self._rectangles_of(documents[row % len(documents)], num_keys, lengths[row % len(lengths)]))
            for row in range(max(len(documents), len(lengths)))
        ]

    def _rectangles_of(self, document_sizes: list[int], num_keys: int, length: int) -> Iterator[Rectangle]:
        start = 0
        for size in document_sizes:
            stop = start + size
            last_key = min(stop if self.documents is not None else num_keys, length)
            middle = max(start, min(stop, last_key)) if self.causal else start
            if middle > start:
                yield Rectangle(start, middle, start, middle, True)
            if stop > middle:  # padding sees all keys of its document, in a causal mask too
                yield Rectangle(middle, stop, start, max(start, last_key), False)
            start = stop

    def cached(self, name: str, key: tuple[object, ...], compute: Callable[[], Cached]) -> Cached:
        """The result of `compute`, which follows from this mask and `key`. The newest result of each name is kept."""
        if name not in self._cache or self._cache[name][0] != key:
            self._cache[name] = (key, compute())
        return self._cache[name][1]

    def _check_sizes(self, num_queries: int, num_keys: int) -> None:
        if num_queries != num_keys and self.kinds not in (("full",), ("lengths",)):
            kinds = ", ".join(self.kinds)
            raise DataError(f"a mask with {kinds} needs as many queries as keys; got {num_queries} and {num_keys}")
        if self.documents is not None and self.documents.shape[1] != num_queries:
            raise DataError(
                f"a sequence has {num_queries} tokens, and {self.documents.shape[1]} document ids; give one for each"
            )

    def check_batch(self, batch: int) -> None:
        """Raise DataError unless documents and lengths are those of this many rows."""
        for name, given in (("document ids", self.documents), ("lengths", self.lengths)):
            if given is not None and len(given) != batch:
                raise DataError(f"a batch has {batch} rows, and its mask has {name} for {len(given)}; give all rows")


def _sizes(documents: Tensor) -> list[int]:
    """The number of tokens of each document of a row."""
    return documents.unique_consecutive(return_counts=True)[1].tolist()


CAUSAL = Mask()
