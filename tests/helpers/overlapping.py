"""`python overlapping.py BARRIER FOLDER WORDS` runs `megatron-lite WORDS`, which waits for a second such command.

A writer takes a lock below the folder just before it claims or replaces its target. There each of the two waits until
the other one has come as far, so both have started before there is a result. A writer that fails at once where the
other one has the lock tries while the other one has it. The files of the barrier prove the overlap.
"""

import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 2
DEADLINE = 120.0  # seconds; another writer that fails before its lock must not keep this one
ARRIVED, TRIED = "arrived", "tried"


def wait_for_other(barrier: Path, stage: str) -> None:
    """Note that this process has reached the stage, and wait until the other one has."""
    (barrier / f"{stage}-{os.getpid()}").touch()
    end = time.monotonic() + DEADLINE
    while len(list(barrier.glob(f"{stage}-*"))) < SIZE:
        if time.monotonic() > end:
            sys.exit(f"no other writer has {stage}")
        time.sleep(0.001)


def waiting(take: Callable[..., None], barrier: Path, folder: Path) -> Callable[..., None]:
    """The function `take` of fcntl, which waits for the other process at this one's first lock in the folder."""
    came: list[str] = []

    def lock(file: Any, operation: int, *more: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if came or not Path(path).is_relative_to(folder):
            return take(file, operation, *more)
        came.append(path)
        wait_for_other(barrier, ARRIVED)
        try:
            return take(file, operation, *more)
        finally:
            if operation & fcntl.LOCK_NB:
                wait_for_other(barrier, TRIED)

    return lock


if __name__ == "__main__":
    from megatron_lite.cli import main

    barrier, folder = (Path(word).resolve() for word in sys.argv[1:3])
    for name in ("flock", "lockf"):
        setattr(fcntl, name, waiting(getattr(fcntl, name), barrier, folder))
    sys.argv = ["megatron-lite", *sys.argv[3:]]
    main()
