"""The script of a SLURM job, and its submission."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

from megatron_lite.config.types import PRINTABLE
from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.files import read_file

SCRIPT = Path(__file__).with_name("pretrain.sbatch")
LAST_LINE = "# written by megatron-lite submit; checksum of the lines above: "


def task_overrides(array: str | None, overrides: list[str]) -> list[str]:
    """The overrides of the first task of a job array; run.dir keeps its %a."""
    first = re.match(r"\d+", array or "")
    if first is None:
        return overrides
    return [text if sets_run_dir(text) else text.replace("%a", first[0]) for text in overrides]


def sets_run_dir(override: str) -> bool:
    return override.partition("=")[0] == "run.dir"


def job_script(options: list[str], arguments: list[str]) -> str:
    """`pretrain.sbatch` with these arguments, and these options last: sbatch takes the last of two.

    Its last line is a checksum, by which `check_unchanged` knows the script.
    """
    first, *rest = SCRIPT.read_text(encoding="utf-8").splitlines(keepends=True)
    end = next(number for number, line in enumerate(rest) if line.startswith("set -u"))
    header = [f"#SBATCH {quoted('an option of sbatch', option)}\n" for option in options]
    fixed = [
        f"PYTHON={quoted('the path of Python', sys.executable)}\n",
        f"cd {quoted('the current folder', os.getcwd())} || exit 2\n",
        f"set -- {' '.join(quoted('an argument', argument) for argument in arguments)}\n",
    ]
    return with_checksum("".join([first, *rest[:end], *header, *fixed, *rest[end:]]).encode()).decode()


def with_checksum(lines: bytes) -> bytes:
    return lines + f"{LAST_LINE}{zlib.crc32(lines):08x}\n".encode()


def check_unchanged(path: Path) -> None:
    """Raise ConfigError unless the file is absent or as `submit` wrote it: a change of the user would be lost."""
    try:
        script = read_file(path)
    except FileNotFoundError:
        return
    lines, last_line, _ = script.rpartition(LAST_LINE.encode())
    if not last_line:
        raise ConfigError(
            f"{path}: was not written by megatron-lite submit, or by a version whose scripts have no checksum; delete "
            "it, rename it, or choose another run.dir"
        )
    if script != with_checksum(lines):
        raise ConfigError(
            f"{path}: was changed after megatron-lite submit wrote it; submit it yourself with `sbatch {path}`, rename "
            "it, or choose another run.dir"
        )


def quoted(what: str, text: str) -> str:
    """The text quoted for the shell. Raises ConfigError if it has control characters, which could end its line."""
    if not re.fullmatch(PRINTABLE, text):
        raise ConfigError(f"{what} is {text!r}; remove the control characters")
    return shlex.quote(text)


def submit_job(path: Path) -> str:
    """Submit a job script and return the number of its job."""
    if shutil.which("sbatch") is None:
        raise TrainingError(f"this machine has no sbatch; on one that has it, run: sbatch {path}")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"sbatch {path}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    print(done.stderr, end="", file=sys.stderr)
    return done.stdout.strip().partition(";")[0]
