"""The folder of a run's checkpoints: which one is the newest, how one appears at once, and which ones stay.

A name that starts with "iter_" is always a complete checkpoint. Unfinished work has other names:

    .new-iter_0000100       a checkpoint that is being written; renamed when complete
    .old-iter_0000100       complete, to be replaced by a new iter_0000100; valid while that one is missing
    .deleted-iter_0000100   no longer a checkpoint
    damaged-iter_0000100    a checkpoint that could not be read; stays until a user removes it

The tracker names the checkpoint to resume from. It is replaced only when that checkpoint is on the disk, so a process
can be killed at any time and a loadable checkpoint remains. The next save removes leftovers.

Only folders with a layout.json, or with the marker of a save, are renamed or deleted; links never are.
"""

import os
import warnings
from itertools import count
from pathlib import Path

from megatron_lite.checkpoint.layout import LAYOUT_FILE, iteration_folder, iteration_of
from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.errors import CheckpointError
from megatron_lite.files import MARKER, atomic_write, check_own, is_own, make_own, read_file, remove_own, sync_folder

TRACKER_FILE = "latest_checkpointed_iteration.txt"
MARKERS = (LAYOUT_FILE, MARKER)  # of a complete checkpoint, and of one that is being written


def read_latest(root: Path) -> int | None:
    """The iteration to resume from: that of the tracker, else the newest; None before the first save."""
    tracker = root / TRACKER_FILE
    try:
        newest = max(iterations(root), default=None)
        text = read_file(tracker).decode(errors="replace").strip() if tracker.exists() else None
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or root}: cannot be read: {error.strerror}. Give permission, or choose another run.dir"
        ) from error
    if text is None:
        foreign = [path.name for path in _iteration_folders(root, "") if not (path / LAYOUT_FILE).exists()]
        if foreign:
            raise CheckpointError(f"{root}: {foreign[0]} has no {LAYOUT_FILE}. Choose another run.dir, or move it away")
        return newest
    remedy = f"{describe_iterations(root)}. Write one of them into the file, or delete the file to use the newest"
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise CheckpointError(f"{tracker}: {text[:40]!r} is not an iteration. {remedy}")
    if not locate(root, int(text)).exists():
        raise CheckpointError(f"{tracker}: names iteration {text}, which is missing. {remedy}")
    return int(text)


def describe_iterations(root: Path) -> str:
    """The iterations of all complete checkpoints, as a sentence for messages."""
    found = iterations(root)
    return f"There are iterations {', '.join(map(str, found))}" if found else "There are no iterations"


def iterations(root: Path) -> list[int]:
    """The iterations of all complete checkpoints, in order."""
    found = {iteration_of(path.name.removeprefix(".old-")) for path in _iteration_folders(root, "", ".old-")}
    return sorted(n for n in found if n is not None and (locate(root, n) / LAYOUT_FILE).exists())


def locate(root: Path, iteration: int) -> Path:
    """The folder of this checkpoint, also after a save that was to replace it was killed."""
    folder, old = root / iteration_folder(iteration), _unfinished(root, "old", iteration)
    return old if old.exists() and not folder.exists() else folder


def root_of(path: Path) -> Path:
    """The folder of all checkpoints for a run's folder, its checkpoints/ folder or an iter_ folder."""
    if is_checkpoint(path):
        return path.parent
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def is_checkpoint(path: Path) -> bool:
    """True where the path is one checkpoint rather than a folder of several."""
    return (path / LAYOUT_FILE).exists() or iteration_of(path.name) is not None


def resolve(path: Path, iteration: int | None = None) -> Path:
    """The checkpoint for an iter_ folder, or the newest or given one in a run's folder or its checkpoints/ folder."""
    if is_checkpoint(path):
        if not path.is_dir():
            raise CheckpointError(f"{path}: does not exist. {describe_iterations(path.parent)}")
        if iteration not in (None, iteration_of(path.name)):
            raise CheckpointError(f"{path}: is not iteration {iteration}. Give the run's folder to choose an iteration")
        return path
    root = root_of(path)
    wanted = read_latest(root) if iteration is None else iteration
    if wanted is None or not path.is_dir():
        problem = "has no checkpoint" if path.is_dir() else "is not a folder"
        raise CheckpointError(f"{path}: {problem}. Give a run.dir or iter_... folder")
    if iteration is not None and iteration not in iterations(root):
        raise CheckpointError(f"{path}: has no checkpoint of iteration {iteration}. {describe_iterations(root)}")
    return locate(root, wanted)


