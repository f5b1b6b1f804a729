"""Fixtures for all tests. Test folders are packages, so that ranks can import the functions of a test module."""

import os

import pytest
from hypothesis import settings

from megatron_lite.launch.pool import Ranks

# The same examples on every run, and no deadline, because a busy machine is not a failure.
settings.register_profile("megatron_lite", deadline=None, derandomize=True)
settings.load_profile("megatron_lite")

# The files with the longest tests, in the order in which processes of pytest-xdist get them, each the next one.
LONGEST = (
    "test_slurm.py",
    "test_command_line.py",
    "test_docs.py",
    "test_faults.py",
    "test_quickstart.py",
    "test_training_watchdog.py",
    "test_two_hosts.py",
    "test_kill.py",
    "test_extending.py",
    "test_wheel.py",
    "test_launch.py",
    "test_convert.py",
    "test_launch_nodes.py",
    "test_ports.py",
    "test_doctor.py",
)


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each process start with some of the longest tests.

    `--dist worksteal` first gives each process an equal number of tests, in order. A long test at the end of such a
    part would leave the other processes idle.
    """
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = [[item for item in items if item.path.name == name] for name in LONGEST]
    others = [item for item in items if item.path.name not in LONGEST]
    ordered: list[pytest.Item] = []
    for worker in range(num_workers):
        size = (len(items) - len(ordered)) // (num_workers - worker)
        first = [item for tests in longest[worker::num_workers] for item in tests]
        num_others = max(0, size - len(first))
        ordered += first + others[:num_others]
        del others[:num_others]
    items[:] = ordered + others


@pytest.fixture(scope="session")
def ranks():
    """`ranks(2, function, *args)`: the results of function on two ranks; see `megatron_lite/launch/pool.py`."""
    pool = Ranks()
    yield pool
    pool.close()
