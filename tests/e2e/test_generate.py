"""Generation from any checkpoint of a run, within the context length of the model."""

import io
import json
import sys
from pathlib import Path

import pytest

from megatron_lite.checkpoint.layout import content_checksum
from tests.helpers.command import make_corpus, run_here, tiny_yaml


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run of one process. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_yaml(folder, make_corpus(folder), train={"eval_iterations": 0})
    assert run_here("pretrain", "--config", str(config), cwd=folder).returncode == 0
    return folder


def test_generate_loads_any_checkpoint_of_a_run(finished, monkeypatch):
    """A checkpoint is given by its iteration or its path. The prompt can come from standard input."""
    checkpoints = finished / "run" / "checkpoints"
    options = ("--max-new-tokens", "8", "--temperature", "0")
    by_iteration = run_here(
        "generate", "--load", str(finished / "run"), "--iteration", "4", "--prompt", "def ", *options, cwd=finished
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("def "))
    by_path = run_here("generate", "--load", str(checkpoints / "iter_0000004"), "--prompt", "-", *options, cwd=finished)
    assert by_iteration.returncode == by_path.returncode == 0, by_iteration.stderr
    assert by_iteration.stdout == by_path.stdout and by_iteration.stdout.startswith("def ")
    missing = run_here("generate", "--load", str(finished / "run"), "--iteration", "5", "--prompt", "x", cwd=finished)
    assert missing.returncode == 1
    assert missing.stderr == f"{finished}/run: has no checkpoint of iteration 5. There are iterations 4, 6, 8\n"


def test_generate_stops_with_a_message_at_the_context_length(finished):
    """The model has 32 positions. Tokens that do not fit must not be dropped silently."""
    command = ("generate", "--load", str(finished / "run"), "--max-new-tokens", "9", "--seed", "1", "--prompt")
    too_long = run_here(*command, "x" * 33, cwd=finished)
    assert too_long.returncode == 2
    assert "--prompt has 33 tokens, more than model.max_position_embeddings (32); shorten it" in too_long.stderr
    nearly_full = run_here(*command, "x" * 30, cwd=finished)
    assert nearly_full.returncode == 0 and nearly_full.stdout.startswith("x" * 30)
    assert nearly_full.stderr == (
        "stopped after 3 of 9 new tokens: the context is full (model.max_position_embeddings is 32)\n"
    )


def test_generate_chooses_its_own_attention(tmp_path):
    """The machine may lack what training used, here flash-attn. The prompt is longer than the trained sequences, and
    sdpa makes no window of 1,050 tokens."""
    sizes = {"max_position_embeddings": 1100, "window_size": 8, "attention_dropout": 0.1}
    train = {"iterations": 1, "eval_iterations": 0}
    config = tiny_yaml(tmp_path, make_corpus(tmp_path), model=sizes, train=train)
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    path = tmp_path / "run" / "checkpoints" / "iter_0000001" / "layout.json"
    content = json.loads(path.read_text())
    del content["crc32"]
    content["config"]["model"]["attention"] = "flash"
    path.write_text(json.dumps({"crc32": content_checksum(content), **content}))
    done = run_here("generate", "--load", "run", "--prompt", "x" * 1050, "--max-new-tokens", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1050
