"""kill -9 of all ranks at a random instant never leaves a run that cannot go on, and it goes on to the bit."""

import os
import random
import signal
import subprocess

import pytest

from tests.e2e.command import make_corpus, run, start, tiny_yaml
from tests.e2e.test_resume import rows, tensor_files


def kill_until_done(tmp_path, kills: int, iterations: int, seed: int, precision: str) -> None:
    """Starts a run again and again, kills it at a random instant each time, and lets the last start finish."""
    prefix = make_corpus(tmp_path)
    settings = {
        "train": {"iterations": iterations, "precision": precision},
        "optim": {"initial_loss_scale": 2.0**34},  # fp16 begins with skipped steps
        "parallel": {"tensor": 2},
        "checkpoint": {"interval": 1},
        "log": {"interval": 1000},  # little output, so that no pipe fills
    }
    whole = tiny_yaml(tmp_path, prefix, **settings, run={"dir": str(tmp_path / "whole")})
    done = run("pretrain", "--config", str(whole), "--nproc-per-node", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    config = tiny_yaml(tmp_path, prefix, **settings, run={"dir": str(tmp_path / "killed")})
    command = ("pretrain", "--config", str(config), "--nproc-per-node", "2")
    random_number = random.Random(seed)
    killed = 0
    for _ in range(kills):
        process = start(*command, cwd=tmp_path)
        wait_for("training from iteration", process)
        # From here an iteration and its save follow each other every few milliseconds.
        try:
            process.wait(timeout=random_number.uniform(0.0, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate()
    assert killed >= kills // 2  # the others met a run that had just ended
    finished = run(*command, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    newest = f"checkpoints/iter_{iterations:07d}"
    assert tensor_files(tmp_path / "killed" / newest) == tensor_files(tmp_path / "whole" / newest)


def wait_for(words: str, process: subprocess.Popen[str]) -> None:
    """Reads the output up to a line with these words, or its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return


def test_killed_runs_go_on_to_the_bit(tmp_path):
    kill_until_done(tmp_path, kills=2, iterations=40, seed=1, precision="fp16")


@pytest.mark.soak
def test_runs_killed_thirty_times_go_on_to_the_bit(tmp_path):
    kill_until_done(tmp_path, kills=30, iterations=300, seed=2, precision="fp32")
