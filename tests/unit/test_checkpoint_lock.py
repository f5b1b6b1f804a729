"""Two runs never write into one directory."""

import errno
import fcntl
import os

import pytest

from megatron_lite.checkpoint.lock import locked
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import solo
from megatron_lite.parallel.tasks import STARTERS, separate_tasks
from tests.helpers.locks import other_run


def test_the_error_of_a_second_run_names_the_process_that_uses_the_directory(tmp_path, monkeypatch):
    """After kill -9 of that process, a restart must get the lock at once."""
    holder = other_run(tmp_path / "run")
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    with (
        pytest.raises(
            CheckpointError, match=rf"^run.dir {tmp_path}/run is in use by process {holder.pid} on .* since 2"
        ),
        locked(tmp_path / "run", world=solo()),
    ):
        pass
    # Two tasks without RANK are two runs, and the second of them stops here.
    for name in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    message = r"; wait for it, or choose another one. Each of the 2 tasks of srun \(SLURM_STEP_NUM_TASKS\) is a run of "
    with pytest.raises(CheckpointError, match=message), locked(tmp_path / "run", world=solo()):
        pass
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    holder.kill()
    holder.communicate()
    with locked(tmp_path / "run", world=solo()):
        out, err = other_run(tmp_path / "run").communicate()
        assert out == "" and f"run.dir {tmp_path}/run is in use by process {os.getpid()} on " in err
        assert "; wait for it, or choose another one" in err
    out, err = other_run(tmp_path / "run").communicate()
    assert (out, err) == ("locked\n", "")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "2 tasks of srun (SLURM_STEP_NUM_TASKS) is a run of its own, because RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "4 tasks of mpirun (OMPI_COMM_WORLD_SIZE) is a run of its own, because RANK"),
        ({"PMI_SIZE": "8"}, "8 tasks of mpiexec (PMI_SIZE) is a run of its own, because RANK"),
        # A launcher of one node in each task.
        (
            {"SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"},
            "is a run of its own. ",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2", "RANK": "1", "WORLD_SIZE": "2"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, ""),  # a shell within an allocation of 8
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ""),  # a batch script without srun
        ({}, ""),
    ],
)
def test_tasks_that_are_runs_of_their_own_are_named(monkeypatch, variables, words):
    """A user pays for eight copies of one run; a right start must not be warned about."""
    names = (*STARTERS, "SLURM_NTASKS", "SLURM_PROCID", "RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    notice = separate_tasks()
    assert words in notice and bool(words) == bool(notice)


def test_file_systems_without_locks_do_not_stop_a_run(tmp_path, monkeypatch, capsys):
    def raise_no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", raise_no_locks)
    with locked(tmp_path, world=solo()):
        pass
    assert capsys.readouterr().out == (f" cannot lock {tmp_path} (No locks available): let no other run train there\n")


def test_a_directory_that_cannot_be_created_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    message = f"run.dir {tmp_path}/file/x: cannot be created: Not a directory; choose another one"
    with pytest.raises(CheckpointError) as caught, locked(tmp_path / "file/x", world=solo()):
        pass
    assert str(caught.value) == message
