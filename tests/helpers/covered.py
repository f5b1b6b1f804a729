"""Which lines of the package each test runs: in its process, in ranks, in commands and launchers that it starts.

`pytest --record-lines FOLDER` writes data files of `coverage` into FOLDER; `lines_of` reads them. The context of a line
is the test, as in PYTEST_CURRENT_TEST. A line of a shared fixture belongs to all tests of its file.
"""

import atexit
import os
from collections import defaultdict
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "MEGATRON_LITE_RECORD_LINES"
# A folder with a sitecustomize.py, which Python imports at its start: also cold commands are recorded.
SITE = str(Path(__file__).parent / "site")
_recorder: Any = None


def start(test: str) -> None:
    """Record this process from now on, for `test`; a process that already records switches to it."""
    global _recorder
    import coverage

    if _recorder is None:
        folder = os.environ[FOLDER]
        _recorder = coverage.Coverage(
            data_file=f"{folder}/lines", data_suffix=True, source=[str(ROOT / "megatron_lite")], config_file=False
        )
        _recorder.set_option("run:disable_warnings", ["no-data-collected"])  # tests compare the error output
        _recorder.start()
        atexit.register(save)
        util.register_after_fork(_recorder, _in_fork)
    _recorder.switch_context(test)


def save() -> None:
    """Write what this process has recorded."""
    if _recorder is not None:
        _recorder.stop()
        _recorder.save()
        _recorder.start()


def _in_fork(_: object) -> None:
    """A rank that a launcher has forked: a file of its own, written at its end."""
    global _recorder
    _recorder = None
    start(current_test())
    util.Finalize(None, save, exitpriority=100)


def current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "")


class _Recorded:
    """A function that records its lines for a test, in a rank."""

    def __init__(self, function: Callable[..., Any], folder: str, test: str):
        self.function, self.folder, self.test = function, folder, test
        self.__name__ = getattr(function, "__name__", "partial")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        os.environ[FOLDER] = self.folder
        start(self.test)
        try:
            return self.function(*args, **kwargs)
        finally:
            save()  # a pool kills its ranks


class RecordedRanks:
    """A pool whose ranks record their lines for the current test."""

    def __init__(self, pool: Callable[..., list[Any]]):
        self.pool = pool

    def __call__(self, size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self.pool(size, _Recorded(function, os.environ[FOLDER], current_test()), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def within(self, timeout_seconds: float) -> "RecordedRanks":
        return RecordedRanks(self.pool.within(timeout_seconds))  # type: ignore[attr-defined]


class Recorder:
    """The hooks of a pytest process that records."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        os.environ["PYTEST_CURRENT_TEST"] = f"{item.nodeid} (setup)"
        start(current_test())
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        start(f"{item.nodeid} (call)")

    def pytest_sessionfinish(self) -> None:
        save()


def record_into(config: pytest.Config, folder: str) -> None:
    """Let this pytest process and all that it starts record into `folder`."""
    path = Path(folder).resolve()
    path.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(path)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SITE, os.environ.get("PYTHONPATH"))))
    config.pluginmanager.register(Recorder(), "recorder of lines")


def lines_of(folder: Path, root: Path) -> tuple[dict[str, dict[int, set[str]]], int]:
    """The tests that run each line, by file relative to `root` and by line; and the number of damaged data files.

    The empty name of a test is an import.
    """
    import coverage

    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    num_damaged = 0
    for path in folder.glob("lines.*"):
        data = coverage.CoverageData(str(path))
        try:
            data.read()
            for name in data.measured_files():
                lines = found[str(Path(name).relative_to(root))]
                for line, tests in data.contexts_by_lineno(name).items():
                    lines[line].update(tests)
        except coverage.exceptions.DataError:  # its process was killed while it wrote
            num_damaged += 1
    return found, num_damaged
