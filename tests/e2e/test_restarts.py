"""Ranks that fail, stop or are killed: restarts, messages and exit codes of a launcher in this process."""

import os
import re
import signal
import sys
import time
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest

from megatron_lite.cli.run import run_script
from megatron_lite.errors import STOP_SIGNALS, ConfigError, StoppedEarly, TrainingError
from megatron_lite.launch import agent, reports
from megatron_lite.launch.launcher import launch
from megatron_lite.launch.nodes import Nodes
from megatron_lite.launch.reports import Failure, explain, write_report
from tests.helpers import warm
from tests.helpers.limits import PATIENCE

HERE = "tests.e2e.test_restarts"


def raise_config_error() -> None:
    if os.environ["RANK"] == "1":
        raise ConfigError("line one of the reason\nline two")
    time.sleep(60)


def run_it(script: str) -> None:
    run_script(script, [])


def delete_folder(folder: str) -> None:
    os.rmdir(folder)
    raise TrainingError("first")


def have_a_bug() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("a bug")
    time.sleep(60)


def be_killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def fail_before_the_other_rank_ends(folder: str, number: str) -> None:
    """Rank 1 fails; then the agent stops rank 0, which sends itself the signal `number`; 0: none."""
    ready = Path(folder) / "ready"
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), int(number)))
        ready.touch()
    while not ready.exists():
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        raise TrainingError("no answer")
    while True:
        time.sleep(1)


def record_start(folder: str) -> int:
    """Record this start and return the number of earlier ones."""
    with (Path(folder) / "starts").open("a") as file:
        file.write(f"{os.environ['RANK']}\n")
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def fail(folder: str, reason: str) -> None:
    record_start(folder)
    raise TrainingError(reason)


def fail_in_turn() -> None:
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == str(count % 2):
        raise TrainingError(f"reason {count}")
    time.sleep(60)


def raise_same_config_error(folder: str) -> None:
    record_start(folder)
    raise ConfigError("no such thing")


def stop(folder: str) -> None:
    record_start(folder)
    raise StoppedEarly("stopped, saved")


def be_killed_twice(folder: str) -> None:
    if record_start(folder) < 2:
        os.kill(os.getpid(), signal.SIGKILL)


def fail_after_the_first_rank(folder: str) -> None:
    if os.environ["RANK"] == "1":
        while not (Path(folder) / "0_ends").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        raise TrainingError("late")
    (Path(folder) / "0_ends").touch()


def leave(exit_code: str) -> None:
    os._exit(int(exit_code))


def be_killed_by(number: str) -> None:
    os.kill(os.getpid(), int(number))


def receive_second_signals(end: str) -> None:
    """Stop signals arrive while the interpreter exits."""
    for number in STOP_SIGNALS:
        util.Finalize(None, os.kill, args=(os.getpid(), number), exitpriority=100)
    if end == "stopped":
        raise StoppedEarly("stopped, saved")


def talk() -> None:
    print(f"rank {os.environ['RANK']} prints")
    sys.stdout.flush()
    os.write(2, b"and C++ complains\n")


@pytest.fixture
def ranks_here(capsys):
    """`ranks_here(count, function, *arguments, **nodes)`: the exit code and stderr of a launch in this process."""

    def launch_here(count: int, target, *arguments: str, **nodes) -> tuple[int, str]:
        code = launch(f"{HERE}:{target.__name__}", arguments, Nodes(count, **nodes))
        return code, capsys.readouterr().err

    with mock.patch.dict(os.environ), warm.ranks_from_server():
        yield launch_here


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


def test_a_config_error_of_one_rank_is_printed_once_and_exits_with_2(ranks_here):
    assert ranks_here(2, raise_config_error) == (2, "line one of the reason\nline two\n")


def test_a_script_that_fails_on_all_ranks_is_reported_once(ranks_here, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from megatron_lite.errors import ConfigError\nraise ConfigError('no such thing')\n"
    )
    assert ranks_here(2, run_it, str(tmp_path / "mine.py")) == (2, "no such thing\n")


