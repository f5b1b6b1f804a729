"""Ranks that fail, stop or are killed: which are started again, what is said of each, and how the launcher ends.

All in this process.
"""

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
from megatron_lite.launch.launcher import launch
from megatron_lite.launch.nodes import Nodes
from megatron_lite.launch.reports import Failure, explain, write_report
from tests.helpers.forked_ranks import forked_ranks
from tests.helpers.limits import PATIENCE

HERE = "tests.e2e.test_restarts"


def refuse_config() -> None:
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


def note(folder: str) -> int:
    """How often ranks were started before this one."""
    with (Path(folder) / "starts").open("a") as file:
        file.write(f"{os.environ['RANK']}\n")
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def fail(folder: str, reason: str) -> None:
    note(folder)
    raise TrainingError(reason)


def fail_in_turn() -> None:
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == str(count % 2):
        raise TrainingError(f"reason {count}")
    time.sleep(60)


def refuse(folder: str) -> None:
    note(folder)
    raise ConfigError("no such thing")


def stop(folder: str) -> None:
    note(folder)
    raise StoppedEarly("stopped, saved")


def be_killed_twice(folder: str) -> None:
    if note(folder) < 2:
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


def be_told_again(end: str) -> None:
    """A stop signal comes when this rank has ended, and only the interpreter has not."""
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
    """`ranks_here(number, function, *arguments, **nodes)`: exit code and stderr of a launch in this process."""

    def launch_here(number: int, target, *arguments: str, **nodes) -> tuple[int, str]:
        code = launch(f"{HERE}:{target.__name__}", arguments, Nodes(number, **nodes))
        return code, capsys.readouterr().err

    with mock.patch.dict(os.environ), forked_ranks("megatron_lite.training.pretrain"):
        yield launch_here


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


def test_a_config_error_of_one_rank_is_printed_once_and_ends_with_2(ranks_here):
    assert ranks_here(2, refuse_config) == (2, "line one of the reason\nline two\n")


def test_a_script_that_fails_on_all_ranks_is_reported_once(ranks_here, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from megatron_lite.errors import ConfigError\nraise ConfigError('no such thing')\n"
    )
    assert ranks_here(2, run_it, str(tmp_path / "mine.py")) == (2, "no such thing\n")


def test_ranks_that_cannot_restart_in_a_deleted_folder_end_with_the_reason(ranks_here, tmp_path, monkeypatch):
    """Python's own error is a traceback of the launcher."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    with pytest.raises(TrainingError) as caught:
        ranks_here(1, delete_folder, str(tmp_path / "gone"), max_restarts=2)
    assert str(caught.value) == (
        "the current folder was deleted, so no rank can start; run the command in a folder that exists"
    )


def test_a_bug_ends_with_1_and_one_traceback(ranks_here):
    code, err = ranks_here(2, have_a_bug)
    assert code == 1
    assert err.startswith("rank 1 failed:\nTraceback (most recent call last):")
    assert err.strip().endswith("ZeroDivisionError: a bug")
    assert err.count("Traceback") == 1


def test_a_killed_rank_ends_with_1_and_its_signal(ranks_here):
    killed = "rank 1 was killed by SIGKILL; the machine may be out of memory\n"
    assert ranks_here(2, be_killed) == (1, killed)


def test_failed_ranks_are_started_again_and_each_reason_is_told(ranks_here):
    """Whoever sees only the last one looks for the wrong cause."""
    assert ranks_here(2, fail_in_turn, max_restarts=2) == (
        1,
        "reason 0\nrestarting from the newest checkpoint (1 of 2)\n"
        "reason 1\nrestarting from the newest checkpoint (2 of 2)\n"
        "reason 2\n",
    )


def test_the_same_failure_twice_is_not_tried_a_third_time(ranks_here, tmp_path):
    assert ranks_here(1, fail, str(tmp_path), "disk full", max_restarts=5) == (
        1,
        "disk full\nrestarting from the newest checkpoint (1 of 5)\n"
        "disk full\nthe same failure as before the restart; another restart would not help\n",
    )
    assert starts(tmp_path) == 2


def test_a_config_error_is_not_tried_again(ranks_here, tmp_path):
    assert ranks_here(1, refuse, str(tmp_path), max_restarts=5) == (2, "no such thing\n")
    assert starts(tmp_path) == 1


def test_ranks_that_stopped_with_a_checkpoint_end_with_75_and_say_so_once(ranks_here, tmp_path):
    assert ranks_here(2, stop, str(tmp_path), max_restarts=5) == (75, "stopped, saved\n")
    assert starts(tmp_path) == 2


def test_a_rank_that_was_killed_comes_back(ranks_here, tmp_path):
    """Killed is killed: the next time it may be for another reason, unlike the same error twice."""
    killed = "rank 0 was killed by SIGKILL; the machine may be out of memory\nrestarting from the newest checkpoint"
    assert ranks_here(1, be_killed_twice, str(tmp_path), max_restarts=3) == (
        0,
        f"{killed} (1 of 3)\n{killed} (2 of 3)\n",
    )
    assert starts(tmp_path) == 3


def test_a_rank_that_has_finished_does_not_hide_one_that_fails_later(ranks_here, tmp_path):
    assert ranks_here(2, fail_after_the_first_rank, str(tmp_path)) == (1, "late\n")


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_rank_that_leaves_in_the_midst_is_a_failure(ranks_here, code):
    """With 0 it was taken for one that still has a result to give, and waited for until the end of time."""
    assert ranks_here(1, leave, code) == (1, f"rank 0 exited with code {code} before it finished\n")


@pytest.mark.parametrize("number, name", [(signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")])
def test_a_killed_rank_names_any_signal(ranks_here, number, name):
    assert ranks_here(1, be_killed_by, str(int(number))) == (1, f"rank 0 was killed by {name}\n")


def test_a_failure_is_not_lost_when_the_rank_ends_between_two_looks(ranks_here, tmp_path, monkeypatch):
    """A look found it alive, torch's own a moment later found it dead: no reason was told, the exit code was 0."""
    looks: dict[int | None, int] = {}
    real = BaseProcess.exitcode.fget

    def late(process):
        code = real(process)
        if code is not None:
            looks[process.pid] = looks.get(process.pid, 0) + 1
        return code if looks.get(process.pid, 0) > 1 else None

    monkeypatch.setattr(BaseProcess, "exitcode", property(late))
    assert ranks_here(1, fail, str(tmp_path), "reason") == (1, "reason\n")


