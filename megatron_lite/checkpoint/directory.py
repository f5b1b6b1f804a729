"""The folder of all checkpoints of a run: which is the newest, how one appears at once, and which ones stay.

A name that starts with "iter_" is always a whole checkpoint. What is being written, replaced or deleted has another:

    .new-iter_0000100       being written; renamed when whole
    .old-iter_0000100       whole, stepped aside for a new iter_0000100; counts while that is missing
    .deleted-iter_0000100   no longer a checkpoint
    damaged-iter_0000100    could not be read; stays until someone has looked at it

The tracker names the checkpoint to go on from, and is replaced only once that one is on the disk. So a process that
is killed at any instant leaves one that can be loaded; the rest is cleaned up by the next save.
"""

import os
import shutil
import warnings
from itertools import chain, count
from pathlib import Path

from megatron_lite.checkpoint.layout import LAYOUT_FILE, iteration_folder, iteration_of
from megatron_lite.checkpoint.tensor_file import explained, sync_folder
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.context import Group

TRACKER_FILE = "latest_checkpointed_iteration.txt"


def find_latest(root: Path, *, world: Group) -> int | None:
    """The iteration to go on from, None when nothing was saved yet; the same on every rank.

    Communicates: the first rank's answer over `world`.
    """
    return on_first(lambda: read_latest(root), world)


def read_latest(root: Path) -> int | None:
    """The iteration that the tracker names; without a tracker the newest there is, or None."""
    tracker = root / TRACKER_FILE
    try:
        present = iterations(root)
        text = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.exists() else None
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or root}: cannot be read: {error.strerror}. Give this user permission, or choose "
            "another run.dir"
        ) from error
    if text is None:
        if foreign := [path.name for path in _iteration_folders(root) if not (path / LAYOUT_FILE).exists()]:
            raise CheckpointError(
                f"{root}: holds {foreign[0]}, which has no {LAYOUT_FILE} and so was not written by megatron_lite, and "
                f"there is no {TRACKER_FILE}. Choose another run.dir, or move that folder away"
            )
        return max(present, default=None)
    remedy = f"{_present(root)}. Write one of them into the file, or delete the file to use the newest"
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{tracker}: says {text[:40]!r}, which is not an iteration of megatron_lite. {remedy}")
    if not locate(root, int(text)).exists():
        raise CheckpointError(
            f"{tracker}: names iteration {text}, but {iteration_folder(int(text))} is missing. {remedy}"
        )
    return int(text)


def _present(root: Path) -> str:
    present = iterations(root)
    return f"There are iterations {', '.join(map(str, present))}" if present else "There are no iterations"


def iterations(root: Path) -> list[int]:
    """The iterations of all whole checkpoints, in order."""
    found = {iteration_of(path.name.removeprefix(".old-")) for path in _iteration_folders(root, "", ".old-")}
    return sorted(n for n in found if n is not None and (locate(root, n) / LAYOUT_FILE).exists())


def locate(root: Path, iteration: int) -> Path:
    """Where the checkpoint of this iteration is, also when a save that should replace it was killed halfway."""
    folder, old = root / iteration_folder(iteration), _aside(root, "old", iteration)
    return old if old.exists() and not folder.exists() else folder


def root_of(path: Path) -> Path:
    """The folder of all checkpoints that a user means by a run's folder, its checkpoints/ folder or an iter_ folder."""
    if is_checkpoint(path):
        return path.parent
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def is_checkpoint(path: Path) -> bool:
    """Whether the path means one checkpoint, not a folder of several."""
    return (path / LAYOUT_FILE).exists() or iteration_of(path.name) is not None


def resolve(path: Path, iteration: int | None = None) -> Path:
    """The checkpoint that a user means by an iter_ folder, or by a run's folder or its checkpoints/ folder: the newest
    in it, or the given iteration."""
    if is_checkpoint(path):
        if not path.is_dir():
            raise CheckpointError(f"{path}: does not exist. {_present(path.parent)}")
        if iteration not in (None, iteration_of(path.name)):
            raise CheckpointError(
                f"{path}: is one checkpoint, not iteration {iteration}. Give the run's folder to choose an iteration"
            )
        return path
    root = root_of(path)
    newest = read_latest(root) if iteration is None else max(iterations(root), default=None)
    if newest is None:
        raise CheckpointError(
            f"{path}: {'has no checkpoint' if path.is_dir() else 'is not a folder'}. Give a run's folder, its "
            "checkpoints/ folder or one iter_... folder in it"
        )
    if iteration is None:
        return locate(root, newest)
    if iteration not in iterations(root):
        raise CheckpointError(f"{path}: has no checkpoint of iteration {iteration}. {_present(root)}")
    return locate(root, iteration)


