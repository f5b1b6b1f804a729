"""The checkpoint that a run resumes from, for any state of its folder, and the pruning of old ones."""

import os
import shutil
from pathlib import Path

import pytest

from megatron_lite.checkpoint.directory import (
    iterations,
    locate,
    place_of,
    prepare,
    prune,
    publish,
    read_latest,
    resolve,
    set_aside,
    write_durably,
)
from megatron_lite.errors import CheckpointError
from megatron_lite.files import MARKER


def create(root: Path, *names: str, tracker: str | None = None) -> Path:
    """Create a folder of checkpoints, each with a layout.json."""
    root.mkdir(exist_ok=True)
    for name in names:
        (root / name).mkdir()
        (root / name / "layout.json").write_text("{}")
    if tracker is not None:
        (root / "latest_checkpointed_iteration.txt").write_text(tracker)
    return root


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("tracker", ["50", " 50\n", "0000050"])
def test_the_tracker_names_the_checkpoint_to_load(tmp_path, tracker):
    """A user can write an older iteration into it."""
    root = create(tmp_path, "iter_0000050", "iter_0000100", tracker=tracker)
    assert read_latest(root) == 50


def test_without_a_tracker_the_newest_complete_checkpoint_is_loaded(tmp_path):
    """The first save was killed before it wrote the tracker, or a user copied the folder."""
    root = create(tmp_path, "iter_0000050", "iter_0000100", ".new-iter_0000200", ".deleted-iter_0000300")
    assert read_latest(root) == 100


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_the_latest_iteration_of_an_empty_folder_is_none(tmp_path, name):
    """A new run then starts at iteration 0."""
    (tmp_path / "empty").mkdir()
    assert read_latest(tmp_path / name) is None


def test_unfinished_saves_are_not_checkpoints(tmp_path):
    assert read_latest(create(tmp_path, ".new-iter_0000001")) is None


@pytest.mark.parametrize("text", ["", "garbage", "release", "-5", "1.5", "٣", "\x00\x01"])
def test_the_error_of_a_garbage_tracker_lists_the_iterations(tmp_path, text):
    """A start at iteration 0 instead would overwrite the run."""
    root = create(tmp_path, "iter_0000050", "iter_0000100", tracker=text)
    with pytest.raises(CheckpointError, match=r"is not an iteration\. There are iterations 50, 100"):
        read_latest(root)


def test_a_tracker_that_is_not_text_is_an_error(tmp_path):
    root = create(tmp_path, "iter_0000050")
    (root / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe5")
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt: .* is not an iteration"):
        read_latest(root)


def test_the_error_of_a_tracker_without_its_checkpoint_lists_the_iterations(tmp_path):
    root = create(tmp_path, "iter_0000050", tracker="100")
    with pytest.raises(CheckpointError) as caught:
        read_latest(root)
    assert str(caught.value) == (
        f"{root}/latest_checkpointed_iteration.txt: names iteration 100, which is missing. There are iterations 50. "
        "Write one of them into the file, or delete the file to use the newest"
    )
    shutil.rmtree(root / "iter_0000050")
    with pytest.raises(CheckpointError, match="There are no iterations"):
        read_latest(root)


def test_checkpoints_of_another_program_are_an_error(tmp_path):
    """Megatron-LM's folders have the same names, so a run would mix both."""
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"iter_0000100 has no layout\.json\. Choose another run.dir"):
        read_latest(tmp_path)


def test_the_error_of_an_unreadable_folder_names_the_reason(tmp_path, monkeypatch):
    root = create(tmp_path, "iter_0000001", tracker="1")

    def raise_permission_denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", raise_permission_denied)
    with pytest.raises(
        CheckpointError, match=f"^{root}: cannot be read: Permission denied. Give permission, or choose another run.dir"
    ):
        read_latest(root)


def test_leftovers_are_deleted_and_complete_checkpoints_restored(tmp_path):
    """Killed saves leave partly written, partly deleted and renamed checkpoints."""
    leftovers = (".new-iter_0000003", ".deleted-iter_0000001", ".old-iter_0000002", ".old-iter_0000004")
    root = create(tmp_path, *leftovers, "iter_0000004", tracker="2")
    (root / ".old-iter_0000002" / "old").touch()
    assert iterations(root) == [2, 4] and locate(root, 2).name == ".old-iter_0000002"
    folder = prepare(root, 3)
    assert names(root) == [".new-iter_0000003", "iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt"]
    assert (root / "iter_0000002" / "old").exists() and names(folder) == [MARKER]


def test_a_failed_publish_restores_the_previous_checkpoint(tmp_path, monkeypatch):
    root = create(tmp_path, "iter_0000001", ".new-iter_0000001", tracker="1")
    (root / "iter_0000001" / "old").touch()
    real = os.rename

    def rename(source, target):
        if Path(source).name.startswith(".new-"):
            raise OSError(5, "Input/output error", str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match="putting the checkpoint in place failed: Input/output error"):
        publish(root / ".new-iter_0000001", root, 1)
    assert (root / "iter_0000001" / "old").exists() and read_latest(root) == 1


def test_pruning_keeps_later_checkpoints_of_an_abandoned_run(tmp_path):
    root = create(tmp_path, *(f"iter_{n:07d}" for n in (1, 2, 3, 4, 9)))
    prune(root, 4, 0, 0)
    assert iterations(root) == [1, 2, 3, 4, 9]
    prune(root, 4, 2, 0)
    assert iterations(root) == [3, 4, 9]
    prune(root, 4, 7, 0)
    assert iterations(root) == [3, 4, 9]


