"""Fixtures for all tests. Test modules are packages (`tests.dist.test_x`), so that ranks can import their functions."""

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """`ranks(2, function, *args)`: the results of function on two ranks; see `tests/ranks.py`."""
    pool = Ranks()
    yield pool
    pool.close()
