"""A lock on the run directory: two runs in one directory would overwrite each other's checkpoints."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.errors import CheckpointError
from megatron_lite.files import identity
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.tasks import separate_tasks
from megatron_lite.text import visible

LOCK_FILE = ".lock"


class Lock:
    """The lock on a run's folder. Only the first rank has a descriptor; other ranks have -1."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._folder, self._descriptor = folder, descriptor

    def take_again(self) -> None:
        """Lock the folder after it was deleted and created again. CheckpointError: another run has locked it."""
        self.release()
        self._descriptor = _acquire(self._folder)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


@contextmanager
def locked(folder: Path, *, world: Group) -> Iterator[Lock]:
    """A context in which this run holds the folder: in another run, `locked` raises CheckpointError on all ranks.

    Where the file system has no locks, a warning is printed. The system releases the lock when the first rank's process
    ends in any way. Child processes do not inherit a record lock.
    """
    descriptor = on_first(lambda: _acquire(folder), world)
    lock = Lock(folder, descriptor if world.is_first else -1)
    try:
        yield lock
    finally:
        lock.release()


def _acquire(folder: Path) -> int:
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"run.dir {folder}: cannot be created: {error.strerror}; choose another one") from error
    with save_errors("locking", path):
        identity(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(visible(f" cannot lock {folder} ({error.strerror}): let no other run train there"), flush=True)
            return descriptor
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another run"
        os.close(descriptor)
        advice = ". ".join(filter(None, ("wait for it, or choose another one", separate_tasks())))
        raise CheckpointError(f"run.dir {folder} is in use by {holder}; {advice}") from None
    # Another descriptor of this process would release the lock when it is closed.
    if os.pread(descriptor, 8, 0) not in (b"", b"process "):
        os.close(descriptor)
        raise CheckpointError(f"{path}: was not written by megatron-lite, and the run needs this name; rename it")
    os.ftruncate(descriptor, 0)
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
    return descriptor
