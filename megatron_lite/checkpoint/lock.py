"""One run to a directory: two that wrote into one would overwrite each other's checkpoints."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from megatron_lite.checkpoint.tensor_file import explained
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.context import Group

LOCK_FILE = ".lock"


class Lock:
    """A run's hold on its folder; on the first rank alone there is a descriptor."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._folder, self._descriptor = folder, descriptor

    def take_again(self) -> None:
        """Locks the folder that has replaced a deleted one; raises CheckpointError where another run was faster."""
        self.release()
        self._descriptor = _acquire(self._folder)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


@contextmanager
def locked(folder: Path, *, world: Group) -> Iterator[Lock]:
    """Inside, the folder is this run's: another run's attempt raises CheckpointError on all of its ranks.

    Where the file system has no locks, a line says so. The system lets go of the lock when the first rank's process
    ends, however it ends. A record lock, because a child process does not inherit it.
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
        raise CheckpointError(
            f"run.dir is {folder}, which cannot be created: {error.strerror}; choose another run.dir"
        ) from error
    with explained("locking", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(f" cannot lock {folder} ({error.strerror}): see that no other run trains there", flush=True)
            return descriptor
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise CheckpointError(
            f"run.dir {folder} is in use by {holder or 'another run'}; wait until that run has ended, end it, or "
            "choose another run.dir"
        ) from None
    os.ftruncate(descriptor, 0)
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
    return descriptor
