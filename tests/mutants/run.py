"""`make mutants`: plant each bug in a copy of the checkout; do the tests of `make test` that run its line fail?

The first step records which test runs which line, once for each state of the sources. A mutant then gets the tests that
run its line, first those that run few other lines, until one fails. A hang is a failure too. `--random N` adds
mechanical mutants.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.helpers.covered import ROOT, lines_of
from tests.helpers.mutants import Mutant, apply, planted
from tests.helpers.mutation import random_mutants

NUM_LIKELIEST = 6  # tests of the first run of a mutant
IN_TEST = "not soak and not lint"
FAILED, USAGE, NO_TESTS = 1, 4, 5  # exit codes of pytest


class Recorded(NamedTuple):
    """A run of all tests."""

    tests: dict[str, dict[str, list[str]]]  # the tests that run each line, by source file and line
    seconds: dict[str, float]  # of each test that passed
    num_lines: Counter[str]  # lines that each test runs


def sources_hash() -> str:
    """A hash of the package and the tests in this checkout."""
    names = subprocess.run(["git", "ls-files", "megatron_lite", "tests"], cwd=ROOT, capture_output=True, text=True)
    digest = hashlib.sha256()
    for name in sorted(names.stdout.split()):
        if (ROOT / name).is_file() and not name.startswith("tests/mutants/"):
            digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def copy_checkout(root: Path) -> None:
    """Copy the files that git knows to `root`, as they are here."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def record(folder: Path, jobs: int) -> Recorded:
    """Record a run of all tests, or read it from the folder."""
    result = folder / f"tests-of-lines-{sources_hash()}.json"
    if not result.exists():
        print("recording which test runs which line ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="recorded-") as place:
            root, data = Path(place) / "checkout", folder / "lines"
            shutil.rmtree(data, ignore_errors=True)
            copy_checkout(root)  # as for a mutant: a test that fails in a copy would find every mutant
            words = ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder", f"--record-lines={data}"]
            done = pytest([*words, f"--junitxml={result.with_suffix('.xml')}", "-m", IN_TEST], root)
            if done.returncode not in (0, FAILED):
                sys.exit(f"{done.stdout[-3000:]}\nthe tests do not run")
            for row in failures_in(done.stdout):
                print(f"tries no mutant: {row}")
            lines_by_file, num_damaged = lines_of(data, root)
            print(f"incomplete data files of killed processes, which are left out: {num_damaged}")
        tests = {
            file: {str(line): sorted(names) for line, names in lines.items()} for file, lines in lines_by_file.items()
        }
        result.write_text(json.dumps(tests))
    tests, num_lines = json.loads(result.read_text()), Counter[str]()
    for lines in tests.values():
        for names in lines.values():
            num_lines.update({name.rpartition(" (")[0] for name in names})
    return Recorded(tests, seconds_of(result.with_suffix(".xml")), num_lines)


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


def failures_in(output: str) -> list[str]:
    """The rows of pytest's summary that name a failed test."""
    return [row for row in output.splitlines() if row.startswith(("FAILED", "ERROR"))]


def tests_of(mutant: Mutant, line: int, recorded: Recorded) -> list[str]:
    """The tests that run a line, or any of its file if none does; whole files for shared fixtures.

    A line that runs at import is recorded only for tests that start a new interpreter. So the tests that use the names
    that it binds are added. Lines of a shell script are not recorded; its tests are those of the files that name it.
    """
    if not mutant.file.endswith(".py"):
        name = Path(mutant.file).name
        files = {
            str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if name in path.read_text()
        }
        return sorted(test for test in recorded.seconds if test.partition("::")[0] in files)
    lines = recorded.tests.get(mutant.file, {})
    found: set[str] = set()
    for near in range(line, line + mutant.old.count("\n") + 1):
        found.update(lines.get(str(near), ()))
    if names := bound_at_import((ROOT / mutant.file).read_text(encoding="utf-8"), line):
        found.update(tests_of_names(names, recorded))
    found.discard("")  # an import outside tests
    if not found:
        found.update(name for names in lines.values() for name in names)
    shared = {name.partition("::")[0] for name in found if name.endswith(" (setup)")}
    calls = {name.removesuffix(" (call)") for name in found if name.endswith(" (call)")}
    return sorted(name for name in recorded.seconds if name in calls or name.partition("::")[0] in shared)


def bound_at_import(source: str, line: int) -> set[str]:
    """The names that the statement at a line defines or assigns if it runs at import; else none."""
    statements = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    functions = [node for node in statements if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not statements or any(node.body[0].lineno <= line for node in functions):
        return set()
    statement = max(statements, key=lambda node: node.lineno)
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def tests_of_names(names: set[str], recorded: Recorded) -> set[str]:
    """The tests that run a line of the package with one of the names."""
    pattern, found = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b"), set[str]()
    for file, lines in recorded.tests.items():
        for number, text in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(text):
                found.update(lines.get(str(number), ()))
    return found


def seconds_of(times: Path) -> dict[str, float]:
    """The recorded seconds of each test that passed."""
    from xml.etree import ElementTree

    found = {}
    for case in ElementTree.parse(times).iter("testcase"):
        if len(case):  # failed or skipped
            continue
        path = case.attrib["classname"].replace(".", "/") + ".py"
        found[f"{path}::{case.attrib['name']}"] = float(case.attrib["time"])
    return found


def in_steps(tests: list[str], recorded: Recorded, budget: float) -> list[list[str]]:
    """The tests in three runs: the likeliest, two of each file, and the shortest of the others within `budget` seconds.

    Tests that run few other lines are the likeliest to find a mutant, and come first. The likeliest have a run of their
    own because pytest collects all files of a run, for seconds. Without a budget, a harmless change of a line that all
    tests run would take half an hour; one test is tried whatever it takes.
    """
    seconds = recorded.seconds
    of_files: dict[str, list[str]] = {}
    for name in sorted(tests, key=lambda name: recorded.num_lines[name] * (1 + seconds[name])):
        of_files.setdefault(name.partition("::")[0], []).append(name)
    first = [name for names in of_files.values() for name in names[:2] if seconds[name] < 5]
    likeliest, first = first[:NUM_LIKELIEST], first[NUM_LIKELIEST:]
    others, left = [], budget
    for name in sorted(set(tests) - set(likeliest) - set(first), key=seconds.__getitem__):
        left -= seconds[name]
        if left < 0 and (others or likeliest):
            break
        others.append(name)
    return [step for step in (likeliest, first, others) if step]


def try_mutant(mutant: Mutant, line: int | None, recorded: Recorded, budget: float) -> str:
    """Plant the bug and run its tests; how it was found, or `missed`."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        root = Path(place) / "checkout"
        copy_checkout(root)
        if line is None:
            line = apply(mutant, root)
        else:
            lines = (root / mutant.file).read_text(encoding="utf-8").split("\n")
            assert lines[line - 1] == mutant.old
            lines[line - 1] = mutant.new
            (root / mutant.file).write_text("\n".join(lines), encoding="utf-8")
        selected = tests_of(mutant, line, recorded)
        if not selected:
            return "missed: no test runs the line"
        start, tried = time.monotonic(), 0
        for step in in_steps(selected, recorded, budget):
            tried += len(step)
            limit = 120 + 8 * sum(recorded.seconds[name] for name in step)  # a hang
            file = Path(place) / "tests"
            file.write_text("\n".join(step))
            paths = sorted({name.partition("::")[0] for name in step})
            words = ["-x", "-p", "no:cacheprovider", "-m", IN_TEST, f"--only={file}", "--ranks-timeout=40"]
            done = pytest([*words, *paths], root, limit)
            if done.returncode == 124:
                return f"found: the tests take more than {limit:.0f} s"
            if done.returncode in (USAGE, NO_TESTS):  # not an answer about the mutant
                sys.exit(f"{mutant.name}: pytest ran no test\n{done.stdout[-2000:]}")
            if done.returncode:
                failed = failures_in(done.stdout)
                return f"found by {failed[0].split(' - ')[0] if failed else done.stdout[-200:].strip()}"
        return f"missed by {tried} of {len(selected)} tests in {time.monotonic() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--random", type=int, default=0, help="number of mechanical mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--budget", type=float, default=900, help="recorded seconds of the tests of a mutant at most")
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--folder", type=Path, default=ROOT / ".pytest_cache" / "mutants", help="what is recorded")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    recorded = record(options.folder, 3)
    print(f"{len(recorded.seconds):,} tests passed without a mutant, and may find one", flush=True)
    mutants: list[tuple[Mutant, int | None]] = [(mutant, None) for mutant in planted()]
    mutants += random_mutants(ROOT, options.random, options.seed) if options.random else []
    mutants = [each for each in mutants if options.only in each[0].name]
    missed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda each: try_mutant(each[0], each[1], recorded, options.budget), mutants)
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
