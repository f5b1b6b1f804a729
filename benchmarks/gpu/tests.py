"""The tests of tests/gpu in several processes, one row for each test; the most valuable files come first."""

import importlib.util
import os
import sys
from typing import Any

from rows import add, left

# The GPU tests that say most, first. Kernels of the last file compile for tens of seconds.
FILES = ["test_training.py", "test_features.py", "test_core_attention.py", "test_fused.py", "test_flash_triton.py"]
PROCESSES = max(1, min(8, (os.cpu_count() or 2) // 2))


class Rows:
    """A pytest plugin that adds a row when a test is done."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        message = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            message = report.longrepr[2]
        elif report.failed:
            message = " ".join(report.longreprtext.splitlines()[-4:])[:500]
        add("test", report.nodeid, outcome=report.outcome, seconds=report.duration, message=message)


def main() -> int:
    for package in ("pytest", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            add("test", "tests/gpu", outcome="skipped", message=f"Python cannot import {package}", seconds=0.0)
            return 0
    import pytest

    os.environ["OMP_NUM_THREADS"] = "1"  # the references run on the CPU, in all processes at once
    options = [f"tests/gpu/{name}" for name in FILES] + ["-q", "-p", "no:cacheprovider", "--tb", "short"]
    if importlib.util.find_spec("xdist") is not None and PROCESSES > 1:
        options += ["-n", str(PROCESSES), "--dist", "load", "--maxschedchunk", "1"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        options += ["--timeout", str(max(10, int(left() - 5)))]
    return int(pytest.main(options, plugins=[Rows()]))


if __name__ == "__main__":
    sys.exit(main())
