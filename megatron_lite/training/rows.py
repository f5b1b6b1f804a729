"""Reads metrics.jsonl. It is a log: a damaged row is skipped with a notice, and never ends a run or a command."""

from collections.abc import Callable
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
        try:
            row = parse_json(line.decode())
            is_good = type(row["iteration"]) is int and 0 <= row["iteration"] < 2**63 and accepts(row)
        except (ValueError, LookupError, TypeError):
            is_good = False
        if is_good:
            rows.append((line, row))
        elif number < len(lines):
            damaged.append(number)
    return rows, f"{path}: skipped {counted(len(damaged), 'damaged row')}, first line {damaged[0]}" if damaged else ""
