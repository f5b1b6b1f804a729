"""metrics.jsonl: a JSON object for every iteration and evaluation; and a check that run.dir has no files of a user.

An open file keeps its rows after it was deleted, so they can be written again.
"""

import json
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from megatron_lite.config.load import RESOLVED, SETTINGS, WRITTEN
from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.files import atomic_write, disk_errors, identity, not_through_links
from megatron_lite.training.rows import read_rows

RESERVED = {
    *("iteration", "consumed_samples", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens_per_second", "mfu"),
    *("memory_gb", "seconds", "timers", "tasks", "validation_loss", "validation_ppl", "test_loss", "test_ppl"),
    *("learning-rate", "grad-norm", "loss-scale", "batch-size", "iteration-time", "throughput", "tokens-per-second"),
    *("memory-gb", "skipped-iterations", "gflops-per-second"),
}  # names of values in the logs, which no scalar of a custom forward step may have

HEARTBEATS, ANY_RANK = "heartbeat/host_{rank}", "[0-9][0-9][0-9][0-9][0-9]"
# The files of run.dir that a start replaces or deletes, and the first bytes of those that a run has written.
OURS = {
    **dict.fromkeys((SETTINGS, RESOLVED), re.escape(WRITTEN).encode()),
    # A row may be damaged, and the only one may end early: the run was killed.
    "metrics.jsonl": rb'(.*\n)?\{"iteration": \d+(, "(consumed_samples|validation_|test_|tasks)|\}?$)|\{.{,9}$',
    "exit_code": rb"75\n$",
    "trace.json": rb'\{"traceEvents": \[\{"ph": "M", "name": "process_name", "pid": 0, "args": \{"name": "rank 0 ',
    "heartbeat/hang": rb"$",  # the watchdog's is empty
    HEARTBEATS: rb'\0*(\{"rank": \d|$)',  # the first rank of a machine may not have written
    "heartbeat/stacks_{rank}.txt": rb"Timeout |Thread |Current thread ",
}


class MetricsFile:
    """The file, with the rows of earlier starts up to `iteration`."""

    def __init__(self, path: Path, iteration: int) -> None:
        self.path = path
        self.notice = keep_rows(path, iteration)
        self._file = _opened(path)

    def is_replaced(self) -> bool:
        """True where the path was deleted or names another file."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True

    def open_again(self) -> None:
        """Open the path again; where it was deleted, the new file gets all rows."""
        self._file.seek(0)
        rows = "" if self.path.exists() else self._file.read()
        self._file.close()
        self._file = _opened(self.path)
        self._file.write(rows)

    def add(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row in read_rows(self.path)[0]]

    def close(self) -> None:
        self._file.close()


def _opened(path: Path) -> TextIO:
    return open(path, "a+", encoding="utf-8", errors="surrogateescape", buffering=1, opener=not_through_links)


def check_run_dir(config: Config, ranks: Sequence[str] = (ANY_RANK,)) -> None:
    """Raise ConfigError for a file, a folder or a link in run.dir that the run would change and no run has written.

    ranks  patterns of the ranks whose files are looked at
    """
    folder = Path(config.run.dir)
    with disk_errors("writing", folder, ConfigError):
        if (beats := folder / "heartbeat").is_symlink() or (beats.exists() and not beats.is_dir()):
            raise ConfigError(f"{beats}: is not a folder of a run, and the run needs this name; rename it")
        ours = OURS.items() if folder.is_dir() else ()  # the lock reports a file
        names = {name.format(rank=rank): content for name, content in ours for rank in ranks}
        found = [(path, how) for name, how in names.items() for path in (folder / name, *folder.glob(name))]
        for path, content in found:
            start = path.open("rb").read(1 << 16) if identity(path) else b""
            if start and not re.match(content, start, re.DOTALL):
                raise ConfigError(f"{path}: was not written by megatron-lite, and the run needs this name; rename it")


def write_errors(path: Path) -> AbstractContextManager[None]:
    """`files.disk_errors` as TrainingError, for the files of a run."""
    return disk_errors("writing", path, TrainingError)


def keep_rows(path: Path, iteration: int) -> str:
    """Remove the rows after `iteration` and damaged ones; return a notice about those, or an empty text.

    Before the first iteration no row is removed: the file is renamed to metrics.jsonl.1, or another free number.
    """
    if not path.exists():
        return ""
    rows, notice = read_rows(path)
    if rows and not iteration:
        names = (path.with_name(f"{path.name}.{number}") for number in count(1))
        free = next(name for name in names if not os.path.lexists(name))
        path.rename(free)
        return f"{free}: has the rows of an earlier start. {notice}".strip()
    atomic_write(path, b"".join(line + b"\n" for line, row in rows if row["iteration"] <= iteration))
    return notice
