"""A run whose newest checkpoint is damaged resumes from the previous one, or stops with an error."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_lite.checkpoint.tensor_file import TensorFile
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.launch.pool import RanksFailed
from tests.helpers.checkpoints import flip_a_bit
from tests.helpers.printed import unwrapped
from tests.helpers.runs import rows, tensor_files, train_to_end

COMMON = {"checkpoint__interval": 2, "checkpoint__keep": 0, "train__micro_batch_size": 2}


def truncate(folder: Path) -> None:
    path = folder / "mp_rank_00" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


DAMAGES = {
    "truncated": (truncate, "bytes, layout.json lists"),
    "flipped bit": (flip_a_bit, "has checksum"),
    "no model file": (
        lambda folder: (folder / "mp_rank_00/model.safetensors").unlink(),
        "listed in layout.json but missing",
    ),
    "no layout": (lambda folder: (folder / "layout.json").unlink(), "has tensors but no layout.json"),
    "garbage layout": (lambda folder: (folder / "layout.json").write_text("{}"), "or damaged"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run. Tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    train_to_end(folder, "codegeex", **COMMON, train__iterations=6)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_renamed_and_the_previous_one_resumed(finished, tmp_path, capsys, damage):
    """The result is bit for bit that of the undamaged run."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    root = folder / "checkpoints"
    inflict, words = DAMAGES[damage]
    inflict(root / "iter_0000006")
    train_to_end(folder, "codegeex", **COMMON, train__iterations=6)
    out = unwrapped(capsys.readouterr().out)
    (line,) = [line for line in out.splitlines() if line.startswith("DAMAGED checkpoint: ")]
    assert words in line and line.endswith("; it is now damaged-iter_0000006. Falling back to iteration 4")
    assert f"loading checkpoint from {root} at iteration 4\n" in out
    assert sorted(path.name for path in root.glob("*iter_*")) == [
        "damaged-iter_0000006",
        *(f"iter_000000{n}" for n in (2, 4, 6)),
    ]
    assert rows(folder) == rows(finished)
    newest = "checkpoints/iter_0000006"
    assert tensor_files(folder / newest) == tensor_files(finished / newest)


def test_the_newest_valid_checkpoint_is_resumed_after_several_damaged_ones(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for iteration in (4, 6):
        truncate(folder / f"checkpoints/iter_{iteration:07d}")
    train_to_end(folder, "codegeex", **COMMON, train__iterations=6)
    assert unwrapped(capsys.readouterr().out).count("DAMAGED checkpoint: ") == 2
    assert rows(folder) == rows(finished)


def test_damage_is_an_error_without_fallback_or_another_checkpoint(finished, tmp_path):
    """A start at iteration 0 would overwrite the run."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    root = folder / "checkpoints"
    truncate(root / "iter_0000006")
    with pytest.raises(DamagedCheckpoint, match=r"layout.json lists .*checkpoint.fallback would use iteration 4$"):
        train_to_end(folder, "codegeex", **COMMON, train__iterations=6, checkpoint__fallback="false")
    for iteration in (2, 4):
        shutil.rmtree(root / f"iter_{iteration:07d}")
    with pytest.raises(DamagedCheckpoint, match=f"There is no checkpoint before it in {root}$"):
        train_to_end(folder, "codegeex", **COMMON, train__iterations=6)
    assert [path.name for path in root.glob("*iter_*")] == ["iter_0000006"]


def test_a_fallback_does_not_change_the_folder_of_another_run(finished, tmp_path, capsys):
    """A run that reads checkpoint.load must not rename the checkpoints there."""
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    truncate(other / "checkpoints/iter_0000006")
    before = sorted(str(path) for path in other.rglob("*"))
    train_to_end(tmp_path / "run", "codegeex", **COMMON, train__iterations=6, checkpoint__load=other)
    (line,) = [line for line in unwrapped(capsys.readouterr().out).splitlines() if line.startswith("DAMAGED")]
    assert line.endswith("latest_checkpointed_iteration.txt. Falling back to iteration 4")
    assert sorted(str(path) for path in other.rglob("*")) == before


def test_a_checkpoint_of_another_model_is_not_damage(finished, tmp_path):
    """A fallback would hide the mistake and rename valid checkpoints."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        train_to_end(folder, "codegeex", **COMMON, train__iterations=6, model__num_heads=2)
    assert not list(folder.glob("checkpoints/damaged*"))


def train_tp2(folder: str) -> None:
    train_to_end(Path(folder), "codegeex", **COMMON, train__iterations=6, parallel__tensor=2)


def train_tp2_with_a_missing_mount(folder: str, first_may_read: bool) -> None:
    """Train where rank 1 does not find one file. Rank 0 reads it, or gets an error if `first_may_read` is false."""
    if dist.get_rank() == 1:
        patch = mock.patch.object(TensorFile, "__init__", lose_one_file)
    else:
        patch = nullcontext() if first_may_read else mock.patch.object(TensorFile, "check", raise_permission_denied)
    with patch:
        train_tp2(folder)


INIT = TensorFile.__init__


def lose_one_file(self, path, info):
    INIT(self, path.with_name("missing") if path.parent.name == "mp_rank_00" else path, info)


def raise_permission_denied(self):
    raise CheckpointError(f"{self.path}: cannot be read: Permission denied")


@pytest.mark.parametrize(
    "first_may_read, words",
    [
        (True, ("But the first rank reads", "do all machines see the same files?")),
        (False, ("But the first rank cannot confirm it", "cannot be read: Permission denied")),
    ],
)
def test_a_file_that_only_one_machine_misses_is_not_damage(ranks, finished, tmp_path, first_may_read, words):
    """Otherwise a missing mount would cost a valid checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    with pytest.raises(RanksFailed) as raised:
        ranks(2, train_tp2_with_a_missing_mount, str(folder), first_may_read)
    assert all(word in str(raised.value) for word in words)
    assert not list(folder.glob("checkpoints/damaged*"))


def test_all_ranks_fall_back_from_damage_that_one_rank_finds(ranks, finished, tmp_path):
    """Ranks that resumed from different iterations would train nonsense."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    ranks(2, train_tp2, str(folder))
    path = folder / "checkpoints" / "iter_0000006" / "mp_rank_00" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    ranks(2, train_tp2, str(folder))
    assert (folder / "checkpoints/damaged-iter_0000006").exists()
    assert [row["iteration"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
