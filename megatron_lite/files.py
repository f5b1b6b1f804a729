"""Writes that a crash cannot split, and advice about errors of the file system."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.errors import MegatronLiteError

ADVICE = {
    errno.ENOSPC: "Free some space, lower checkpoint.keep, or write to another disk (run.dir)",
    errno.EDQUOT: "Free some of your quota, lower checkpoint.keep, or write to another disk (run.dir)",
    errno.EACCES: "Give this user write permission there, or write elsewhere (run.dir)",
    errno.EPERM: "Give this user write permission there, or write elsewhere (run.dir)",
    errno.ENOENT: "Every rank must see the same run.dir; put it on a file system that all machines share",
    errno.EEXIST: "There is a file of that name; remove it, or write elsewhere (run.dir)",
    errno.EROFS: "The file system is read-only; write elsewhere (run.dir)",
}


@contextmanager
def disk_errors(action: str, path: Path, kind: type[MegatronLiteError], note: str = "") -> Iterator[None]:
    """Raise an OSError as a `kind` that names the path, the reason and the remedy; `note` ends its message."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "Check the disk, or write to another one (run.dir)")
        raise kind(f"{error.filename or path}: {action} failed: {error.strerror or error}. {advice}{note}") from error


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file. A device is an OSError; a pipe to which no process writes is empty. Both might never end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if stat.S_IFMT(os.fstat(file.fileno()).st_mode) not in (stat.S_IFREG, stat.S_IFIFO):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        os.set_blocking(file.fileno(), True)
        return file.read()


def sync_folder(folder: Path) -> None:
    """Return when names created, renamed or removed in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def atomic_write(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Replace the file's content: a reader, or a restart after a crash, finds the old content or the new one.

    A `durable` write is on the disk at return; any other may be lost with the machine, but does not wait.
    """
    temporary = path.with_name(f".new-{path.name}")
    with temporary.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        sync_folder(path.parent)
