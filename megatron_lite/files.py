"""Writes that a crash cannot split, proofs that a file may be replaced or deleted, and advice about errors.

A name proves nothing, so no write goes through a link, and a folder is deleted only with a file that was made with it.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megatron_lite.errors import MegatronLiteError

MARKER = ".made-by-megatron-lite"
MOST_BYTES = 256 << 20  # of a file that is read at once; layout.json of a model on 4,096 ranks has a tenth of it

ADVICE = {
    errno.ENOSPC: "Free some space, lower checkpoint.keep, or write to another disk (run.dir)",
    errno.EDQUOT: "Free some of your quota, lower checkpoint.keep, or write to another disk (run.dir)",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Give this user write permission there, or write elsewhere (run.dir)"),
    errno.ENOENT: "Every rank must see the same run.dir; put it on a file system that all machines share",
    errno.EEXIST: "There is a file of that name; remove it, or write elsewhere (run.dir)",
    errno.ELOOP: "No file is written through a symbolic link; remove the link, or write elsewhere (run.dir)",
    errno.EISDIR: "A folder has this name; rename it, or write elsewhere (run.dir)",
    errno.EBUSY: "Keep its result, or write to another name",
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


def open_file(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """A file to read. A device is an OSError; a pipe to which no process writes is empty. Both might never end."""
    file: Any = open(path, "rb", buffering, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_IFMT(os.fstat(file.fileno()).st_mode) not in (stat.S_IFREG, stat.S_IFIFO):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    os.set_blocking(file.fileno(), True)
    return file


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file that `open_file` opens. OSError: they are more than any file of text has."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes", os.fspath(path))
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


def identity(path: Path) -> tuple[int, ...] | None:
    """The file that has this name now, as comparable numbers; None: there is none.

    OSError: the name is that of a link, a folder or a device, which no file may replace.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    kinds = {stat.S_IFLNK: (errno.ELOOP, "it is a symbolic link"), stat.S_IFDIR: (errno.EISDIR, "Is a directory")}
    if not stat.S_ISREG(found.st_mode):
        raise OSError(*kinds.get(stat.S_IFMT(found.st_mode), (errno.EEXIST, "it is not a regular file")), str(path))
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def private_name(path: Path) -> Path:
    """A name beside the path that no other process has."""
    return path.with_name(f".new-{path.name}.{os.urandom(8).hex()}")


def not_through_links(path: str, flags: int) -> int:
    """An opener for `open` that raises OSError at a symbolic link, and at a pipe which no process reads."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def atomic_write(path: Path, data: bytes | str | Callable[[BinaryIO], Any], *, durable: bool = True) -> None:
    """Replace the file's content: a reader, or a restart after a crash, finds the old content or the new one.

    `data` may be a function that writes.
    A `durable` write is on the disk at return; any other may be lost with the machine, but does not wait.
    """
    identity(path)
    temporary = private_name(path)
    try:
        with temporary.open("xb") as file:
            data(file) if callable(data) else file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file lies in a folder once links are resolved. In the hub's cache, snapshots have links to `blobs`."""
    homes = [home := folder.resolve(), *(each.parent / "blobs" for each in home.parents if each.name == "snapshots")]
    return any(path.resolve().is_relative_to(each) for each in homes)


def make_own(folder: Path) -> None:
    """Create a folder that `remove_own` may delete."""
    folder.mkdir()
    (folder / MARKER).touch(exist_ok=False)


def is_own(folder: Path, *markers: str) -> bool:
    """Whether a folder, which is no link, has one of the markers or no file at all."""
    own = any(os.path.isfile(folder / name) for name in markers)
    return not folder.is_symlink() and folder.is_dir() and (own or not os.listdir(folder))


def check_own(folder: Path, *markers: str) -> None:
    """OSError: `is_own` is false."""
    if not is_own(folder, *markers):
        raise FileExistsError(errno.EEXIST, "it is a link, or was not made by megatron-lite", str(folder))


def remove_own(folder: Path, *markers: str) -> None:
    """Delete a folder with one of these marker files, which go last: the rest of an interruption still has one."""
    check_own(folder, *markers)
    for path in sorted(folder.iterdir(), key=lambda path: path.name in markers):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()
