"""Fixtures for all tests. Test folders are packages, so that ranks can import the functions of a test module."""

import pytest
from hypothesis import settings

from megatron_lite.launch.pool import Ranks

# The same examples on every run, and no deadline, because a busy machine is not a failure.
settings.register_profile("megatron_lite", deadline=None, derandomize=True)
settings.load_profile("megatron_lite")


@pytest.fixture(scope="session")
def ranks():
    """`ranks(2, function, *args)`: the results of function on two ranks; see `megatron_lite/launch/pool.py`."""
    pool = Ranks()
    yield pool
    pool.close()
