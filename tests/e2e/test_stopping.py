"""A run that must stop because of a signal, a time or an iteration saves and exits with code 75."""

import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_lite.checkpoint.directory import read_latest
from megatron_lite.errors import STOP_SIGNALS, StoppedEarly
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.signals import StopRequest
from megatron_lite.training.step import train_step
from tests.helpers import warm
from tests.helpers.command import ROOT, environment, make_corpus, run_here, tiny_yaml
from tests.helpers.limits import PATIENCE
from tests.helpers.runs import rows, train_to_end


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_stops_once_at_exit_iteration_and_then_resumes(tmp_path, corpus):
    config = tiny_yaml(tmp_path, corpus, train={"exit_iteration": 3})
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 75
    assert done.stderr.endswith(
        "exiting program because train.exit_iteration is reached: stopped at iteration 3 of 8, and saved a checkpoint; "
        "run the same command again to continue\n"
    )
    assert read_latest(tmp_path / "run" / "checkpoints") == 3
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    assert [row["iteration"] for row in rows(tmp_path / "run")] == list(range(1, 9))


def test_a_run_stops_after_exit_duration(tmp_path, corpus):
    """It must save before a batch system kills it."""
    config = tiny_yaml(tmp_path, corpus, train={"exit_duration": 0.001})
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 75
    assert (
        "exiting program because train.exit_duration has passed: stopped at iteration 1 of 8, and saved" in done.stderr
    )
    assert read_latest(tmp_path / "run" / "checkpoints") == 1


def test_exit_duration_counts_from_the_launch_and_not_from_a_restart(tmp_path, corpus, monkeypatch):
    """Restarts of the ranks do not extend the time limit of a batch job."""
    monkeypatch.setenv("MEGATRON_LITE_LAUNCHED", str(time.time() - 1000))
    for duration, code in ((500, 75), (5000, 0)):
        config = tiny_yaml(tmp_path, corpus, train={"exit_duration": duration, "iterations": 2})
        assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == code


EVALUATED = {"iterations": 4, "eval_interval": 2, "eval_iterations": 3, "global_batch_size": 4}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus) -> Path:
    """The folder of a finished run with evaluations. Tests only read it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = tiny_yaml(folder, corpus, train=EVALUATED)
    assert run_here("pretrain", "--config", str(config), cwd=folder).returncode == 0
    return folder


def evaluations(folder: Path) -> list[dict]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" not in row]


STOPPED = "stopped at iteration 2 of 4, and saved a checkpoint; run the same command again to continue"
DONE = (
    "training is done at iteration 4, and saved, but not its final evaluation; run the same command again to evaluate"
)


# Each evaluation has three batches. Evaluations come after iteration 2, and at the end on validation and test data.
@pytest.mark.parametrize("signal_at_call, words, done_before", [(3, STOPPED, 0), (8, DONE, 1), (11, DONE, 2)])
def test_an_evaluation_interrupted_by_a_signal_runs_at_the_next_start(
    tmp_path, corpus, uninterrupted, signal_at_call, words, done_before
):
    """An evaluation can take longer than a batch system waits after a signal."""
    config = tiny_yaml(tmp_path, corpus, train=EVALUATED)
    calls = []
    agreed = StopRequest.agreed

    def agreed_with_a_signal(self, ctx):
        calls.append(1)
        if len(calls) == signal_at_call:
            os.kill(os.getpid(), signal.SIGTERM)
        return agreed(self, ctx)

    with mock.patch.object(StopRequest, "agreed", agreed_with_a_signal):
        done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 75
    assert done.stderr.endswith(f"exiting program after receiving SIGTERM: {words}\n")
    assert evaluations(tmp_path) == evaluations(uninterrupted)[:done_before]
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    assert evaluations(tmp_path) == evaluations(uninterrupted)
    assert rows(tmp_path / "run") == rows(uninterrupted / "run")


def train_for(folder: str, duration: float) -> str:
    """Train until `train.exit_duration` has passed; returns the message."""
    with pytest.raises(StoppedEarly) as raised:
        train_to_end(Path(folder), "gpt", train__exit_duration=duration, train__iterations=100_000)
    return str(raised.value)


def test_all_ranks_stop_after_the_same_iteration_at_exit_duration(ranks, tmp_path):
    """Ranks must agree, because their clocks differ."""
    first, second = ranks(2, train_for, str(tmp_path), 0.3)
    assert first == second
    assert "train.exit_duration has passed: stopped at iteration" in first


# A run whose last save hangs in a system call.
SLOW_SAVE = """
import os, sys, time
from pathlib import Path
from megatron_lite.checkpoint import store
from megatron_lite.training import signals
from tests.helpers.runs import train_to_end

