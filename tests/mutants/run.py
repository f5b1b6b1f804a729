"""`make mutants`: plant each bug in a copy of the checkout; do the tests of `make test` that run its line fail?

The first step records which test runs which line, once for each state of the sources. A mutant then gets the tests that
run its line, the shortest first, until one fails. A hang is a failure too. `--random N` adds mechanical mutants.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tests.helpers.covered import ROOT, lines_of
from tests.helpers.mutants import Mutant, apply, planted
from tests.helpers.mutation import random_mutants

IN_TEST = "not soak and not lint"
# Seconds for the tests of one mutant, which is found if they take longer: without a bug they take a tenth.
LIMIT = 1800
Selected = dict[str, dict[str, list[str]]]
"""Test files by source file and line, with the tests there that run the line, or none for all tests of the file."""


def sources_hash() -> str:
    """A hash of the package and the tests in this checkout."""
    names = subprocess.run(["git", "ls-files", "megatron_lite", "tests"], cwd=ROOT, capture_output=True, text=True)
    digest = hashlib.sha256()
    for name in sorted(names.stdout.split()):
        if (ROOT / name).is_file() and not name.startswith("tests/mutants/"):
            digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def recorded(folder: Path, jobs: int) -> dict[str, dict[str, list[str]]]:
    """The tests that run each line, by source file and line, from a run of `make test` that records them."""
    result = folder / f"tests-of-lines-{sources_hash()}.json"
    if not result.exists():
        print("recording which test runs which line ...", flush=True)
        data = folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        command = ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder", "--record-lines", str(data)]
        times = folder / "times.xml"
        done = pytest([*command, f"--junitxml={times}", "-m", IN_TEST], ROOT)
        if done.returncode:
            sys.exit(f"{done.stdout[-3000:]}\nthe tests fail without a mutant")
        tests = {
            file: {str(line): sorted(names) for line, names in lines.items()} for file, lines in lines_of(data).items()
        }
        result.write_text(json.dumps(tests))
    return json.loads(result.read_text())


def pytest(words: Iterable[str], root: Path, limit: float | None = None) -> "subprocess.CompletedProcess[str]":
    """Run pytest in a copy of the checkout; code 124 if it takes longer than `limit` seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        out, code = "", 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, code, out, "")


def tests_of(mutant: Mutant, line: int, tests: dict[str, dict[str, list[str]]]) -> list[str]:
    """The tests that run a line, or any of its file if the line runs at import; whole files for shared fixtures."""
    lines = tests.get(mutant.file, {})
    found: set[str] = set()
    for near in range(line, line + mutant.old.count("\n") + 1):
        found.update(name for name in lines.get(str(near), []) if name)
    if not found:
        found.update(name for names in lines.values() for name in names if name)
    files = {name.partition("::")[0] for name in found if name.endswith(" (setup)") and "::" in name}
    calls = {name.removesuffix(" (call)") for name in found if name.endswith(" (call)")}
    return sorted(files) + sorted(name for name in calls if name.partition("::")[0] not in files)


@cache
def seconds_of(times: Path) -> dict[str, float]:
    """The recorded seconds of each test."""
    from xml.etree import ElementTree

    found = {}
    for case in ElementTree.parse(times).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        found[f"{path}::{case.attrib['name']}"] = float(case.attrib["time"])
    return found


def in_steps(tests: list[str], times: Path) -> list[list[str]]:
    """The tests in runs that grow: first a few short ones of each file, then the others."""
    seconds = seconds_of(times)
    by_file: dict[str, list[str]] = {}
    for name in sorted(tests, key=lambda name: seconds.get(name, 60.0)):
        by_file.setdefault(name.partition("::")[0], []).append(name)
    first = [name for names in by_file.values() for name in names[:3] if seconds.get(name, 60.0) < 3]
    others = [name for names in by_file.values() for name in names if name not in first]
    return [step for step in (first, others) if step]


def try_mutant(mutant: Mutant, line: int | None, tests: dict[str, dict[str, list[str]]], folder: Path) -> str:
    """Plant the bug and run its tests; how it was found, or `missed`."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        root = Path(place) / "checkout"
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in names.splitlines():
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        if line is None:
            line = apply(mutant, root)
        else:
            lines = (root / mutant.file).read_text(encoding="utf-8").split("\n")
            assert lines[line - 1] == mutant.old
            lines[line - 1] = mutant.new
            (root / mutant.file).write_text("\n".join(lines), encoding="utf-8")
        selected = tests_of(mutant, line, tests)
        if not selected:
            return "missed: no test runs the line"
        start = time.monotonic()
        for step in in_steps(selected, folder / "times.xml"):
            file = Path(place) / "tests"
            file.write_text("\n".join(step))
            done = pytest(["-x", "-p", "no:cacheprovider", "-m", IN_TEST, f"@{file}"], root, LIMIT)
            if done.returncode == 124:
                return f"found: the tests take more than {LIMIT} s"
            if done.returncode in (1, 2, 3, 4):
                failed = [row for row in done.stdout.splitlines() if row.startswith(("FAILED", "ERROR"))]
                return f"found by {failed[0].split(' - ')[0] if failed else done.stdout[-200:].strip()}"
        return f"missed by {len(selected)} tests and files in {time.monotonic() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--random", type=int, default=0, help="number of mechanical mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--folder", type=Path, default=ROOT / ".pytest_cache" / "mutants", help="what is recorded")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tests = recorded(options.folder, 3)
    mutants: list[tuple[Mutant, int | None]] = [(mutant, None) for mutant in planted()]
    mutants += random_mutants(ROOT, options.random, options.seed) if options.random else []
    mutants = [each for each in mutants if options.only in each[0].name]
    missed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda each: try_mutant(*each, tests, options.folder), mutants)
        for (mutant, _), result in zip(mutants, results, strict=True):
            print(f"{mutant.name}: {mutant.breaks}\n    {result}", flush=True)
            if result.startswith("missed"):
                missed.append(mutant.name)
    share = 1 - len(missed) / max(1, len(mutants))
    print(f"{len(mutants) - len(missed)} of {len(mutants)} mutants found ({share:.1%}), seed {options.seed}")
    print("missed:", ", ".join(missed) or "none")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
