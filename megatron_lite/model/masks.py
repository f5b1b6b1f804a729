"""Attention masks as values.

With each mask of this project a query sees one range of keys. A causal mask ends the range at the query, a sliding
window begins it near the query, documents begin and end it at their borders, and padding ends it at the last real
token. The intersection of ranges is a range, so all masks compose. An implementation of attention needs the start and
the end of each query's range. Both grow along the sequence, so it can skip the keys outside the ranges of a block of
queries.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError, DataError

Cached = TypeVar("Cached")


class Rectangle(NamedTuple):
    """Queries `q0 <= query < q1` and the keys `k0 <= key < k1` that they see. If `causal`, both ranges have one length,
    and the first query sees one key, the next one two, and so on."""

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
    `causal`, `window` and `documents` compare positions, so without `part` they need as many queries as keys.
    """

    causal: bool = True
    window: int = 0
    lengths: Tensor | None = None
    documents: Tensor | None = None
    queries: Tensor | None = None  # of `part`
    keys: Tensor | None = None
    _cache: dict[str, tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ConfigError(f"the window of a mask is {self.window}; use 0 for none, or a positive number of keys")
        documents = self.documents
        # On a GPU the comparison would wait for all kernels in the queue.
        if documents is not None and documents.device.type == "cpu" and (documents.diff(dim=1) < 0).any():
            raise DataError("document ids decrease along a sequence; number the documents of a row in their order")

    def part(self, queries: Tensor, keys: Tensor | None = None) -> "Mask":
        """The mask of some queries and keys of the sequence, given by their positions.

        queries   int32 [b, s_q] or [1, s_q]; they do not decrease along s_q
        keys      int32 [s_k], increasing; None: the first keys of the sequence
        """
        return replace(self, queries=queries, keys=keys)

    @property
    def is_part(self) -> bool:
        """Whether this is the mask of some queries and keys of a sequence."""
        return self.queries is not None

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
        if self.queries is not None:
            query = self.queries.to(device)
        first, end = torch.zeros_like(query), torch.full_like(query, torch.iinfo(torch.int32).max)
        if self.causal:
            end = query + 1
        if self.window:
            first = (query - (self.window - 1)).clamp(min=0)
            end = end.minimum(query + self.window)
        if self.documents is not None:
            # Document ids do not decrease, so a search finds the borders of each query's document.
            documents = self.documents.contiguous()
            of_query = documents.gather(1, query.long().expand(len(documents), -1)) if self.is_part else documents
            first = first.maximum(torch.searchsorted(documents, of_query, out_int32=True))
            end = end.minimum(torch.searchsorted(documents, of_query, out_int32=True, right=True))
        if self.lengths is not None:
            end = end.minimum(self.lengths.to(torch.int32)[:, None])
        if self.keys is not None:  # from positions in the sequence to numbers of keys
            keys = self.keys.to(device)
            first, end = (torch.searchsorted(keys, x.contiguous(), out_int32=True) for x in (first, end))
        end = end.clamp(max=num_keys)
        rows = max(first.shape[0], end.shape[0])
        return KeyRanges(first.expand(rows, -1).contiguous(), end.expand(rows, -1).contiguous())

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """The mask as a bool tensor, [b, 1, s, s] or [1, 1, s, s]: True where a query sees a key."""
        first, end = self.ranges(num_queries, num_keys, device)
        key = torch.arange(num_keys, dtype=torch.int32, device=device)
        return ((first[..., None] <= key) & (key < end[..., None]))[:, None]

    def rectangles(self, num_queries: int, num_keys: int, device: torch.device) -> list[list[Rectangle]]:
        """The rectangles of a mask without a window, in order of the queries: a list for each row. A query is in two of
        them where earlier keys precede the causal square of its neighbours.

        On a GPU the first call waits for the ranges.
        """
        key = (num_queries, num_keys)
        return self.cached("rectangles", key, lambda: self._rectangles(num_queries, num_keys, device))

    def _rectangles(self, num_queries: int, num_keys: int, device: torch.device) -> list[list[Rectangle]]:
        first, end = (x.cpu() for x in self.ranges(num_queries, num_keys, device))
        return [list(_rectangles_of(*row)) for row in zip(first, end, strict=True)]

    def cached(self, name: str, key: tuple[object, ...], compute: Callable[[], Cached]) -> Cached:
        """The result of `compute`, which follows from this mask and `key`. The newest result of each name is kept."""
        if torch.compiler.is_exporting():  # its tensors have no values
            return compute()
        if name not in self._cache or self._cache[name][0] != key:
            self._cache[name] = (key, compute())
        return self._cache[name][1]

    def _check_sizes(self, num_queries: int, num_keys: int) -> None:
        if self.is_part:
            return
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


def _rectangles_of(first: Tensor, end: Tensor) -> Iterator[Rectangle]:
    """The rectangles of the ranges [s] of one row."""
    num_queries = len(first)
    # Queries whose ranges begin together and end at one key, or each one key later, form a rectangle.
    same_first = first.diff() == 0
    is_constant, grows = same_first & (end.diff() == 0), same_first & (end.diff() == 1)
    start = 0
    starts, ends = first.tolist(), end.tolist()
    breaks = {name: (~x).nonzero().flatten().tolist() for name, x in (("constant", is_constant), ("grows", grows))}
    while start < num_queries:
        causal = start + 1 < num_queries and bool(grows[start])
        borders = breaks["grows" if causal else "constant"]
        at = bisect_left(borders, start)
        stop = borders[at] + 1 if at < len(borders) else num_queries
        k0, k1 = starts[start], max(ends[start], starts[start])
        if not causal:
            yield Rectangle(start, stop, k0, k1, False)
        elif k1 <= k0:  # the first query sees nothing, so the square would begin one key early
            stop = start + 1
            yield Rectangle(start, stop, k0, k0, False)
        else:
            if k1 - 1 > k0:
                yield Rectangle(start, stop, k0, k1 - 1, False)
            yield Rectangle(start, stop, k1 - 1, k1 - 1 + stop - start, True)
        start = stop


CAUSAL = Mask()
FULL = Mask(causal=False)