@pytest.mark.parametrize("end, code, text", [("finished", 0, ""), ("stopped", 75, "stopped, saved\n")])
def test_a_second_signal_does_not_harm_a_rank_that_has_ended(ranks_here, end, code, text):
    """Launcher and batch system both send it, and a small model is saved between the two."""
    assert ranks_here(1, be_told_again, end) == (code, text)


def test_output_of_all_ranks_but_the_first_goes_to_files(ranks_here, tmp_path):
    """Also what is not Python's, after what a run before has left there."""
    (tmp_path / "rank_00001.log").write_text("before\n")
    assert ranks_here(2, talk, log_dir=tmp_path) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00001.log"]
    assert (tmp_path / "rank_00001.log").read_text() == "before\nrank 1 prints\nand C++ complains\n"


def test_a_folder_for_output_that_cannot_be_is_a_config_error(ranks_here, tmp_path):
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


def say_when() -> None:
    raise TrainingError(f"launched at {os.environ['MEGATRON_LITE_LAUNCHED']}")


def test_ranks_know_when_they_were_launched_through_restarts(ranks_here):
    """Which train.exit_duration counts from."""
    _, said = ranks_here(1, say_when, max_restarts=3)
    first, second = re.findall(r"^launched at (\S+)$", said, re.MULTILINE)
    assert first == second and 0 < time.time() - float(first) < PATIENCE


OUT_OF_MEMORY = "rank 1 was killed by SIGKILL; the machine may be out of memory"
STOPPED = "stopped by SIGTERM before a checkpoint could be saved"


@pytest.mark.parametrize(
    "ended, received, wanted",
    [
        ({0: 1}, 0, Failure("connection closed", 1, True, True)),
        ({0: 1, 1: -9}, 0, Failure(OUT_OF_MEMORY, 1, True, False)),  # what the other has lost is no news
        ({0: 1}, 15, Failure(f"{STOPPED}\nconnection closed", 1, False, True)),
        ({0: -15, 1: -15}, 15, Failure(STOPPED, 1, False, False)),
        ({0: -15, 1: -9}, 15, Failure(f"{STOPPED}\n{OUT_OF_MEMORY}", 1, False, False)),
        ({1: -15}, 0, Failure("rank 1 was killed by SIGTERM", 1, True, False)),
    ],
)
def test_the_cause_is_told_and_not_what_follows_from_it(tmp_path, monkeypatch, ended, received, wanted):
    """Two ranks, of which the first has reported, after a third had stopped with a checkpoint."""
    for rank, text, code in (("2", "stopped, saved", 75), ("0", "connection closed", 1), ("3", "me too", 2)):
        monkeypatch.setenv("RANK", rank)
        write_report(str(tmp_path), text, code, restart_may_help=code == 1)
    assert explain(tmp_path, ended, received) == wanted
