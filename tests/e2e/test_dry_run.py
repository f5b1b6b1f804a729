"""`pretrain --dry-run` fails where the start of the run would, although it starts no rank and builds no index."""

import re

import pytest

from tests.helpers.command import run_here, tiny_yaml
from tests.helpers.corpora import write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of two steps, and corpora without a record of their tokenizer."""
    folder = tmp_path_factory.mktemp("dry")
    prefix = write_corpus(folder / "a", [900, 1500, 600])
    write_corpus(folder / "b", [90, 150, 60])
    write_corpus(folder / "c", [5, 5, 5])
    train = {"iterations": 2, "eval_iterations": 0}
    sections = {"train": train, "model": {"vocab_size": 4096}, "log": {"tensorboard": False}}
    tiny_yaml(folder, prefix, **sections)
    done = run_here("pretrain", "--config", "tiny.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["train.iterations=4"], ""),
        (["model.hidden_size=64", "train.iterations=4"], "belongs to another model.*model.hidden_size"),
        (["train.precision=bf16", "train.iterations=4"], "train.precision.*"),
        (["data.paths=[b]", "train.iterations=4"], "b is not .*a of the checkpoint"),
        (["run.dir=new", "data.paths=[a,b]", "train.iterations=5000"], "data.paths has no weights, .*20,000"),
        (["run.dir=new", "data.split=[0,1,0]"], r"data.split\[0\] is 0"),
        (["run.dir=new", "data.paths=[b]", "data.split=[1e-9,1,0]"], "b: .*train split has"),
        (["run.dir=new", "data.paths=[a,c]"], "c: .*train split has"),
        (["run.dir=new", "data.paths=[b]", "data.reset_position_ids=true"], "b: its first document ends with"),
        (["run.dir=new", "checkpoint.load_weights=nothing"], "checkpoint.load_weights: nothing: "),
        (["run.dir=new", "checkpoint.load=nothing"], "checkpoint.load: nothing: is not a folder"),
        (["run.dir=new", "train.tasks=[none.jsonl]"], "none.jsonl: cannot be read"),
    ],
)
def test_a_dry_run_fails_where_the_start_of_the_run_would(folder, overrides, message):
    """A queue of hours ends with a mistake that was visible before it."""
    command = ("pretrain", "--config", "tiny.yaml", *overrides)
    before = sorted(folder.rglob("*"))
    dry = run_here(*command, "--dry-run", cwd=folder)
    assert bool(dry.returncode) == bool(message), dry.stderr
    assert re.search(message, dry.stderr, re.DOTALL)
    assert sorted(folder.rglob("*")) == before
    if message:
        real = run_here(*command, cwd=folder)
        assert real.returncode != 0 and re.search(message.split(".*")[0], real.stderr)
