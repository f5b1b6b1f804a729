"""Many small cases in one test: all of them run, and the error lists each one that failed.

As a test of its own, a case of microseconds would cost a millisecond or more of pytest.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def all_cases() -> Iterator[Callable[..., AbstractContextManager[None]]]:
    """Run `with case(NAME): CHECKS` for each case; at the end, raise an error that lists those that failed."""
    failed: list[str] = []

    @contextmanager
    def case(*name: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:  # `pytest.raises` fails with the second one
            places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
            place = f"{places[0].filename}:{places[0].lineno}" if places else "?"
            words = ", ".join(each if isinstance(each, str) else repr(each) for each in name)
            failed.append(f"{words}\n    {place}: {type(error).__name__}: {error}")

    yield case
    if failed:
        pytest.fail("\n".join([f"{len(failed)} cases failed:", *failed]), pytrace=False)
