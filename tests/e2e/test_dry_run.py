"""`pretrain --dry-run` fails where the start of the run would, although it starts no rank and builds no index."""

import os
import re
import shutil

import pytest

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import LAYOUT_FILE, dump_layout, read_layout
from tests.helpers.command import run_here, tiny_yaml
from tests.helpers.corpora import write_corpus
from tests.helpers.rank_commands import run_on

GPT = {"vocab_size": 4096, "activation": "gelu", "top_query_layer": False, "mlp_dropout": True}
LATE = ["sync.mode=diloco", "sync.interval=2", "sync.delay=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of two steps, and corpora without a record of their tokenizer."""
    folder = tmp_path_factory.mktemp("dry")
    prefix = write_corpus(folder / "a", [900, 1500, 600])
    write_corpus(folder / "b", [90, 150, 60])
    write_corpus(folder / "c", [5, 5, 5])
    train = {"iterations": 2, "eval_iterations": 0}
    sections = {"train": train, "model": GPT, "log": {"tensorboard": False}}
    tiny_yaml(folder, prefix, **sections)
    for overrides in ([], ["run.dir=late", *LATE]):
        done = run_here("pretrain", "--config", "tiny.yaml", *overrides, cwd=folder)
        assert done.returncode == 0, done.stderr
    done = run_here("convert", "run", "foreign", "--to", "megatron", "--weights-only", cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in ("cut", "bpe"):
        shutil.copytree(folder / "run" / "checkpoints", folder / name / "checkpoints")
    os.truncate(next((folder / "cut").rglob("model.safetensors")), 9)
    at = resolve(folder / "bpe")
    layout = read_layout(at)
    layout = layout.model_copy(update={"origin": layout.origin | {"tokenizer": "0" * 64}})
    (at / LAYOUT_FILE).write_text(dump_layout(layout))
    (folder / "users").mkdir()
    (folder / "users" / "settings.yaml").write_text("optim: {lr: 1}")
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
        (["run.dir=new", "checkpoint.load_weights=nothing"], "checkpoint.load_weights: nothing: is not a folder"),
        (["checkpoint.load_weights=nothing", "train.iterations=4"], ""),
        (["run.dir=new", "checkpoint.load_weights=run"], ""),
        (["run.dir=new", "checkpoint.load_weights=run", "model.num_layers=3"], "layers.2.*model.num_layers"),
        (["run.dir=new", "checkpoint.load_weights=foreign", "model.num_layers=3"], "model.num_layers is 3"),
        (
            ["run.dir=new", "checkpoint.load=foreign"],
            "foreign/iter_0000002: has no layout.json; .*megatron-lite convert",
        ),
        (["run.dir=new", "checkpoint.load=nothing"], "checkpoint.load: nothing: is not a folder"),
        (["run.dir=cut", "train.iterations=4"], "model.safetensors: has 9 bytes"),
        (["run.dir=users", "train.iterations=4"], "settings.yaml: was not written by megatron-lite"),
        (["run.dir=bpe", "train.iterations=4"], "was trained with another tokenizer"),
        (["run.dir=late", *LATE, "sync.interval=3", "train.iterations=6"], "sync.interval .*sums .* in flight"),
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
        assert (real.returncode, real.stderr.splitlines()[-1]) == (dry.returncode, dry.stderr.splitlines()[-1])


def test_a_file_of_the_user_in_run_dir_ends_every_rank_before_the_model_is_built(ranks, folder):
    """A large model is built in minutes, on all ranks."""
    done = run_on(ranks, 2, "pretrain", "--config", "tiny.yaml", "run.dir=users", cwd=folder)
    assert done.returncode == 2 and done.stderr.count("settings.yaml: was not written by megatron-lite") == 2
    assert "model:" not in done.stdout and not (folder / "users" / ".lock").exists()
