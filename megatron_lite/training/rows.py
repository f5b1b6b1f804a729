"""Reads metrics.jsonl. It is a log: a damaged row is skipped with a notice, and never ends a run or a command."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_lite.files import read_file
from megatron_lite.text import counted, parse_json


def read_rows(path: Path, accepts: Callable[[dict], bool] = bool) -> tuple[list[tuple[bytes, dict[str, Any]]], str]:
    """The lines and objects of a metrics.jsonl that a caller `accepts`, and a notice about skipped lines, or "".

    An incomplete last line is skipped without a notice: a run is writing it, or was killed.
    """
    rows, damaged = [], []
    lines = read_file(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        row: Any = None
        with suppress(ValueError, LookupError, TypeError):
            found = parse_json(line.decode())
            is_good = type(found["iteration"]) is int and 0 <= found["iteration"] < 2**63 and accepts(found)
            row = found if is_good else None
        if row:
            rows.append((line, row))
        elif number < len(lines):
            damaged.append(number)
    return rows, f"{path}: skipped {counted(len(damaged), 'damaged row')}, first line {damaged[0]}" if damaged else ""
