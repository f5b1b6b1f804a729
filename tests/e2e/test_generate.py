"""Text from any checkpoint of a run, within the context of the model."""

import io
import sys
from pathlib import Path

import pytest

from tests.helpers.command import make_corpus, run_here, tiny_yaml


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The folder of a finished run of one process. Tests only read it."""
    folder = tmp_path_factory.mktemp("alone")
    config = tiny_yaml(folder, make_corpus(folder), train={"eval_iterations": 0})
    assert run_here("pretrain", "--config", str(config), cwd=folder).returncode == 0
    return folder


def test_generate_takes_any_checkpoint_of_a_run(alone, monkeypatch):
    """By its number or its path; the prompt may come from a pipe."""
    checkpoints = alone / "run" / "checkpoints"
    options = ("--max-new-tokens", "8", "--temperature", "0")
    by_number = run_here(
        "generate", "--load", str(alone / "run"), "--iteration", "4", "--prompt", "def ", *options, cwd=alone
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("def "))
    by_path = run_here("generate", "--load", str(checkpoints / "iter_0000004"), "--prompt", "-", *options, cwd=alone)
    assert by_number.returncode == by_path.returncode == 0, by_number.stderr
    assert by_number.stdout == by_path.stdout and by_number.stdout.startswith("def ")
    missing = run_here("generate", "--load", str(alone / "run"), "--iteration", "5", "--prompt", "x", cwd=alone)
    assert missing.returncode == 1
    assert missing.stderr == f"{alone}/run: has no checkpoint of iteration 5. There are iterations 4, 6, 8\n"


def test_generate_keeps_to_the_context_of_the_model(alone):
    """It has 32 positions: what does not fit is reported, not dropped."""
    command = ("generate", "--load", str(alone / "run"), "--max-new-tokens", "9", "--seed", "1", "--prompt")
    too_long = run_here(*command, "x" * 33, cwd=alone)
    assert too_long.returncode == 2
    assert "--prompt has 33 tokens, more than model.max_position_embeddings (32); shorten it" in too_long.stderr
    at_its_end = run_here(*command, "x" * 30, cwd=alone)
    assert at_its_end.returncode == 0 and at_its_end.stdout.startswith("x" * 30)
    assert at_its_end.stderr == (
        "stopped after 3 of 9 new tokens: the context is full (model.max_position_embeddings is 32)\n"
    )
