"""Fixtures for all tests. Test folders are packages, so that ranks can import the functions of a test module."""

import pytest
from hypothesis import settings

from megatron_lite.launch.pool import Ranks

# The same examples on every run, and no deadline, because a busy machine is not a failure.
settings.register_profile("megatron_lite", deadline=None, derandomize=True)
settings.load_profile("megatron_lite")

# The files with the longest tests start first. At the end they would leave other processes idle for minutes.
LONGEST = (
    "test_slurm.py",
    "test_two_hosts.py",
    "test_docs.py",
    "test_quickstart.py",
    "test_wheel.py",
    "test_extending.py",
    "test_kill.py",
    "test_faults.py",
    "test_command_line.py",
    "test_training_watchdog.py",
    "test_launch_nodes.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def ranks():
    """`ranks(2, function, *args)`: the results of function on two ranks; see `megatron_lite/launch/pool.py`."""
    pool = Ranks()
    yield pool
    pool.close()