def test_a_restart_in_a_deleted_folder_is_a_training_error(ranks_here, tmp_path, monkeypatch):
    """Python's error would be a traceback of the launcher."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    with pytest.raises(TrainingError) as caught:
        ranks_here(1, delete_folder, str(tmp_path / "gone"), max_restarts=2)
    assert str(caught.value) == (
        "the current folder was deleted, so no rank can start; run the command in a folder that exists"
    )


def test_a_bug_exits_with_1_and_one_traceback(ranks_here):
    code, err = ranks_here(2, have_a_bug)
    assert code == 1
    assert err.startswith("rank 1 failed:\nTraceback (most recent call last):")
    assert err.strip().endswith("ZeroDivisionError: a bug")
    assert err.count("Traceback") == 1


def test_a_killed_rank_exits_with_1_and_its_signal(ranks_here):
    killed = "rank 1 was killed by SIGKILL; the machine may be out of memory\n"
    assert ranks_here(2, be_killed) == (1, killed)


@pytest.mark.parametrize(
    "number, grace, message",
    [
        (signal.SIGKILL, 60, "rank 0 was killed by SIGKILL; the machine may be out of memory"),
        (signal.SIGSEGV, 60, "no answer"),  # a crash of a rank that is stopped
        (0, 0.5, "no answer"),  # the rank does not stop, and the agent kills it
    ],
)
def test_a_killed_rank_is_the_cause_even_if_another_one_exited_first(
    ranks_here, tmp_path, monkeypatch, number, grace, message
):
    monkeypatch.setattr(agent, "FAILED_GRACE_SECONDS", grace)
    assert ranks_here(2, fail_before_the_other_rank_ends, str(tmp_path), str(int(number))) == (1, f"{message}\n")


def test_failed_ranks_are_restarted_and_each_reason_is_printed(ranks_here):
    """The last reason alone would suggest the wrong cause."""
    assert ranks_here(2, fail_in_turn, max_restarts=2) == (
        1,
        "reason 0\nrestarting from the newest checkpoint (1 of 2)\n"
        "reason 1\nrestarting from the newest checkpoint (2 of 2)\n"
        "reason 2\n",
    )


def test_ranks_that_fail_twice_in_the_same_way_are_not_restarted(ranks_here, tmp_path):
    assert ranks_here(1, fail, str(tmp_path), "disk full", max_restarts=5) == (
        1,
        "disk full\nrestarting from the newest checkpoint (1 of 5)\n"
        "disk full\nthe same failure as before the restart; another restart would not help\n",
    )
    assert starts(tmp_path) == 2


def test_ranks_with_a_config_error_are_not_restarted(ranks_here, tmp_path):
    assert ranks_here(1, raise_same_config_error, str(tmp_path), max_restarts=5) == (2, "no such thing\n")
    assert starts(tmp_path) == 1


def test_ranks_that_stopped_with_a_checkpoint_exit_with_75_and_one_message(ranks_here, tmp_path):
    assert ranks_here(2, stop, str(tmp_path), max_restarts=5) == (75, "stopped, saved\n")
    assert starts(tmp_path) == 2


def test_a_rank_that_is_killed_twice_is_restarted_twice(ranks_here, tmp_path):
    """Kills can have different causes, unlike two errors with the same message."""
    killed = "rank 0 was killed by SIGKILL; the machine may be out of memory\nrestarting from the newest checkpoint"
    assert ranks_here(1, be_killed_twice, str(tmp_path), max_restarts=3) == (
        0,
        f"{killed} (1 of 3)\n{killed} (2 of 3)\n",
    )
    assert starts(tmp_path) == 3


def test_a_finished_rank_does_not_hide_a_later_failure_of_another(ranks_here, tmp_path):
    assert ranks_here(2, fail_after_the_first_rank, str(tmp_path)) == (1, "late\n")


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_rank_that_exits_before_it_finishes_is_a_failure(ranks_here, code):
    """Torch's agent would wait forever for the result of a rank that exited with 0."""
    assert ranks_here(1, leave, code) == (1, f"rank 0 exited with code {code} before it finished\n")


