"""Ranks that megatron-lite starts itself: how they end is how the command ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.cli.launch import run_ranks
from megatron_lite.errors import ConfigError
from tests.e2e.command import ROOT, environment

HERE = "tests.e2e.test_launch"


def say_place(word: str) -> None:
    place = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")}
    (Path(word) / os.environ["RANK"]).write_text(str(sorted(place.items())))


def refuse_config() -> None:
    if os.environ["RANK"] == "1":
        raise ConfigError("line one of the reason\nline two")
    time.sleep(60)


def have_a_bug() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("a bug")
    time.sleep(60)


def be_killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def save_when_asked(folder: str) -> None:
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    (Path(folder) / f"ready_{os.environ['RANK']}").touch()
    while not received:
        time.sleep(0.02)
    time.sleep(1.0)  # a save
    (Path(folder) / f"saved_{os.environ['RANK']}").write_text(signal.Signals(received[0]).name)


def sleep(folder: str) -> None:
    (Path(folder) / f"ready_{os.environ['RANK']}").touch()
    time.sleep(60)


def start(target: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that launches two ranks of a function of this file and exits with the launch's code."""
    code = (
        "import sys\nfrom megatron_lite.cli.launch import launch\nfrom megatron_lite.cli.nodes import Nodes\n"
        f"if __name__ == '__main__':\n    sys.exit(launch('{HERE}:{target}', {arguments!r}, Nodes(2)))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and everything on stderr."""
    return process.wait(timeout=60), process.communicate()[1]


def wait_for(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, f"no {names} in {folder}"
        time.sleep(0.02)


def test_ranks_know_their_place_and_all_of_them_run(tmp_path):
    code, err = end(start("say_place", str(tmp_path)))
    assert (code, err) == (0, "")
    for rank in "01":
        assert f"('LOCAL_RANK', '{rank}'), " in (tmp_path / rank).read_text()
        assert "('WORLD_SIZE', '2')" in (tmp_path / rank).read_text()


def test_a_config_error_of_one_rank_is_printed_once_and_ends_with_2():
    assert end(start("refuse_config")) == (2, "line one of the reason\nline two\n")


def test_a_bug_ends_with_1_and_one_traceback():
    code, err = end(start("have_a_bug"))
    assert code == 1
    assert err.startswith("rank 1 failed:\nTraceback (most recent call last):")
    assert err.strip().endswith("ZeroDivisionError: a bug")
    assert err.count("Traceback") == 1


def test_a_killed_rank_ends_with_1_and_its_signal():
    assert end(start("be_killed")) == (1, "rank 1 was killed by SIGKILL; the machine may be out of memory\n")


def test_a_signal_is_passed_on_and_the_ranks_may_finish(tmp_path):
    """Killed before it has saved, a run loses the work since its last checkpoint."""
    process = start("save_when_asked", str(tmp_path))
    wait_for(tmp_path, "ready_0", "ready_1")
    os.kill(process.pid, signal.SIGTERM)
    assert end(process) == (0, "")
    assert [(tmp_path / f"saved_{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]


def test_ranks_that_cannot_save_yet_end_with_1(tmp_path):
    """A run that was stopped while it started must not look finished."""
    process = start("sleep", str(tmp_path))
    wait_for(tmp_path, "ready_0", "ready_1")
    os.kill(process.pid, signal.SIGINT)
    assert end(process) == (1, "stopped by SIGINT before a checkpoint could be saved\n")


def test_one_process_runs_here(tmp_path, monkeypatch):
    """Without --nproc-per-node nothing is started, and errors are raised as they are."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="line one"):
        run_ranks(f"{HERE}:refuse_config", (), None)
