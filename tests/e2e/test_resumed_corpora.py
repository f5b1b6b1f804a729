"""A run resumes with the corpora of its checkpoint, known by their content."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import LAYOUT_FILE, dump_layout, read_layout
from megatron_lite.config.load import load_config
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.training.pretrain import pretrain
from tests.helpers.command import run_here, tiny_yaml
from tests.helpers.corpora import write_corpus
from tests.helpers.printed import unwrapped

LENGTHS = [900, 1500, 600]
SMALL = {"train": {"iterations": 2, "eval_iterations": 0}, "checkpoint": {"interval": 2}}


def trained(folder: Path, *overrides: str) -> str:
    """The config error of a run, or empty."""
    try:
        pretrain(load_config(folder / "tiny.yaml", [f"run.dir={folder}/run", *overrides]))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def finished(ranks, tmp_path):
    """A run of two iterations on a blend of two corpora in the proportions 0.6 and 0.3 and 0.1."""
    for name, lengths in (("a", LENGTHS), ("b", [2000]), ("c", [1200, 800])):
        write_corpus(tmp_path / name, lengths)
    paths = f"data.paths=[0.6,{tmp_path}/a,0.3,{tmp_path}/b,0.1,{tmp_path}/c]"
    data = {"tokenizer": "", "split": [1, 0, 0]}
    tiny_yaml(tmp_path, str(tmp_path / "a"), data=data, **SMALL)
    assert ranks(1, trained, tmp_path, paths, "model.vocab_size=10000") == [""]
    return tmp_path


def resumed(ranks, folder, paths) -> str:
    return ranks(1, trained, folder, f"data.paths=[{paths}]", "model.vocab_size=10000", "train.iterations=4")[0]


def test_a_replaced_corpus_is_an_error_and_a_moved_one_is_not(ranks, finished):
    """By name, another corpus under the old path would continue in silence, and the same one elsewhere be refused."""
    for suffix in ("bin", "idx"):
        shutil.copy(finished / f"a.{suffix}", finished / f"moved.{suffix}")
    write_corpus(finished / "a", LENGTHS, first_token=1)
    blend = "6,{folder}/{a},3,{folder}/b,1,{folder}/c"
    assert f"{finished}/a has other contents than at the checkpoint (3 sequences then, 3 sequences now): " in resumed(
        ranks, finished, blend.format(folder=finished, a="a")
    )
    assert resumed(ranks, finished, blend.format(folder=finished, a="moved")) == ""
    # The blend keeps the values of the checkpoint, which are rounded differently.
    assert read_layout(resolve(finished / "run")).config["data"]["paths"][::2] == ["0.6", "0.3", "0.1"]


def test_a_checkpoint_without_a_record_is_compared_by_names(ranks, finished):
    """Checkpoints of earlier versions resume, with another corpus of the same name too; the next one has a record."""
    layout = read_layout(resolve(finished / "run"))
    assert len(layout.origin["corpora"]) == 3
    old = dump_layout(layout.model_copy(update={"origin": {}}))
    (resolve(finished / "run") / LAYOUT_FILE).write_text(old)
    write_corpus(finished / "a", LENGTHS, first_token=1)
    paths = ",".join(layout.config["data"]["paths"])
    assert "config: ['0.6', 'x', " in resumed(ranks, finished, paths.replace("/a,", "/x,"))
    paths = paths.replace("0.6,", "6,").replace("0.3,", "3.0,").replace("0.1,", "1,")
    changes = (f"run.dir={finished}/run", f"data.paths=[{paths}]", "model.vocab_size=10000", "train.iterations=4")
    done = run_here("pretrain", "--config", "tiny.yaml", *changes, cwd=finished)
    assert done.returncode == 0, done.stderr
    assert "corpora: only their names and weights were compared" in unwrapped(done.stdout)
    assert len(read_layout(resolve(finished / "run")).origin["corpora"]) == 3


def branched(folder: Path) -> str:
    """The error of a branch for which each rank has another folder, as two hosts may under one path."""
    try:
        changes = [f"run.dir={folder}/branch", f"checkpoint.load={folder}/run{dist.get_rank()}", "train.iterations=4"]
        pretrain(load_config(folder / "tiny.yaml", [*changes, "model.vocab_size=10000", "checkpoint.load_iteration=2"]))
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_with_other_checkpoints_of_one_iteration_do_not_train(ranks, finished):
    """Each rank would continue with a part of another model, and no loss shows it."""
    for rank in (0, 1):
        shutil.copytree(finished / "run", finished / f"run{rank}")
    at = resolve(finished / "run1")
    layout = read_layout(at)
    (at / LAYOUT_FILE).write_text(dump_layout(layout.model_copy(update={"saved_at": "earlier"})))
    for error in ranks(2, branched, finished):
        assert "rank 1 reads another checkpoint of iteration 2 than rank 0; copy" in error
    shutil.rmtree(finished / "run1")
    shutil.copytree(finished / "run", finished / "run1")
    assert ranks(2, branched, finished) == ["", ""]


def test_index_builds_the_files_of_the_resumed_run(ranks, finished):
    """Weights of the same proportions may be rounded to another order: the run would wait for an index of its own."""
    paths = f"6,{finished}/a,3,{finished}/b,1,{finished}/c"
    changes = (f"run.dir={finished}/run", f"data.paths=[{paths}]", "model.vocab_size=10000", "train.iterations=40")
    before = set((finished / "cache").iterdir())
    done = run_here("index", "--config", "tiny.yaml", *changes, cwd=finished)
    assert done.returncode == 0, done.stderr
    built = set((finished / "cache").iterdir())
    assert len(built) > len(before)
    assert ranks(1, trained, finished, *changes[1:]) == [""]
    assert set((finished / "cache").iterdir()) == built
