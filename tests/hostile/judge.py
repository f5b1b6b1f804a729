"""One mutation: files, the command in a fork, and what is wrong with how it ended."""

import contextlib
import functools
import gc
import importlib
import os
import pickle
import re
import shutil
import signal
import struct
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.warm import LITE, run_words
from tests.hostile import base
from tests.hostile.process import BYTES, SECONDS, Ended, in_fork
from tests.hostile.readers import TARGET, Reader, with_base
from tests.hostile.truth import Moved, joined

COLUMNS = ("equal", "refused", "traceback", "hang", "crash", "memory", "canary", "escape", "silent", "wrong")
CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
PRIVATE = (base.MARKER, struct.pack("<f", base.PRIVATE) * 8)


@dataclass(frozen=True)
class Verdict:
    """The column of a mutation in the table, and why."""

    column: str
    reader: str
    seed: int
    mutation: str
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.column not in COLUMNS[:2]

    def __str__(self) -> str:
        again = f"python -m tests.hostile {self.reader} --seed {self.seed} --count 1"
        return f"{self.column}: {self.mutation}\n  {self.detail}\n  again: {again}"


def _snapshot(folder: Path) -> dict[str, Any]:
    """Names, kinds, sizes and times of all that is in a folder; links are not followed."""
    found: dict[str, Any] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            status = os.lstat(path)
            times = status.st_mtime_ns if not os.path.isdir(path) or os.path.islink(path) else 0
            found[path] = (status.st_mode, status.st_size if times else 0, times, status.st_ino)
    return found