@pytest.mark.parametrize("number, name", [(signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")])
def test_the_message_of_a_killed_rank_names_any_signal(ranks_here, number, name):
    assert ranks_here(1, be_killed_by, str(int(number))) == (1, f"rank 0 was killed by {name}\n")


def test_a_failure_is_reported_when_the_rank_exits_between_two_polls(ranks_here, tmp_path, monkeypatch):
    """The agent polled a running rank and torch, a moment later, a dead one: the exit code was 0, without a reason."""
    polls: dict[int | None, int] = {}
    real = BaseProcess.exitcode.fget

    def late(process):
        code = real(process)
        if code is not None:
            polls[process.pid] = polls.get(process.pid, 0) + 1
        return code if polls.get(process.pid, 0) > 1 else None

    monkeypatch.setattr(BaseProcess, "exitcode", property(late))
    assert ranks_here(1, fail, str(tmp_path), "reason") == (1, "reason\n")


@pytest.mark.parametrize("end, code, text", [("finished", 0, ""), ("stopped", 75, "stopped, saved\n")])
def test_a_second_signal_does_not_change_the_exit_code_of_a_finished_rank(ranks_here, end, code, text):
    """Launcher and batch system both send it, and a small model is saved in between."""
    assert ranks_here(1, receive_second_signals, end) == (code, text)


def test_output_of_all_ranks_but_the_first_goes_to_files(ranks_here, tmp_path):
    """Output of C libraries too, appended to that of an earlier run."""
    (tmp_path / "rank_00001.log").write_text("before\n")
    assert ranks_here(2, talk, log_dir=tmp_path) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00001.log"]
    assert (tmp_path / "rank_00001.log").read_text() == "before\nrank 1 prints\nand C++ complains\n"


def test_a_file_of_output_has_the_number_of_its_rank_among_all(tmp_path, monkeypatch):
    """Machines share the folder. By their numbers on each machine, several ranks would write into one file."""
    files: list[Path] = []
    for name in ("survive_lost_output", "_ignore_stop_signals"):  # both change this process
        monkeypatch.setattr(reports, name, lambda *arguments: None)
    monkeypatch.setattr(reports, "_redirect_output", files.append)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert reports._exit_code("os:getpid", (), "", tmp_path) == reports.FINISHED
    assert files == [tmp_path / "rank_00005.log"]


def test_an_output_folder_that_cannot_be_created_is_a_config_error(ranks_here, tmp_path):
    (tmp_path / "file").touch()
    assert ranks_here(2, talk, log_dir=tmp_path / "file", max_restarts=1) == (
        2,
        f"--log-dir is {tmp_path}/file; cannot write rank_00001.log there: File exists\n",
    )


def test_a_launch_leaves_no_files(ranks_here, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ranks_here(1, talk)
    assert list(tmp_path.iterdir()) == []


def raise_launch_time() -> None:
    raise TrainingError(f"launched at {os.environ['MEGATRON_LITE_LAUNCHED']}")


def test_restarted_ranks_get_the_time_of_the_first_launch(ranks_here):
    """train.exit_duration counts from it."""
    _, err = ranks_here(1, raise_launch_time, max_restarts=3)
    first, second = re.findall(r"^launched at (\S+)$", err, re.MULTILINE)
    assert first == second and 0 < time.time() - float(first) < PATIENCE


OUT_OF_MEMORY = "rank 1 was killed by SIGKILL; the machine may be out of memory"
STOPPED = "stopped by SIGTERM before a checkpoint could be saved"


@pytest.mark.parametrize(
    "ended, received, wanted",
    [
        ({0: 1}, 0, Failure("connection closed", 1, True, True)),
        ({0: 1, 1: -9}, 0, Failure(OUT_OF_MEMORY, 1, True, False)),  # the other rank only lost its connection
        ({0: 1}, 15, Failure(f"{STOPPED}\nconnection closed", 1, False, True)),
        ({0: -15, 1: -15}, 15, Failure(STOPPED, 1, False, False)),
        ({0: -15, 1: -9}, 15, Failure(f"{STOPPED}\n{OUT_OF_MEMORY}", 1, False, False)),
        ({1: -15}, 0, Failure("rank 1 was killed by SIGTERM", 1, True, False)),
    ],
)
def test_the_message_has_the_cause_of_a_failure_and_not_its_consequences(
    tmp_path, monkeypatch, ended, received, wanted
):
    """The first of two ranks has a report, and a third rank stopped with a checkpoint earlier."""
    for rank, text, code in (("2", "stopped, saved", 75), ("0", "connection closed", 1), ("3", "me too", 2)):
        monkeypatch.setenv("RANK", rank)
        write_report(str(tmp_path), text, code, restart_may_help=code == 1)
    assert explain(tmp_path, ended, received) == wanted
