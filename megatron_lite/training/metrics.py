"""metrics.jsonl: a JSON object for every iteration and evaluation.

A file that is deleted while training keeps its rows as long as it is open, so they can be written again.
"""

import json
import os
from pathlib import Path
from typing import Any

from megatron_lite.errors import TrainingError


class MetricsFile:
    """The rows up to `iteration` of an earlier start, and those that are added."""

    def __init__(self, path: Path, iteration: int) -> None:
        self.path = path
        keep_rows(path, iteration)
        self._file = path.open("a+", encoding="utf-8", buffering=1)

    def is_replaced(self) -> bool:
        """Whether the path is gone or names another file."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True

    def open_again(self) -> None:
        """Opens the path anew; where it is gone, a new file gets all rows."""
        self._file.seek(0)
        rows = "" if self.path.exists() else self._file.read()
        self._file.close()
        self._file = self.path.open("a+", encoding="utf-8", buffering=1)
        self._file.write(rows)

    def add(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def close(self) -> None:
        self._file.close()


class writing:
    """Turns an OSError in its body into a message that names the place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise TrainingError(
                f"{error.filename or self.path}: cannot write: {reason}; "
                "free space or fix the permissions, or choose another run.dir, and run the same command again"
            ) from error


def keep_rows(path: Path, iteration: int) -> None:
    """Drops the rows of a metrics file that are later than `iteration`, and a half-written last one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("iteration", 0) <= iteration:
            kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
