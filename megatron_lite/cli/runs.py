"""Reads training runs for `plot` and `compare`: metrics.jsonl and resolved.yaml of a run.dir.

A run that is still training can be read. An incomplete last line is a row that is being written, and is left out.
Damaged rows are left out with a notice.
"""

import math
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from megatron_lite.errors import ConfigError, MegatronLiteError
from megatron_lite.files import read_file
from megatron_lite.text import listed, visible
from megatron_lite.training.rows import read_rows

COUNTERS = ("iteration", "consumed_samples", "lr", "tokens_per_second", "seconds")  # never negative nor infinite
COLUMNS = (*COUNTERS, "loss", "grad_norm")
LARGEST = 1e39  # above the largest fp32 number
X_AXES = ("steps", "samples", "tokens", "hours")


@dataclass(frozen=True)
class TrainedRun:
    """The metrics of one run; `name` distinguishes it from the other runs of a command."""

    folder: Path
    name: str
    columns: dict[str, list[float]]  # one value for each iteration
    evaluations: list[tuple[float, float]]  # iteration and validation loss

    @property
    def num_iterations(self) -> int:
        return len(self.columns["iteration"])

    @cached_property
    def config(self) -> dict[str, Any]:
        """All settings by section.field. Fields of other versions of megatron_lite stay as they are."""
        return _read_config(self._config_file)

    @property
    def _config_file(self) -> Path:
        """resolved.yaml; in a run.dir of an older version config.yaml."""
        from megatron_lite.config.load import OLD_RESOLVED, RESOLVED

        new, old = self.folder / RESOLVED, self.folder / OLD_RESOLVED
        return old if old.exists() and not new.exists() else new

    @property
    def seq_length(self) -> int:
        """Tokens in a sequence. Raises ConfigError if resolved.yaml has no such number."""
        value = self.config.get("data.seq_length")
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self._config_file}: data.seq_length is {value}; the number of tokens needs an integer "
                "above 0, as pretrain wrote it"
            )
        return value

    def x_values(self, axis: str) -> list[float]:
        """The position of each iteration on one of X_AXES. Hours are the sum of the durations of iterations."""
        if axis == "steps":
            return self.columns["iteration"]
        if axis == "hours":
            return [seconds / 3600 for seconds in accumulate(self.columns["seconds"])]
        factor = self.seq_length if axis == "tokens" else 1
        return [samples * factor for samples in self.columns["consumed_samples"]]

    def validation(self, axis: str) -> tuple[list[float], list[float]]:
        """Positions and validation losses; an evaluation is at the position of the iteration before it."""
        x, iterations = self.x_values(axis), self.columns["iteration"]
        # The first index is -1 for an evaluation before all iterations, which has no position.
        found = [(bisect_right(iterations, iteration) - 1, loss) for iteration, loss in self.evaluations]
        return [x[index] for index, _ in found if index >= 0], [loss for index, loss in found if index >= 0]


def read_runs(folders: Sequence[Path]) -> list[TrainedRun]:
    """The runs in these folders, in their order. Raises ConfigError for a folder that is not a run.dir."""
    seen: dict[str, Path] = {}
    for folder in folders:
        path = os.path.realpath(folder)
        if path in seen:
            raise ConfigError(f"{folder}: the run is given twice, also as {seen[path]}; give each run once")
        seen[path] = folder
    return [_read_run(folder, name) for folder, name in zip(folders, distinct_names(folders), strict=True)]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The part of each path that distinguishes it; the last folder of a single path."""
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    paths = [parts[_num_common(paths) :] for parts in paths]
    num_last = _num_common([parts[::-1] for parts in paths])
    return [str(Path(*parts[: len(parts) - num_last])) for parts in paths]


def _num_common(paths: list[tuple[str, ...]]) -> int:
    """The number of first parts that all paths share, smaller than the length of each path."""
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return min(len(list(shared)), min(map(len, paths)) - 1)


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _read_run(folder: Path, name: str) -> TrainedRun:
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {problem}; give the run.dir of a run, a folder with metrics.jsonl")
    if not path.exists():
        runs = sorted(str(child.parent) for child in folder.glob("*/metrics.jsonl"))
        advice = f"; give one of its runs: {listed(runs)}" if runs else "; give the run.dir of a run that trained"
        raise ConfigError(f"{folder}: the folder has no metrics.jsonl{advice}")
    with _reading(path):
        lines, notice = read_rows(path, _is_complete)
    if notice:
        print(visible(notice), file=sys.stderr)
    rows = [row for _, row in lines]
    columns = {name: [float(row[name]) for row in rows if "loss" in row] for name in COLUMNS}
    evaluated = [row for row in rows if "validation_loss" in row and "loss" not in row]
    evaluations = [(float(row["iteration"]), float(row["validation_loss"])) for row in evaluated]
    return TrainedRun(folder, name, columns, evaluations)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MegatronLiteError(
            f"{path}: cannot be read: {error.strerror}; make it a file that this user may read"
        ) from error


def _is_complete(row: dict[str, Any]) -> bool:
    """True for a row with numbers in all its columns."""
    names = COLUMNS if "loss" in row else ("iteration", "validation_loss") if "validation_loss" in row else ()
    return all(isinstance(row[name], int | float) and _fits(row[name], name) for name in names)


def _fits(value: float, name: str) -> bool:
    """True for a value that training can have: a loss may be NaN or infinite, a counter may not."""
    if isinstance(value, float) and not math.isfinite(value):
        return name not in COUNTERS
    return (0 if name in COUNTERS else -LARGEST) <= value < LARGEST


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    from megatron_lite.config.yaml_file import compose, value_of

    if not path.exists():
        raise ConfigError(f"{path}: no such file; pretrain writes it beside metrics.jsonl, so copy both files of a run")
    with _reading(path):
        content = read_file(path)
    root = compose(content.decode(errors="replace"), str(path))
    sections = root.value if isinstance(root, yaml.MappingNode) else []
    return {
        f"{section.value}.{field.value}": value_of(node, text=False)
        for section, fields in sections
        if isinstance(fields, yaml.MappingNode)
        for field, node in fields.value
    }
