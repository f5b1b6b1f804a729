"""Ranks that megatron-lite starts: signals, and the exit code of the command."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lite.errors import STOP_SIGNALS, ConfigError, StoppedEarly
from megatron_lite.launch.launcher import _SignalsToRanks, run_ranks
from megatron_lite.launch.reports import rank_main
from tests.helpers import warm
from tests.helpers.command import ROOT, environment
from tests.helpers.limits import PATIENCE

HERE = "tests.e2e.test_launch"


def write_rank_variables(folder: str) -> None:
    variables = {
        name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    }
    (Path(folder) / os.environ["RANK"]).write_text(str(sorted(variables.items())))


def raise_config_error() -> None:
    if os.environ["RANK"] == "1":
        raise ConfigError("line one of the reason\nline two")
    time.sleep(60)


def save_after_signal(folder: str) -> None:
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    (Path(folder) / f"ready_{os.environ['RANK']}").touch()
    while not received:
        time.sleep(0.02)
    time.sleep(0.5)  # a save
    (Path(folder) / f"saved_{os.environ['RANK']}").write_text(signal.Signals(received[0]).name)


def stop_after_signal(folder: str) -> None:
    """Save and stop early, as training does."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    new = Path(folder) / f"new_{os.environ['RANK']}"
    new.write_text(f"{os.getpid()}\n")
    new.rename(Path(folder) / f"ready_{os.environ['RANK']}")  # with its content
    while not received:
        time.sleep(0.02)
    time.sleep(0.5)  # a save
    (Path(folder) / f"saved_{os.environ['RANK']}").touch()
    raise StoppedEarly(f"stopped by {signal.Signals(received[0]).name}, saved")


def sleep(folder: str) -> None:
    (Path(folder) / f"ready_{os.environ['RANK']}").touch()
    time.sleep(PATIENCE)


LAUNCH = """
import sys
from megatron_lite.launch.launcher import launch
from megatron_lite.launch.nodes import Nodes
if __name__ == "__main__":
    sys.exit(launch(sys.argv[1], tuple(sys.argv[2:]), Nodes(2)))
"""


def start(target: str, folder: Path) -> warm.Command:
    """A process that launches two ranks of a function of this file and exits with their exit code."""
    (folder / "launch.py").write_text(LAUNCH)
    words = [str(folder / "launch.py"), f"{HERE}:{target}", str(folder)]
    return warm.Command(warm.PYTHON, words, cwd=ROOT, env=environment())


def start_new_interpreters(target: str, folder: Path) -> subprocess.Popen[str]:
    """The same for a launcher that has a resource tracker. Its ranks have Python's handlers of signals, not its own."""
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, f"{HERE}:{target}", str(folder)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def is_running(pid: int) -> bool:
    """False also for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def end(process: "warm.Command | subprocess.Popen[str]") -> tuple[int, str]:
    """The exit code and standard error."""
    return process.wait(timeout=PATIENCE), process.communicate()[1]


def wait_for(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, f"no {names} in {folder}"
        time.sleep(0.02)


def test_all_ranks_run_with_their_environment_variables(tmp_path):
    code, err = end(start("write_rank_variables", tmp_path))
    assert (code, err) == (0, "")
    for rank in "01":
        assert f"('LOCAL_RANK', '{rank}'), " in (tmp_path / rank).read_text()
        assert "('WORLD_SIZE', '2')" in (tmp_path / rank).read_text()


def test_a_signal_reaches_the_ranks_and_they_have_time_to_save(tmp_path):
    """Killed before it saves, a run loses its progress since the last checkpoint."""
    process = start("save_after_signal", tmp_path)
    wait_for(tmp_path, "ready_0", "ready_1")
    os.kill(process.pid, signal.SIGTERM)
    assert end(process) == (0, "")
    assert [(tmp_path / f"saved_{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]


def test_ranks_that_cannot_save_yet_exit_with_1(tmp_path):
    """A run that was stopped during its start must not look finished."""
    process = start("sleep", tmp_path)
    wait_for(tmp_path, "ready_0", "ready_1")
    os.kill(process.pid, signal.SIGINT)
    assert end(process) == (1, "stopped by SIGINT before a checkpoint could be saved\n")


def test_one_rank_runs_in_this_process(tmp_path, monkeypatch):
    """Without --nproc-per-node no process is started, and errors are raised unchanged."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="line one"):
        run_ranks(f"{HERE}:raise_config_error", (), None)


def test_a_signal_to_all_processes_gives_exit_code_75_and_one_message(tmp_path):
    """A batch system signals all processes: ranks get the signal twice, and Python's resource tracker too."""
    process = start_new_interpreters("stop_after_signal", tmp_path)
    wait_for(tmp_path, "ready_0", "ready_1")
    os.killpg(process.pid, signal.SIGUSR1)
    assert end(process) == (75, "stopped by SIGUSR1, saved\n")


def test_ranks_of_a_killed_launcher_save_and_exit(tmp_path):
    """Otherwise they would wait for the dead launcher and keep the GPUs."""
    process = start("stop_after_signal", tmp_path)
    wait_for(tmp_path, "ready_0", "ready_1")
    pids = [int((tmp_path / f"ready_{rank}").read_text()) for rank in (0, 1)]
    process.kill()
    try:
        wait_for(tmp_path, "saved_0", "saved_1")
        deadline = time.monotonic() + PATIENCE
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_rank_that_starts_after_its_launcher_was_killed_exits(tmp_path, monkeypatch):
    """The kernel signals only ranks that run when the launcher dies."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    with pytest.raises(SystemExit) as end:
        rank_main(f"{HERE}:sleep", (str(tmp_path),), str(tmp_path), None, 0.0)
    assert end.value.code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def handlers():
    """The handlers of the stop signals before the test, restored after it."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_handlers_are_restored_unless_a_stop_signal_came(handlers):
    """The same signal may come again; it must not change the exit code."""
    with _SignalsToRanks() as signals:
        pass
    assert signals.first == 0
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == handlers
    with _SignalsToRanks() as signals:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert signals.first == signal.SIGUSR1
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}


def test_every_rank_gets_every_signal_once(handlers, monkeypatch):
    """Ranks that start later get it too; a rank that has just exited causes no error."""
    sent: list[tuple[int, int]] = []
    living = [SimpleNamespace(pid=11), SimpleNamespace(pid=12)]

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if pid == 11:
            raise ProcessLookupError

    monkeypatch.setattr(multiprocessing, "active_children", lambda: living)
    with _SignalsToRanks() as signals:
        monkeypatch.setattr(os, "kill", kill)
        signals.pass_on()
        assert sent == []
        signal.raise_signal(signal.SIGUSR1)
        signals.pass_on()
        signals.pass_on()
        assert sent == [(11, signal.SIGUSR1), (12, signal.SIGUSR1)]
        living[:] = [SimpleNamespace(pid=12), SimpleNamespace(pid=13)]
        signal.raise_signal(signal.SIGTERM)
        signals.pass_on()
        signals.pass_on()
    assert sent[2:] == [(12, signal.SIGTERM), (13, signal.SIGUSR1), (13, signal.SIGTERM)]
