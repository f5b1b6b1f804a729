"""The commands of docs/numerics.md work as printed, and threads change only the order of sums."""

import os
import subprocess

import pytest
import torch

from tests.helpers import warm_commands
from tests.helpers.command import ROOT, environment, make_corpus, tiny_yaml
from tests.helpers.limits import PATIENCE
from tests.helpers.pages import blocks
from tests.helpers.tiny import train_tiny

LARGE = {"model__hidden_size": 256, "model__num_layers": 1, "train__micro_batch_size": 8}


def train_with_threads(count: int) -> dict:
    torch.set_num_threads(count)
    try:
        return train_tiny("gpt", **LARGE)
    finally:
        torch.set_num_threads(1)


def test_two_threads_train_to_the_losses_of_one(ranks):
    """Products of this size use both threads. A difference above 1e-5 would be more than another order of sums."""
    ((one,), (two,)) = (ranks(1, train_with_threads, count) for count in (1, 2))
    assert torch.allclose(two["loss"], one["loss"], rtol=1e-5, atol=0)
    assert torch.allclose(two["grad_norm"], one["grad_norm"], rtol=1e-5, atol=0)


def test_the_commands_for_a_comparison_show_only_rounding(tmp_path, tmp_path_factory):
    """Users would look for a mistake in their changes that is in the command."""
    (commands,) = blocks((ROOT / "docs" / "numerics.md").read_text(), "sh")
    model = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    tiny_yaml(tmp_path, make_corpus(tmp_path), model=model, train={"eval_iterations": 0})
    folder = tmp_path_factory.mktemp("bin")
    env = environment() | {"PATH": f"{folder}:{os.environ['PATH']}"}
    warm_commands.install(folder, folder / "socket")
    with warm_commands.server(folder / "socket"):
        done = subprocess.run(
            ["bash", "-c", commands], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE
        )
    lines = done.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("A  one/checkpoints/iter_"))
    assert float(lines[first - 1]) == pytest.approx(0.0, abs=1e-5), done.stderr
    assert lines[first + 1].endswith("tp=2 cp=1 dp=1 pp=1") and " identical, " in lines[first + 2]
