"""The results of a check on a GPU: rows in a file of JSON lines, and the report that they make.

A row is on the disk, in both files, when `add` returns. So a check that is killed keeps all finished rows.
"""

import contextlib
import fcntl
import json
import os
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_lite.files import atomic_write

RESULTS, REPORT = "gpu_results.jsonl", "gpu_report.md"
FOLDER = Path(os.environ.get("GPU_CHECK_FOLDER", "runs"))
DEADLINE = float(os.environ.get("GPU_CHECK_DEADLINE", time.time() + 3600))  # of this step, in seconds of time.time()

LOST_GPU = 75  # the exit code of a step whose process lost its GPU: a new process does the rest

Row = dict[str, Any]


def left() -> float:
    """The seconds until the deadline of this step."""
    return DEADLINE - time.time()


def add(kind: str, name: str, **fields: Any) -> None:
    """Append a row, write the report again and print the row."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    row = {"kind": kind, "name": name, **fields}
    with open(FOLDER / RESULTS, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a killed step may still write its last row
        file.write("\n" + json.dumps(row) + "\n")  # on a line of its own, also after one that was cut off
        file.flush()
        os.fsync(file.fileno())
        atomic_write(FOLDER / REPORT, report(rows()))
    print(json.dumps(row)[:400], flush=True)


def rows(kind: str = "") -> list[Row]:
    """All rows so far, or those of a kind."""
    path = FOLDER / RESULTS
    found = []
    for line in path.read_text().split("\n") if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # a full disk cuts a line off
            found += [json.loads(line)] if line else []
    return [row for row in found if kind in ("", row["kind"])]


def has_lost_gpu(error: BaseException) -> bool:
    """Whether the process cannot use its GPU any more."""
    signs = ("AcceleratorError", "illegal memory", "device-side assert", "unspecified launch", "misaligned")
    return any(sign in f"{type(error).__name__} {error}" for sign in signs)


def described(error: BaseException) -> str:
    """The error, and the last places in this project."""
    places = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "megatron_lite" in frame.filename or "benchmarks" in frame.filename
    ]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} [{' > '.join(places[-3:])}]"


def report(rows: list[Row]) -> str:
    """The report in Markdown."""
    of_kind: dict[str, list[Row]] = {}
    for row in rows:
        of_kind.setdefault(row["kind"], []).append(row)
    parts = [_machine, _steps, _tests, _speed, _predictions, _kernels, _rates]
    return "\n".join(line for part in parts for line in part(of_kind)) + "\n"


def _machine(of_kind: dict[str, list[Row]]) -> list[str]:
    lines = ["# A check on a GPU", ""]
    for row in of_kind.get("machine", []):
        lines += [row["name"], "", ", ".join(f"{key} {value}" for key, value in row["versions"].items()), ""]
        lines += [f"Command: `{row['command']}`", ""]
    return lines


def _steps(of_kind: dict[str, list[Row]]) -> list[str]:
    steps = [f"| {row['name']} | {row['seconds']:.0f} | {row['result']} |" for row in of_kind.get("step", [])]
    return ["| step | s | result |", "|---|--:|---|", *steps, ""] if steps else []


def _tests(of_kind: dict[str, list[Row]]) -> list[str]:
    tests = of_kind.get("test", [])
    if not tests:
        return []
    counts = Counter(row["outcome"] for row in tests)
    lines = ["## Tests", "", ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())), ""]
    reasons = Counter(row["message"] for row in tests if row["outcome"] == "skipped")
    lines += [f"- {count} skipped: {reason}" for reason, count in reasons.items()]
    lines += [f"- FAILED {row['name']}: {row['message']}" for row in tests if row["outcome"] == "failed"]
    return [*lines, ""]


def _speed(of_kind: dict[str, list[Row]]) -> list[str]:
    """The share of idle time is that of the unprofiled step; its kernels take as long under the profiler."""
    lines, kernels = [], {row["name"]: row for row in of_kind.get("kernels", []) if "count" in row}
    for row in of_kind.get("speed", []):
        if "error" in row:
            lines.append(f"| {row['name']} | {row['error'].replace('|', '/')} | | | | | |")
            continue
        found = kernels.get(row["name"])
        more = f"{max(0.0, 1 - found['busy_ms'] / row['ms']):.2f} | {found['count']}" if found else " | "
        cells = f"{row['ms']:.1f} | {row['tokens_per_second']:,.0f} | {row['mfu']:.3f} | {row['peak_gb']:.1f}"
        lines.append(f"| {row['name']} | {cells} | {more} |")
    head = [
        "| model: contestant | ms | tokens/s | MFU | peak GB | idle share | kernels |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    return ["## Training steps", "", *head, *lines, ""] if lines else []


def _predictions(of_kind: dict[str, list[Row]]) -> list[str]:
    lines = []
    for row in of_kind.get("prediction", []):
        measured = [
            r["ms"] for r in of_kind.get("speed", []) if r["name"] == f"{row['name']}: megatron_lite" and "ms" in r
        ]
        share = f"{row['ms'] / measured[-1]:.2f}" if measured else ""
        kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in row["by_kind"].items())
        lines.append(f"| {row['name']} | {row['rates']} | {row['ms']:.1f} | {share} | {row['kernels']} | {kinds} |")
    lines += [f"| {row['name']} | {row['error']} | | | | |" for row in of_kind.get("prediction_error", [])]
    head = ["| model | rates | ms | of measured | kernels | ms by kind |", "|---|---|--:|--:|--:|---|"]
    return ["## The roofline's predictions", "", *head, *lines, ""] if lines else []


def _kernels(of_kind: dict[str, list[Row]]) -> list[str]:
    lines: list[str] = []
    for row in of_kind.get("kernels", []):
        lines += [f"{row['name']}: " + (row.get("error") or f"{row['busy_ms']:.1f} ms of kernels"), ""]
        lines += [f"    {ms:9.2f} ms {count:6}x  {name}" for ms, count, name in row.get("longest", [])]
        lines.append("")
    return ["## Longest kernels of a step", "", *lines] if lines else []


def _rates(of_kind: dict[str, list[Row]]) -> list[str]:
    lines = []
    for row in of_kind.get("rate", []):
        found = row.get("error") or ", ".join(f"{key} {value:.4g}" for key, value in row["values"].items())
        lines.append(f"- {row['name']}: {found}")
    return ["## Rates", "", *lines, ""] if lines else []
