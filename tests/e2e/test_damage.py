"""A run whose newest checkpoint is damaged goes on from the one before it, or stops and says so."""

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
from tests.helpers.runs import rows, run_to_the_end, tensor_files

COMMON = {"checkpoint__interval": 2, "checkpoint__keep": 0, "train__micro_batch_size": 2}


def cut_off(folder: Path) -> None:
    path = folder / "mp_rank_00" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


DAMAGES = {
    "cut off": (cut_off, "bytes, layout.json lists"),
    "flipped bit": (flip_a_bit, "has checksum"),
    "no shard": (
        lambda folder: (folder / "mp_rank_00/model.safetensors").unlink(),
        "listed in layout.json but missing",
    ),
    "no layout": (lambda folder: (folder / "layout.json").unlink(), "has tensors but no layout.json"),
    "garbage layout": (lambda folder: (folder / "layout.json").write_text("{}"), "or damaged"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_to_the_end(folder, "codegeex", **COMMON, train__iterations=6)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_loaded_and_the_damaged_one_set_aside(whole, tmp_path, capsys, damage):
    """And the run comes to the same end, to the bit."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    root = folder / "checkpoints"
    spoil, words = DAMAGES[damage]
    spoil(root / "iter_0000006")
    run_to_the_end(folder, "codegeex", **COMMON, train__iterations=6)
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith(" DAMAGED checkpoint: ")]
    assert words in line and line.endswith("; it is now damaged-iter_0000006. Falling back to iteration 4")
    assert f" loading checkpoint from {root} at iteration 4\n" in out
    assert sorted(path.name for path in root.glob("*iter_*")) == [
        "damaged-iter_0000006",
        *(f"iter_000000{n}" for n in (2, 4, 6)),
    ]
    assert rows(folder) == rows(whole)
    newest = "checkpoints/iter_0000006"
    assert tensor_files(folder / newest) == tensor_files(whole / newest)


def test_several_damaged_ones_are_passed_by(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for iteration in (4, 6):
        cut_off(folder / f"checkpoints/iter_{iteration:07d}")
    run_to_the_end(folder, "codegeex", **COMMON, train__iterations=6)
    assert capsys.readouterr().out.count(" DAMAGED checkpoint: ") == 2
    assert rows(folder) == rows(whole)


def test_without_fallback_or_another_one_training_stops(whole, tmp_path):
    """Silently starting anew would write over the run."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    root = folder / "checkpoints"
    cut_off(root / "iter_0000006")
    with pytest.raises(DamagedCheckpoint, match=r"layout.json lists .*checkpoint.fallback would use iteration 4$"):
        run_to_the_end(folder, "codegeex", **COMMON, train__iterations=6, checkpoint__fallback="false")
    for iteration in (2, 4):
        shutil.rmtree(root / f"iter_{iteration:07d}")
    with pytest.raises(DamagedCheckpoint, match=f"There is no checkpoint before it in {root}$"):
        run_to_the_end(folder, "codegeex", **COMMON, train__iterations=6)
    assert [path.name for path in root.glob("*iter_*")] == ["iter_0000006"]


def test_a_folder_of_another_run_is_left_as_it_is(whole, tmp_path, capsys):
    """checkpoint.load reads it; to tidy it up is not this run's business."""
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    cut_off(other / "checkpoints/iter_0000006")
    before = sorted(str(path) for path in other.rglob("*"))
    run_to_the_end(tmp_path / "run", "codegeex", **COMMON, train__iterations=6, checkpoint__load=other)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" DAMAGED")]
    assert line.endswith("latest_checkpointed_iteration.txt. Falling back to iteration 4")
    assert sorted(str(path) for path in other.rglob("*")) == before


def test_another_model_is_no_damage(whole, tmp_path):
    """Falling back would only hide the mistake, and set good checkpoints aside."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        run_to_the_end(folder, "codegeex", **COMMON, train__iterations=6, model__num_heads=2)
    assert not list(folder.glob("checkpoints/damaged*"))


def fall_back(folder: str) -> None:
    run_to_the_end(Path(folder), "codegeex", **COMMON, train__iterations=6, parallel__tensor=2)


def blind(folder: str, first_may_read: bool) -> None:
    """As `fall_back`, where the second rank's machine does not see one file."""
    if dist.get_rank() == 1:
        patch = mock.patch.object(TensorFile, "__init__", lose_one_file)
    else:
        patch = nullcontext() if first_may_read else mock.patch.object(TensorFile, "check", refuse)
    with patch:
        fall_back(folder)


INIT = TensorFile.__init__


def lose_one_file(self, path, info):
    INIT(self, path.with_name("not there") if path.parent.name == "mp_rank_00" else path, info)


def refuse(self):
    raise CheckpointError(f"{self.path}: cannot be read: Permission denied")


@pytest.mark.parametrize(
    "first_may_read, words",
    [
        (True, ("But the first rank reads", "do all machines see the same files?")),
        (False, ("But the first rank cannot confirm it", "cannot be read: Permission denied")),
    ],
)
def test_a_file_that_one_machine_does_not_see_is_no_damage(ranks, whole, tmp_path, first_may_read, words):
    """A missing mount would else cost a good checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    with pytest.raises(RanksFailed) as raised:
        ranks(2, blind, str(folder), first_may_read)
    assert all(word in str(raised.value) for word in words)
    assert not list(folder.glob("checkpoints/damaged*"))


def test_damage_that_one_rank_meets_takes_all_of_them_back(ranks, whole, tmp_path):
    """Ranks that went on from different iterations would train nonsense."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    ranks(2, fall_back, str(folder))
    path = folder / "checkpoints" / "iter_0000006" / "mp_rank_00" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    ranks(2, fall_back, str(folder))
    assert (folder / "checkpoints/damaged-iter_0000006").exists()
    assert [row["iteration"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