class Judge:
    """The base files, and a sandbox: work/ with a copy of them, and folders above and beside it."""

    def __init__(self, folder: Path):
        self.base = folder / "base"
        base.make(self.base)
        self.readers = with_base(self.base)
        self.box = folder / "box"

    def _fresh(self, reader: Reader) -> Path:
        shutil.rmtree(self.box, ignore_errors=True)
        work = self.box / "above" / "work"
        work.mkdir(parents=True)
        shutil.copytree(self.base / "beside", work.parent / "beside")
        (self.box / "above" / "keep.txt").write_bytes(base.MARKER)
        for name in reader.files:
            source = self.base / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, work / name)
        return work

    @functools.cache  # noqa: B019
    def moved(self, name: str) -> Moved | str:
        """Where the sound conversion puts each element; checks that the sound files are accepted."""
        reader = self.readers[name]
        work = self._fresh(reader)
        modules = self.box / "modules"

        def run() -> int:
            code = run_words(LITE, list(reader.command))
            modules.write_text("\n".join(sys.modules))
            return code

        ended = in_fork(run, work)
        assert ended.code == 0, f"{name}: the sound files are refused: {ended.err.decode()[-2000:]}"
        # Later forks have these modules already.
        for module in modules.read_text().splitlines():
            if module not in sys.modules and not module.startswith("__"):
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
        gc.collect()
        gc.freeze()
        return Moved(reader.source(work), reader.target(work)) if reader.source and reader.target else ""

    def judge(self, name: str, seed: int) -> Verdict:
        """Mutate, run, and judge."""
        reader = self.readers[name]
        moved = self.moved(name)
        work = self._fresh(reader)
        mutation = reader.mutate(f"{name} {seed}", work)
        canaries = self._others(reader, work)
        ended = in_fork(lambda: run_words(LITE, list(reader.command)), work)
        column, detail = self._column(reader, work, ended, canaries)
        if column == "equal" and isinstance(moved, Moved):
            column, detail = self._compared(reader, work, moved)
        return Verdict(column, name, seed, mutation, detail)

    def _others(self, reader: Reader, work: Path) -> dict[str, Any]:
        """A snapshot of all that the command must not change."""
        own = tuple(str(work / name) for name in reader.writes)
        # A run's folder that is a link is changed where it points to, as its user wants.
        found = _snapshot(self.box)
        return {path: what for path, what in found.items() if not path.startswith(own) and "/moved" not in path}

    def _column(self, reader: Reader, work: Path, ended: Ended, before: dict[str, Any]) -> tuple[str, str]:
        err = ended.err.decode(errors="replace")
        last = err.strip().splitlines()[-1][:300] if err.strip() else ""
        if ended.signal:
            places = re.findall(r'File "[^"]*/(megatron_lite/[^"]*)", line (\d+) in (\w+)', err)
            column = "hang" if ended.signal in (signal.SIGALRM, signal.SIGXCPU) else "crash"
            return column, f"signal {ended.signal}, {ended.seconds:.1f} s, in {places[:3]}: {last}"
        if b"Traceback (most" in ended.err or ended.code not in (0, 1, 2, 75):
            places = re.findall(r'File "[^"]*/(megatron_lite/[^"]*)", line (\d+), in (\w+)', err)
            at = ":".join(places[-1][:2]) if places else ""
            return "traceback", f"rc {ended.code}, {at}: {last}"
        after = self._others(reader, work)
        if changed := sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path)):
            return "canary", f"changed: {[os.path.relpath(path, self.box) for path in changed[:4]]}"
        if found := [secret for secret in PRIVATE if self._leaked(reader, work, secret)]:
            return "canary", f"{found[0]!r} is in the target"
        shown = ended.err if reader.prints_texts else ended.out + ended.err
        if control := CONTROLS.search(shown):
            return "escape", f"{control[0]!r} in {shown[max(0, control.start() - 60) : control.end() + 30]!r}"
        if ended.seconds > SECONDS:
            return "hang", f"{ended.seconds:.1f} s"
        if ended.grown > BYTES:
            return "memory", f"{ended.grown >> 20} MiB; {last}"
        if ended.code == 0:
            return "equal", last
        return (
            ("refused", last)
            if err.strip() or (ended.code == 1 and ended.out.strip())
            else ("silent", f"rc {ended.code}, no message")
        )

    def _leaked(self, reader: Reader, work: Path, secret: bytes) -> bool:
        files = [file for file in (work / TARGET).rglob("*") if file.is_file() and not file.is_symlink()]
        return any(secret in file.read_bytes() for file in files if file.stat().st_size < 1 << 24)

    def _compared(self, reader: Reader, work: Path, moved: Moved) -> tuple[str, str]:
        """Compare the target with another program's reading of the source, in a fork, because that may fail."""
        with tempfile.NamedTemporaryFile() as result:

            def compare() -> int:
                assert reader.source and reader.target
                target = reader.target(work)
                try:
                    source = reader.source(work)
                except BaseException as error:
                    # The other program refuses: only the sound result is right.
                    same = (joined(target).shape == moved.constants.shape) and bool(
                        (joined(target) == moved.constants).all()
                    )
                    said = f"{type(error).__name__}: {str(error)[:200]}"
                    answer = (
                        ("equal", "")
                        if same
                        else ("wrong", f"another program refuses ({said}), other values were taken")
                    )
                else:
                    if reader.settings:
                        same = sorted(filter(None, joined(source).tolist())) == sorted(
                            filter(None, joined(target).tolist())
                        )
                        answer = ("equal", "") if same else ("wrong", "other elements")
                    else:
                        difference = moved.wrong(source, target)
                        answer = ("wrong", difference) if difference else ("equal", "")
                Path(result.name).write_bytes(pickle.dumps(answer))
                return 0

            ended = in_fork(compare, work)
            content = Path(result.name).read_bytes()
        return pickle.loads(content) if content else ("wrong", f"the comparison failed: {ended.err.decode()[-300:]}")


def table(verdicts: list[Verdict]) -> str:
    """A line for each reader, and their sum."""
    rows = {
        name: Counter(v.column for v in verdicts if v.reader == name)
        for name in dict.fromkeys(v.reader for v in verdicts)
    }
    rows["all"] = Counter(verdict.column for verdict in verdicts)
    width = max(map(len, rows))
    lines = [" ".join(["reader".ljust(width), "mutations", *COLUMNS])]
    for name, counts in rows.items():
        cells = [str(counts[column]).rjust(len(column)) for column in COLUMNS]
        lines.append(" ".join([name.ljust(width), str(counts.total()).rjust(9), *cells]))
    return "\n".join(lines)