def place_of(folder: Path) -> tuple[Path, int]:
    """The folder of all checkpoints that this one is in, and its iteration."""
    iteration = iteration_of(folder.name.removeprefix(".old-"))
    if iteration is None:
        raise CheckpointError(
            f"{folder}: is not named after its iteration, such as {iteration_folder(100)}. Rename it to load it"
        )
    return folder.parent, iteration


def prepare(root: Path, iteration: int) -> Path:
    """A new empty folder to write the checkpoint into; what killed saves left behind is gone."""
    with explained("creating the folder", root):
        root.mkdir(parents=True, exist_ok=True)
        for path in _iteration_folders(root, ".new-", ".deleted-", ".old-"):
            final = root / path.name[path.name.index("iter_") :]
            if path.name.startswith(".old-") and not final.exists():
                os.rename(path, final)
            else:
                remove(path)
        folder = _aside(root, "new", iteration)
        folder.mkdir()
    return folder


def publish(folder: Path, root: Path, iteration: int) -> Path:
    """The folder becomes the checkpoint of this iteration, at once, and the tracker names it."""
    final, old = root / iteration_folder(iteration), _aside(root, "old", iteration)
    with explained("putting the checkpoint in place", final):
        if final.exists():
            os.rename(final, old)
            sync_folder(root)
        try:
            os.rename(folder, final)
        except OSError:
            if old.exists():
                os.rename(old, final)
            raise
        sync_folder(root)
        write_durably(root / TRACKER_FILE, str(iteration).encode())
    if old.exists():
        remove(old)
    return final


def write_durably(path: Path, data: bytes) -> None:
    """The file has this content, or after a crash the one from before; never something between."""
    temporary = path.with_name(f".new-{path.name}")
    with explained("writing", path):
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)


def prune(root: Path, newest: int, keep: int, keep_every: int) -> None:
    """Deletes all but the `keep` newest checkpoints up to `newest`, and those at multiples of `keep_every`; 0 keeps
    all, or none of these.

    Later iterations are of a run that was taken back to an older checkpoint: they go when it comes there again.
    """
    if keep:
        for iteration in [n for n in iterations(root) if n <= newest][:-keep]:
            if not (keep_every and iteration % keep_every == 0):
                remove(locate(root, iteration))


def set_aside(root: Path, iteration: int, before: int) -> Path:
    """Where the folder of a damaged checkpoint is now; the tracker names the one before it."""
    folder = locate(root, iteration)
    names = (f"damaged-{iteration_folder(iteration)}{again}" for again in chain([""], (f".{n}" for n in count(2))))
    aside = next(root / name for name in names if not (root / name).exists())
    write_durably(root / TRACKER_FILE, str(before).encode())
    with explained("setting the damaged checkpoint aside", folder):
        os.rename(folder, aside)
        sync_folder(root)
    return aside


def remove(folder: Path) -> None:
    """Deletes a folder, under another name first, so that half of a checkpoint never looks like one.

    A failure is a warning: the checkpoint that was just saved is safe, and the next save tries again.
    """
    doomed = _aside(folder.parent, "deleted", int(folder.name[folder.name.index("iter_") + 5 :]))
    try:
        if doomed != folder:
            if doomed.exists():
                shutil.rmtree(doomed)
            os.rename(folder, doomed)
            sync_folder(folder.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        warnings.warn(f"{folder}: cannot be deleted: {error}; delete it by hand to free its space", stacklevel=2)


def _aside(root: Path, why: str, iteration: int) -> Path:
    return root / f".{why}-{iteration_folder(iteration)}"


def _iteration_folders(root: Path, *prefixes: str) -> list[Path]:
    """Folders whose name is one of the prefixes (none: the plain name) and an iteration's."""
    if not root.is_dir():
        return []
    names = sorted(path.name for path in root.iterdir() if path.is_dir())
    return [
        root / name
        for name in names
        for prefix in prefixes or ("",)
        if name.startswith(prefix) and iteration_of(name[len(prefix) :]) is not None
    ]
