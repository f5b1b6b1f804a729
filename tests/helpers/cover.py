"""A few cases of a long list that have everything the whole list has: each feature and each pair of features.

Most mistakes need one or two features to show (Kuhn, Wallace and Gallo, Software Fault Interactions and Implications
for Software Testing, IEEE TSE 30, 2004). `make test` runs the cover, and `make soak` the other cases.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def pairs(features: Iterable[str]) -> set[Hashable]:
    """All features of a case, and all pairs of them."""
    names = sorted(set(features))
    return {*names, *combinations(names, 2)}


def cover(
    cases: Sequence[Case], parts: Callable[[Case], set[Hashable]], cost: Callable[[Case], float] = lambda case: 1.0
) -> list[int]:
    """The positions, in order, of cases that together have all `parts` of all cases; greedy, so not the fewest."""
    found = [parts(case) for case in cases]
    missing = set().union(*found)
    gain = {position: len(own) / cost(cases[position]) for position, own in enumerate(found)}
    chosen = []
    while missing:
        best = max(gain, key=gain.__getitem__)
        new = len(found[best] & missing) / cost(cases[best])
        if new < gain[best]:  # others were chosen since; no case gains parts, so the largest sum stays an upper bound
            gain[best] = new
            continue
        chosen.append(best)
        missing -= found[best]
        del gain[best]
    return sorted(chosen)


def in_tiers(
    cases: Sequence[Any],
    parts: Callable[[Any], set[Hashable]],
    cost: Callable[[Any], float] = lambda case: 1.0,
    name: Callable[[Any], str | None] = lambda case: " ".join(case) if isinstance(case, tuple) else None,
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: the cases in order, those outside of the cover for `make soak` only."""
    kept = set(cover(cases, parts, cost))
    marks = [() if position in kept else pytest.mark.soak for position in range(len(cases))]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark, id=name(case))
        for case, mark in zip(cases, marks, strict=True)
    ]
