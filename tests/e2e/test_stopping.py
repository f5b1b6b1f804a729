"""A run that is asked to stop, by a signal, a time or an iteration: saved, with exit code 75, and never hanging."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_lite.checkpoint.directory import find_latest
from megatron_lite.errors import STOP_SIGNALS, StoppedEarly
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.signals import StopRequest
from megatron_lite.training.step import train_step
from tests.helpers.command import ROOT, environment, make_corpus, run_here, tiny_yaml
from tests.helpers.limits import PATIENCE
from tests.helpers.runs import rows, run_to_the_end


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_stops_after_an_iteration_once_and_then_goes_on(tmp_path, corpus):
    config = tiny_yaml(tmp_path, corpus, train={"exit_iteration": 3})
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 75
    assert done.stderr.endswith(
        "exiting program because train.exit_iteration is reached: stopped at iteration 3 of 8, and saved a checkpoint; "
        "run the same command again to continue\n"
    )
    assert find_latest(tmp_path / "run" / "checkpoints", world=solo()) == 3
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    assert [row["iteration"] for row in rows(tmp_path / "run")] == list(range(1, 9))


def test_a_run_stops_when_its_time_is_up(tmp_path, corpus):
    """In time to save, before a batch system ends it."""
    config = tiny_yaml(tmp_path, corpus, train={"exit_duration": 0.001})
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 75
    assert (
        "exiting program because train.exit_duration has passed: stopped at iteration 1 of 8, and saved" in done.stderr
    )
    assert find_latest(tmp_path / "run" / "checkpoints", world=solo()) == 1


def test_the_time_of_a_run_goes_on_through_restarts(tmp_path, corpus, monkeypatch):
    """Of a batch job there is no more, however often its ranks were started."""
    monkeypatch.setenv("MEGATRON_LITE_LAUNCHED", str(time.time() - 1000))
    for duration, code in ((500, 75), (5000, 0)):
        config = tiny_yaml(tmp_path, corpus, train={"exit_duration": duration, "iterations": 2})
        assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == code


def evaluations(folder: Path) -> list[dict]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" not in row]


STOPPED = "stopped at iteration 2 of 4, and saved a checkpoint; run the same command again to continue"
DONE = "training is done at iteration 4, and saved, but not its final evaluation; run the same command again for that"


# Each evaluation has three batches: after iteration 2, and at the end on validation and test data.
@pytest.mark.parametrize("ask, words, done_before", [(3, STOPPED, 0), (8, DONE, 1), (11, DONE, 2)])
def test_an_evaluation_that_a_signal_interrupts_is_made_at_the_next_start(tmp_path, corpus, ask, words, done_before):
    """It may take longer than a batch system waits."""
    train = {"iterations": 4, "eval_interval": 2, "eval_iterations": 3, "global_batch_size": 4}
    (tmp_path / "whole").mkdir()
    config = tiny_yaml(tmp_path / "whole", corpus, train=train)
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path / "whole").returncode == 0
    config = tiny_yaml(tmp_path, corpus, train=train)
    asked = []
    agreed = StopRequest.agreed

    def counting(self, ctx):
        asked.append(1)
        if len(asked) == ask:
            os.kill(os.getpid(), signal.SIGTERM)
        return agreed(self, ctx)

    with mock.patch.object(StopRequest, "agreed", counting):
        done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 75
    assert done.stderr.endswith(f"exiting program after receiving SIGTERM: {words}\n")
    assert evaluations(tmp_path) == evaluations(tmp_path / "whole")[:done_before]
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    assert evaluations(tmp_path) == evaluations(tmp_path / "whole")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole" / "run")


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
from tests.helpers.runs import run_to_the_end

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
    """Python's own handlers would wait until the write returns, which may be never. The first signal that a run gets
    asks it to save, though it saves already."""
    process = slow_save(tmp_path, patience=0.5)
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


def test_the_first_signal_is_the_reason(tmp_path):
    """A second one, of another kind, comes from a scheduler that has lost patience."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(ParallelContext.create(Grid(), torch.device("cpu"), 1.0)) == "after receiving SIGUSR1"


def test_a_run_in_a_thread_trains_and_leaves_signals_alone(tmp_path):
    """As in a server, or a notebook that goes on: Python lets only the main thread handle signals."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(run_to_the_end, tmp_path, "gpt", train__iterations=2).result()
    assert len(rows(tmp_path)) == 2


def test_a_signal_in_the_last_iteration_of_a_run_without_evaluation_changes_nothing(tmp_path):
    """All of it is done: nothing is left for another start."""

    def step(run, microbatches):
        if run.state.iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(run, microbatches)

    with mock.patch("megatron_lite.training.loop.train_step", step):
        run_to_the_end(tmp_path, "gpt", train__iterations=3)
    assert len(rows(tmp_path)) == 3


def test_what_a_run_before_has_left_ends_no_other(tmp_path):
    """Its alarm, for one, and an exit code that some other program reads."""
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat" / "hang").touch()
    (tmp_path / "exit_code").write_text("75\n")
    run_to_the_end(tmp_path, "gpt", train__iterations=2)
    assert sorted(path.name for path in (tmp_path / "heartbeat").iterdir()) == ["rank_00000.json"]
    assert not (tmp_path / "exit_code").exists()


def test_a_run_of_very_many_samples_prints_what_takes_long(tmp_path, corpus):
    """Minutes of silence look like a hang."""
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 1})
    with mock.patch("megatron_lite.training.announce.MANY_SAMPLES", 3):
        out = run_here("pretrain", "--config", str(config), cwd=tmp_path).stdout
    assert " > building or reading the order of 4 training samples, which can take minutes\n" in out
