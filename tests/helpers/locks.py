"""A second process that takes the lock of a run directory."""

import subprocess
import sys
from pathlib import Path

TRY = """
import sys
from pathlib import Path
from megatron_lite.checkpoint.lock import locked
from megatron_lite.parallel.context import solo
with locked(Path(sys.argv[1]), world=solo()):
    print("locked", flush=True)
    sys.stdin.read()
"""


def other_run(folder: Path) -> "subprocess.Popen[str]":
    """Start a process that prints `locked` and keeps the lock until its input ends, or fails to take it."""
    return subprocess.Popen(
        [sys.executable, "-c", TRY, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
