"""Files and folders that a command writes for the user: of two that write the same one, the second gets a message.

A process writes into a private folder. At the end it compares the target with what it was at the start, and renames.
The name of a new folder is claimed before its first byte, so a second process ends before it does its work. A private
folder has a marker, which its process keeps locked: one without a lock is the leftover of a killed process.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_lite.errors import MegatronLiteError
from megatron_lite.files import ADVICE, MARKER, check_own, identity, private_name, remove_own

COMPLETE = "complete"  # a file in a private folder, once all its files may be renamed
CHANGED = "another process has written it meanwhile"
LONGEST_WAIT_SECONDS = 5.0  # for the lock on a user's folder; our own processes hold it for milliseconds


class Targets:
    """Files of one folder that this process will replace together. OSError: one of them is a link or a folder."""

    def __init__(self, *paths: Path, kind: type[MegatronLiteError] = MegatronLiteError):
        self._before = {path: identity(path) for path in paths}
        self.path, self._kind = paths[0], kind

    @contextmanager
    def replaced(self, then: Callable[[], None] = lambda: None) -> Iterator[list[Path]]:
        """Names to write to, which replace the files at the end. Raises an error if another process has changed one.

        `then` is called before another process can replace them.
        """
        paths = list(self._before)
        folder, lock = _private_folder(paths[0])
        names = [folder / path.name for path in paths]
        try:
            yield names
            with locked(folder.parent):
                for path, before in self._before.items():
                    if identity(path) != before:
                        raise MegatronLiteError(f"{path}: {CHANGED}. {ADVICE[errno.EBUSY]}")
                for name in names:
                    os.lstat(name)  # OSError: there is no new file, so the old ones stay
                (folder / COMPLETE).touch()
                for path in paths[1:]:  # even after an interruption, old files are not beside a new one
                    path.unlink(missing_ok=True)
                for name, path in zip(names, paths, strict=True):
                    os.replace(name, path)
                then()
        finally:
            os.close(lock)  # NFS deletes no folder with an open file
            with suppress(OSError):  # in a folder without write permission, which the error above reports
                remove_own(folder, MARKER)

    def write(self, data: bytes | str) -> None:
        """Replace the only file."""
        with target_errors(self.path, self._kind), self.replaced() as (name,), name.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def target_errors(path: Path, kind: type[MegatronLiteError] = MegatronLiteError) -> Iterator[None]:
    """Raise an OSError as a `kind` that names the path."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be written: {error.strerror or error}") from error


def target_of(path: Path, kind: type[MegatronLiteError] = MegatronLiteError) -> Targets:
    """The file that a command writes at its end; call it at the start."""
    with target_errors(path, kind):
        return Targets(path, kind=kind)


def claim(target: Path) -> tuple[Path, int]:
    """A new folder `.new-NAME` beside the target, and a descriptor whose lock shows others that its process lives.

    What a killed process left is deleted first. OSError: another process is writing it, or it is somebody else's.
    """
    folder = target.with_name(f".new-{target.name}")
    made, lock = _private_folder(target)
    try:
        try:
            os.rename(made, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            _remove_leftover(folder, private_name(target))
            os.rename(made, folder)
    except BaseException:
        os.close(lock)
        remove_own(made, MARKER)
        raise
    return folder, lock


def _private_folder(target: Path) -> tuple[Path, int]:
    """A new folder `.new-NAME.<16 hex digits>` beside the target, and a descriptor that holds the lock on its marker.

    Such folders of killed processes are deleted first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    folder = private_name(target)
    folder.mkdir()
    try:
        unlocked = folder / f"{MARKER}.unlocked"
        lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # without locks, no folder of another process is deleted
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unlocked, folder / MARKER)  # no other process finds a marker that is not locked yet
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def _remove_leftovers(target: Path) -> None:
    """Delete the private folders of this user's killed processes that wrote the target.

    Those that are in use, without a marker or on a file system without locks stay.
    """
    pattern = re.compile(rf"\.new-{re.escape(target.name)}\.[0-9a-f]{{16}}")
    with suppress(OSError):
        for name in filter(pattern.fullmatch, os.listdir(target.parent)):
            folder = target.with_name(name)
            with suppress(OSError):
                found = os.lstat(folder)
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                    _check_incomplete(folder, target)
                    _remove_leftover(folder, private_name(target))


def _check_incomplete(folder: Path, target: Path) -> None:
    """Raise MegatronLiteError for the only copy of a result: its process was killed while it renamed the files."""
    marker = os.open(folder / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _takes_lock(marker) and (folder / COMPLETE).exists():
            raise MegatronLiteError(
                f"{folder}: has complete files of a command that was killed while it replaced {target}; give them "
                "their names, or delete the folder"
            )
    finally:
        os.close(marker)


def _remove_leftover(folder: Path, renamed: Path) -> None:
    """Delete a folder whose process has ended, after giving it a private name."""
    try:
        marker = os.open(folder / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise FileExistsError(errno.EEXIST, "it was not made by megatron-lite", str(folder)) from None
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(marker), os.lstat(folder / MARKER)):
            raise BlockingIOError
        check_own(folder, MARKER)
        os.rename(folder, renamed)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another process is writing it", str(folder)) from None
    finally:
        os.close(marker)  # NFS deletes no folder with an open file
    with suppress(OSError):  # another process deletes it too, or the next one
        remove_own(renamed, MARKER)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that one process at a time is in for a folder, where the file system has locks; others wait.

    After LONGEST_WAIT_SECONDS they no longer wait: every program that can read the folder can lock it for ever.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    try:
        with suppress(OSError):
            while not _takes_lock(descriptor) and time.monotonic() < deadline:
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def in_turn(path: Path, notice: Callable[[], None]) -> Iterator[None]:
    """A context that one process of this user at a time is in; another one calls `notice` and waits to the end of it.

    The lock is on an empty file at the path. Where other users can open the file, no process waits.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        with suppress(OSError):
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077 and not _takes_lock(descriptor):
                notice()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _takes_lock(descriptor: int) -> bool:
    """Whether this process now has the lock on a file or folder. OSError: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
