"""Fixtures of all tests, their tiers and order. Test folders are packages: ranks import the functions of tests."""

import gc
import random
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers import covered, session, warm

# The same examples on every run, and no deadline, because a busy machine is not a failure.
settings.register_profile("megatron_lite", deadline=None, derandomize=True, database=None)
settings.load_profile("megatron_lite")

# Imports and collection make many objects that stay; the collector would walk them again and again, for seconds.
gc.disable()

LINT = Path(__file__).parent / "lint"


def pytest_addoption(parser: pytest.Parser) -> None:
    session.add_options(parser)
    parser.addoption("--ranks-timeout", type=float, default=120.0, help="seconds until ranks of a test count as hung")
    parser.addoption("--record-lines", metavar="FOLDER", help="record into FOLDER which test runs which line")


def pytest_configure(config: pytest.Config) -> None:
    session.follow(config)
    if folder := config.getoption("--record-lines"):
        covered.record_into(config, folder)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the checks of the repository, and put the files that take longest first.

    With `--dist loadfile`, a process that is free gets the next file. So those that run last are short.
    """
    for item in items:
        if LINT in item.path.parents:
            item.add_marker("lint")
    items[:] = session.chosen(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed all random numbers: those of a test must not depend on the tests before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["numpy"].random.seed(0)
        sys.modules["torch"].manual_seed(0)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config):
    """`ranks(2, function, *args)`: the results of function on two ranks; see `megatron_lite/launch/pool.py`."""
    from megatron_lite.launch.pool import Ranks

    warm.start_server()
    pool = Ranks(pytestconfig.getoption("--ranks-timeout"))
    yield covered.RecordedRanks(pool) if pytestconfig.getoption("--record-lines") else pool
    pool.close()
