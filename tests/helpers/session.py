"""What a test session does besides its tests: it measures files, and finds what tests leave in the checkout."""

import hashlib
import json
import os
import subprocess
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Seconds of each file whose tests take one or more, from the last `make durations`.
DURATIONS = TESTS / "durations.json"
# A test has the last one of these that its setup, call or teardown has; nothing has come before its setup.
OUTCOMES = ("", "passed", "skipped", "failed")
# Of Python and of tools, not of tests.
CACHES = ("__pycache__/", ".hypothesis/", ".pytest_cache/", ".ruff_cache/", ".egg-info/")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only", metavar="FILE", help="run the tests whose node ids are the lines of FILE, in their order"
    )
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


def chosen(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """The items to run: those of `--only`, or all that `make soak` has not yet run, the longest file first."""
    if only := config.getoption("--only"):
        by_name = {item.nodeid: item for item in items}
        return [by_name[name] for name in Path(only).read_text().splitlines() if name in by_name]
    seconds = {path: recorded_seconds(path) for path in {item.path for item in items}}
    items = sorted(items, key=lambda item: -seconds[item.path])
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
        self.resumes, self.start = config.getoption("--resume-soak"), time.monotonic()
        self.outcomes = Counter[str]()  # of the tests that have ended
        self.worst = dict[str, str]()  # outcome so far, by test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        self.worst[report.nodeid] = max(self.worst.get(report.nodeid, ""), report.outcome, key=OUTCOMES.index)
        if report.when == "teardown" and self.resumes:
            outcome = self.worst.pop(report.nodeid)
            self.outcomes[outcome] += 1
            if outcome != "failed":
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
        seed = os.environ.get("MEGATRON_LITE_SOAK_SEED", "1")
        print(f"\nsoak: {counts or 'nothing left to run'}; {earlier:,} before; {hours:.2f} h; seed {seed}")