def place_of(folder: Path) -> tuple[Path, int]:
    """The parent folder of a checkpoint, and its iteration."""
    iteration = iteration_of(folder.name.removeprefix(".old-"))
    if iteration is None:
        raise CheckpointError(f"{folder}: is not named after its iteration. Rename it like {iteration_folder(100)}")
    return folder.parent, iteration


def prepare(root: Path, iteration: int) -> Path:
    """Create an empty folder to write the checkpoint into, and remove leftovers of killed saves."""
    with save_errors("creating the folder", root):
        root.mkdir(parents=True, exist_ok=True)
        for path in [
            each for each in _iteration_folders(root, ".new-", ".deleted-", ".old-") if is_own(each, *MARKERS)
        ]:
            final = root / path.name[path.name.index("iter_") :]
            if path.name.startswith(".old-") and not final.exists():
                os.rename(path, final)
            else:
                remove(path)
        folder = _unfinished(root, "new", iteration)
        make_own(folder)
    return folder


def publish(folder: Path, root: Path, iteration: int) -> Path:
    """Rename the folder to the checkpoint of this iteration, and name it in the tracker."""
    final, old = root / iteration_folder(iteration), _unfinished(root, "old", iteration)
    with save_errors("putting the checkpoint in place", final):
        if final.exists():
            check_own(final, *MARKERS)
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
        (final / MARKER).unlink(missing_ok=True)
    if old.exists():
        remove(old)
    return final


def write_durably(path: Path, data: bytes) -> None:
    """`files.atomic_write`, with a CheckpointError on failure."""
    with save_errors("writing", path):
        atomic_write(path, data)


def prune(root: Path, newest: int, keep: int, keep_every: int) -> None:
    """Delete checkpoints up to `newest`, except the last `keep` (0: all) and multiples of `keep_every` (0: none).

    Later iterations belong to a run that was reset to an older checkpoint; it replaces them when it reaches them.
    """
    if keep:
        for iteration in [n for n in iterations(root) if n <= newest][:-keep]:
            if not (keep_every and iteration % keep_every == 0):
                remove(locate(root, iteration))


def set_aside(root: Path, iteration: int, before: int) -> Path:
    """Rename a damaged checkpoint, name the one of iteration `before` in the tracker, and return the new path."""
    folder = locate(root, iteration)
    damaged, numbers = root / f"damaged-{iteration_folder(iteration)}", count(2)
    while damaged.exists():
        damaged = damaged.with_suffix(f".{next(numbers)}")
    write_durably(root / TRACKER_FILE, str(before).encode())
    with save_errors("setting the damaged checkpoint aside", folder):
        os.rename(folder, damaged)
        sync_folder(root)
    return damaged


def remove(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that an incomplete folder never looks like a checkpoint.

    A failure is a warning: the checkpoint that was just saved is safe, and the next save tries again.
    """
    deleted = folder.parent / f".deleted-{folder.name[folder.name.index('iter_') :]}"
    try:
        check_own(folder, *MARKERS)
        if deleted != folder:
            if deleted.exists():
                remove_own(deleted, *MARKERS)
            os.rename(folder, deleted)
            sync_folder(folder.parent)
        remove_own(deleted, *MARKERS)
    except OSError as error:
        warnings.warn(f"{folder}: cannot be deleted: {error}; delete it by hand to free its space", stacklevel=2)


def _unfinished(root: Path, state: str, iteration: int) -> Path:
    return root / f".{state}-{iteration_folder(iteration)}"


def _iteration_folders(root: Path, *prefixes: str) -> list[Path]:
    """Folders named by one of the prefixes followed by an iteration's folder name."""
    if not root.is_dir():
        return []
    names = sorted(path.name for path in root.iterdir() if path.is_dir())
    return [
        root / name
        for name in names
        for prefix in prefixes
        if name.startswith(prefix) and iteration_of(name[len(prefix) :]) is not None
    ]
