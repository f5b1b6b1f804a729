"""A run that is asked to stop, by a signal, a time or an iteration: saved, with exit code 75, and never hanging."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.checkpoint.directory import find_latest
from megatron_lite.errors import StoppedEarly
from megatron_lite.parallel.context import solo
from megatron_lite.training.signals import STOP_SIGNALS, StopRequest
from tests.e2e.command import ROOT, environment, make_corpus, run_here, tiny_yaml
from tests.e2e.test_resume import rows, run_to_the_end


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_stops_after_an_iteration_once_and_then_goes_on(tmp_path, corpus):
    config = tiny_yaml(tmp_path, corpus, train={"exit_iteration": 3})
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 75
    assert done.stderr.endswith(
        "exiting program because train.exit_iteration is reached: stopped at iteration 3 of 8 with a checkpoint saved; "
        "run the same command again to go on\n"
    )
    assert find_latest(tmp_path / "run" / "checkpoints", world=solo()) == 3
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    assert [row["iteration"] for row in rows(tmp_path / "run")] == list(range(1, 9))


def test_a_run_stops_when_its_time_is_up(tmp_path, corpus):
    """In time to save, before a batch system ends it."""
    config = tiny_yaml(tmp_path, corpus, train={"exit_duration": 0.001})
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 75
    assert "exiting program because train.exit_duration has passed: stopped at iteration 1 of 8 with" in done.stderr
    assert find_latest(tmp_path / "run" / "checkpoints", world=solo()) == 1


def stop_all(folder: str, duration: float) -> str:
    with pytest.raises(StoppedEarly) as raised:
        run_to_the_end(Path(folder), "gpt", train__exit_duration=duration, train__iterations=100_000)
    return str(raised.value)


def test_all_ranks_stop_after_the_same_iteration_when_time_is_up(ranks, tmp_path):
    """Their clocks are never quite the same."""
    said = ranks(2, stop_all, str(tmp_path), 0.3)
    assert said[0] == said[1]
    assert "train.exit_duration has passed: stopped at iteration" in said[0]


# A run whose last save hangs in a write.
SLOW_SAVE = """
import os, sys, time
from pathlib import Path
from megatron_lite.checkpoint import store
from megatron_lite.training import signals
from tests.e2e.test_resume import run_to_the_end

signals.PATIENCE_SECONDS = float(sys.argv[2])
save = store.save

def slow(root, iteration, **rest):
    if iteration > 2:
        print("saves", flush=True)
        reader, writer = os.pipe()
        os.read(reader, 1)
    save(root, iteration, **rest)

store.save = slow
run_to_the_end(Path(sys.argv[1]), "gpt", checkpoint__interval=2, train__iterations=1000, train__exit_iteration=3)
"""


def slow_save(folder: Path, patience: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SAVE, str(folder), str(patience)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "saves\n":
            return process
    raise AssertionError(process.communicate()[1])


def test_a_signal_during_a_save_that_takes_long_ends_it_and_leaves_the_checkpoint_before(tmp_path):
    """Python's own handlers would wait until the write returns, which may be never."""
    process = slow_save(tmp_path, patience=0.5)
    time.sleep(0.7)
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.endswith(
        "SIGTERM came again when the save had taken 1 s: ending at once, without it. The newest checkpoint is the one "
        "before; run the same command again to go on from there\n"
    )
    assert find_latest(tmp_path / "checkpoints", world=solo()) == 2


def test_signals_in_the_first_moments_of_a_save_change_nothing(tmp_path):
    """SLURM and launchers both deliver every signal."""
    process = slow_save(tmp_path, patience=30.0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.kill(process.pid, number)
    time.sleep(0.7)
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.parametrize("rank, ignored", [("1", True), (None, False)])
def test_a_rank_that_has_stopped_is_deaf_to_the_second_signal_but_a_notebook_is_not(monkeypatch, rank, ignored):
    """It would end a rank that has saved before it could say so; a notebook's Ctrl-C has to work again."""
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with StopRequest():
            os.kill(os.getpid(), signal.SIGUSR1)
        after = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        assert after == (dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN) if ignored else before)
        with StopRequest():
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
