"""Files and folders that a command writes for the user: of two that write the same one, the second gets a message.

A process writes under a private name. At the end it compares the target with what it was at the start, and renames. The
name of a new folder is claimed before its first byte, so a second process ends before it does its work.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_lite.errors import MegatronLiteError
from megatron_lite.files import ADVICE, MARKER, identity, make_own, private_name, remove_own

CHANGED = "another process has written it meanwhile"


class Targets:
    """Files that this process will replace together. OSError: one of them is a link or a folder."""

    def __init__(self, *paths: Path, kind: type[MegatronLiteError] = MegatronLiteError):
        self._before = {path: identity(path) for path in paths}
        self.path, self._kind = paths[0], kind

    @contextmanager
    def replaced(self, then: Callable[[], None] = lambda: None) -> Iterator[list[Path]]:
        """Names to write to, which replace the files at the end. Raises an error if another process has changed one.

        `then` is called before another process can replace them.
        """
        paths = list(self._before)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        names = [private_name(path) for path in paths]
        try:
            yield names
            with locked(paths[0].parent):
                for path, before in self._before.items():
                    if identity(path) != before:
                        raise MegatronLiteError(f"{path}: {CHANGED}. {ADVICE[errno.EBUSY]}")
                for path in paths[1:]:  # even after an interruption, old files are not beside a new one
                    path.unlink(missing_ok=True)
                for name, path in zip(names, paths, strict=True):
                    os.replace(name, path)
                then()
        finally:
            for name in names:
                with suppress(OSError):  # in a folder without write permission, which the error above reports
                    name.unlink()

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
    folder, made = target.with_name(f".new-{target.name}"), private_name(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    make_own(made)
    lock = os.open(made / MARKER, os.O_RDWR | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # without locks, no folder of another process is deleted
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            os.rename(made, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            _remove_leftover(folder)
            os.rename(made, folder)
    except BaseException:
        os.close(lock)
        remove_own(made, MARKER)
        raise
    return folder, lock


def _remove_leftover(folder: Path) -> None:
    """Delete a folder whose process has ended."""
    try:
        marker = os.open(folder / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise FileExistsError(errno.EEXIST, "it was not made by megatron-lite", str(folder)) from None
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(marker), os.lstat(folder / MARKER)):
            raise BlockingIOError
        remove_own(folder, MARKER)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another process is writing it", str(folder)) from None
    finally:
        os.close(marker)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A context that one process at a time is in for a file or folder, where the file system has locks; others wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