def test_pruning_keeps_the_newest_and_every_nth_checkpoint(tmp_path):
    root = create(tmp_path, *(f"iter_{n:07d}" for n in (10, 20, 30, 40, 50, 60)))
    prune(root, 60, 1, 20)
    assert iterations(root) == [20, 40, 60]
    prune(root, 60, 0, 40)
    assert iterations(root) == [20, 40, 60]


def test_a_damaged_checkpoint_is_renamed_and_the_tracker_names_the_one_before(tmp_path, monkeypatch):
    """The new name is visible and unused. A failure halfway loses nothing."""
    root = create(tmp_path, "iter_0000010", "iter_0000020", "damaged-iter_0000020", tracker="20")
    (root / "iter_0000020" / "this").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda a, b: (_ for _ in ()).throw(OSError(5, "Input/output error", str(a))))
        with pytest.raises(CheckpointError, match="setting the damaged checkpoint aside failed: Input/output error"):
            set_aside(root, 20, 10)
    assert read_latest(root) == 10 and iterations(root) == [10, 20]
    assert set_aside(root, 20, 10) == root / "damaged-iter_0000020.2"
    assert read_latest(root) == 10 and iterations(root) == [10] and (root / "damaged-iter_0000020.2" / "this").exists()
    prepare(root, 20)
    assert (root / "damaged-iter_0000020").exists()


@pytest.mark.parametrize(
    "rename", [lambda root: set_aside(root, 20, 10), lambda root: prune(root, 30, 1, 0)], ids=["set aside", "prune"]
)
def test_the_new_name_of_a_checkpoint_survives_a_power_failure(tmp_path, monkeypatch, rename):
    """With its old name a damaged checkpoint would be found again, or one that is half deleted would be loaded."""
    root = create(tmp_path, "iter_0000010", "iter_0000020", "iter_0000030", tracker="30")
    changes = []

    def fsync(descriptor, call=os.fsync):
        changes.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        call(descriptor)

    def move(old, new, call=os.rename):
        changes.append(("rename", str(new)))
        call(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", move)
    rename(root)
    renames = [index for index, (name, _) in enumerate(changes) if name == "rename"]
    assert renames
    assert [changes[index + 1 : index + 2] for index in renames] == [[("fsync", str(root))]] * len(renames)


def test_a_checkpoint_that_cannot_be_deleted_is_renamed_with_a_warning(tmp_path, monkeypatch):
    """The new checkpoint is complete, so the run continues."""
    root = create(tmp_path, "iter_0000001", "iter_0000002")

    def raise_permission_denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    (root / "iter_0000001" / "mp_rank_00").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", raise_permission_denied)
        with pytest.warns(
            UserWarning, match="iter_0000001: cannot be deleted: .*Permission denied.* delete it by hand"
        ):
            prune(root, 2, 1, 0)
    assert iterations(root) == [2] and (root / ".deleted-iter_0000001").exists()
    prepare(root, 3)
    assert not (root / ".deleted-iter_0000001").exists()


def test_a_failed_write_keeps_the_previous_file(tmp_path, monkeypatch):
    """A truncated tracker would name another iteration."""
    path = tmp_path / "tracker"
    write_durably(path, b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(CheckpointError, match=f"^{path}: writing failed: No space left on device"):
            write_durably(path, b"2")
    assert path.read_bytes() == b"1"


def test_a_checkpoint_is_given_by_its_run_its_parent_folder_or_its_own_folder(tmp_path):
    root = create(tmp_path / "checkpoints", "iter_0000001", "iter_0000002", tracker="1")
    newest = root / "iter_0000001"
    assert resolve(tmp_path) == resolve(root) == resolve(newest) == newest
    assert resolve(root / "iter_0000002") == root / "iter_0000002"


@pytest.mark.parametrize(("name", "message"), [("empty", "has no checkpoint"), ("missing", "is not a folder")])
def test_a_folder_without_checkpoint_is_an_error(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=rf"{name}: {message}. Give a run.dir or iter_... folder"):
        resolve(tmp_path / name)


def test_an_iteration_is_chosen_by_its_number_or_its_folder(tmp_path):
    """The error of a wrong iteration lists the present ones."""
    root = create(tmp_path / "checkpoints", "iter_0000001", "iter_0000002", tracker="2")
    assert resolve(tmp_path, 1) == resolve(root, 1) == resolve(root / "iter_0000001", 1) == root / "iter_0000001"
    with pytest.raises(CheckpointError, match=r"has no checkpoint of iteration 3\. There are iterations 1, 2$"):
        resolve(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"iter_0000003: does not exist\. There are iterations 1, 2$"):
        resolve(root / "iter_0000003")
    with pytest.raises(CheckpointError, match=r"iter_0000001: is not iteration 2\. Give the run's folder"):
        resolve(root / "iter_0000001", 2)


def test_a_folder_that_is_not_named_after_its_iteration_is_an_error(tmp_path):
    assert place_of(tmp_path / "iter_0000012") == place_of(tmp_path / ".old-iter_0000012") == (tmp_path, 12)
    with pytest.raises(CheckpointError, match=r"best: is not named after its iteration\. Rename it like iter_0000100"):
        place_of(tmp_path / "best")