signals.PATIENCE_SECONDS = float(sys.argv[2])
save = store.save

def slow(root, iteration, **rest):
    if iteration > 2:
        print("saving", flush=True)
        reader, writer = os.pipe()
        os.read(reader, 1)
    save(root, iteration, **rest)

store.save = slow
train_to_end(Path(sys.argv[1]), "gpt", checkpoint__interval=2, train__iterations=1000, train__exit_iteration=3)
"""


def start_slow_save(folder: Path, patience: float) -> warm.Command:
    """Start a run and return when its last save hangs; `patience` replaces PATIENCE_SECONDS of signals.py."""
    script = folder / "slow_save.py"
    script.write_text(SLOW_SAVE)
    process = warm.Command(warm.PYTHON, [str(script), str(folder), str(patience)], cwd=ROOT, env=environment())
    for line in process.stdout:
        if line == "saving\n":
            return process
    raise AssertionError(process.communicate()[1])


def test_a_second_signal_in_a_long_save_stops_the_run_without_that_checkpoint(tmp_path):
    """Plain Python handlers would wait for the system call, possibly forever.

    The first signal during a save only asks for a save and a stop, so the run continues to save.
    """
    process = start_slow_save(tmp_path, patience=0.5)
    time.sleep(0.7)
    os.kill(process.pid, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert re.fullmatch(
        r"(?s).*\[20..-..-.. ..:..:..\] SIGTERM: the run will save a checkpoint and stop\n"
        r"SIGTERM again after \d+ s of saving: the run stops without this checkpoint; run the same command "
        r"again to continue from the one before\n",
        err,
    )
    assert read_latest(tmp_path / "checkpoints") == 2


def test_signals_at_the_start_of_a_save_do_not_stop_it(tmp_path):
    """SLURM and the launcher both send each signal, so a rank gets it twice."""
    process = start_slow_save(tmp_path, patience=30.0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.kill(process.pid, number)
    time.sleep(0.7)
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.parametrize("rank, ignored", [("1", True), (None, False)])
def test_only_ranks_of_a_launcher_ignore_signals_after_a_stop(monkeypatch, rank, ignored):
    """A second signal would kill a rank before it has reported its save. In a notebook, Ctrl-C must work again."""
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


def test_the_first_signal_is_the_reported_reason(tmp_path):
    """A scheduler sends a second, different signal some time after the first one."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(ParallelContext.create(Grid(), torch.device("cpu"), 1.0)) == "after receiving SIGUSR1"


def test_a_run_in_a_thread_trains_without_signal_handlers(tmp_path):
    """Servers and notebooks use threads, and Python lets only the main thread install signal handlers."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(train_to_end, tmp_path, "gpt", train__iterations=2).result()
    assert len(rows(tmp_path)) == 2


def test_a_signal_in_the_last_iteration_without_evaluation_has_no_effect(tmp_path):
    """The run is complete, so exit code 75 would cause a useless restart."""

    def step(run, microbatches):
        if run.state.iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(run, microbatches)

    with mock.patch("megatron_lite.training.loop.train_step", step):
        train_to_end(tmp_path, "gpt", train__iterations=3)
    assert len(rows(tmp_path)) == 3


def test_files_of_an_earlier_run_do_not_stop_a_run(tmp_path):
    """A hang file of its watchdog would stop the new run, and another program would read the old exit code."""
    # Without a limit, because an old alarm that stays would end this process.
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat" / "hang").touch()
    (tmp_path / "exit_code").write_text("75\n")
    train_to_end(tmp_path, "gpt", train__iterations=2, train__hang_timeout=0)
    assert sorted(path.name for path in (tmp_path / "heartbeat").iterdir()) == ["host_00000"]
    assert not (tmp_path / "exit_code").exists()


def test_a_run_prints_a_line_before_the_slow_order_of_many_samples(tmp_path, corpus):
    """Minutes without output would look like a hang."""
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 1})
    with mock.patch("megatron_lite.training.announce.MANY_SAMPLES", 3):
        out = run_here("pretrain", "--config", str(config), cwd=tmp_path).stdout
    assert "building or reading the order of 4 training samples, which can take minutes\n" in out
