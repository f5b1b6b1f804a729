"""What a test session does besides its tests: it measures files, and finds what tests leave in the checkout."""

import hashlib
import json
import subprocess
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Seconds of each file whose tests take one or more, from the last `make durations`.
DURATIONS = TESTS / "durations.json"
# Of Python and of tools, not of tests.
CACHES = ("__pycache__/", ".hypothesis/", ".pytest_cache/", ".ruff_cache/", ".egg-info/")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.relative_to(TESTS.parent)}")
    parser.addoption("--resume-soak", action="store_true", help="skip what passed in an interrupted run of this commit")


def follow(config: pytest.Config) -> None:
    """Let a `Session` have the hooks of this process, unless it is a worker of pytest-xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Session(config), "session of all tests")


@cache
def _recorded() -> dict[str, float]:
    return json.loads(DURATIONS.read_text())


def recorded_seconds(path: Path) -> float:
    """The seconds that the tests of a file took when they were recorded; 0 for less than one."""
    return _recorded().get(str(path.relative_to(TESTS)), 0.0)


def passed_file(config: pytest.Config) -> Path:
    """The list of tests that passed in interrupted runs of `make soak` with these sources."""
    version = b"".join(
        subprocess.run(["git", *words], cwd=config.rootpath, capture_output=True, check=False).stdout
        for words in (["rev-parse", "HEAD"], ["diff", "HEAD"])
    )
    assert config.cache is not None
    return config.cache.mkdir("soak") / hashlib.sha256(version).hexdigest()[:16]


def without_passed(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """The items that `make soak` has not yet run; all of them for other commands."""
    if not config.getoption("--resume-soak"):
        return items
    file = passed_file(config)
    passed = set(file.read_text().splitlines()) if file.exists() else set()
    return [item for item in items if item.nodeid not in passed]


def files_outside_of_git(root: Path) -> set[str]:
    """Untracked and ignored files and folders of a checkout, without caches; empty where git has no checkout."""
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--ignored", "--no-renames"]
    lines = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.splitlines()
    found = {line[3:] for line in lines if line[:2] in ("??", "!!")}
    return {name for name in found if not name.endswith(CACHES)}


class Session:
    """The hooks of the process that has the results of all tests."""

    def __init__(self, config: pytest.Config):
        self.config, self.seconds = config, defaultdict[str, float](float)
        self.before = files_outside_of_git(config.rootpath)
        self.resumes, self.outcomes, self.start = config.getoption("--resume-soak"), Counter[str](), time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        if self.resumes and report.when == ("setup" if report.skipped else "call"):
            self.outcomes[report.outcome] += 1
            if not report.failed:
                with passed_file(self.config).open("a") as file:
                    file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        new = sorted(files_outside_of_git(self.config.rootpath) - self.before)
        if new:
            print(f"\ntests wrote into the checkout, use tmp_path: {', '.join(new)}")
            session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED
        if self.resumes:
            self._end_soak()
        if self.config.getoption("--record-durations"):
            names = {(self.config.rootpath / name).relative_to(TESTS): value for name, value in self.seconds.items()}
            kept = {str(name): round(value, 1) for name, value in sorted(names.items()) if value >= 1}
            DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")

    def _end_soak(self) -> None:
        file, hours = passed_file(self.config), (time.monotonic() - self.start) / 3600
        done = len(file.read_text().splitlines()) if file.exists() else 0
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        earlier = done - self.outcomes["passed"] - self.outcomes["skipped"]
        print(
            f"\nsoak: {counts or 'nothing left to run'}; {earlier:,} before; {hours:.2f} h; examples are derandomized"
        )
