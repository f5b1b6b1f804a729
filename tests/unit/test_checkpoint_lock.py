"""Two runs never write into one directory."""

import errno
import fcntl
import os

import pytest

from megatron_lite.checkpoint.lock import locked
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import solo
from tests.helpers.locks import other_run


def test_the_error_of_a_second_run_names_the_process_that_uses_the_directory(tmp_path):
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
    holder.kill()
    holder.communicate()
    with locked(tmp_path / "run", world=solo()):
        out, err = other_run(tmp_path / "run").communicate()
        assert out == "" and f"run.dir {tmp_path}/run is in use by process {os.getpid()} on " in err
        assert "; wait for it, or choose another one" in err
    out, err = other_run(tmp_path / "run").communicate()
    assert (out, err) == ("locked\n", "")


def test_file_systems_without_locks_do_not_stop_a_run(tmp_path, monkeypatch, capsys):
    def raise_no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", raise_no_locks)
    with locked(tmp_path, world=solo()):
        pass
    assert capsys.readouterr().out == (
        f" cannot lock {tmp_path} (No locks available): make sure that no other run trains there\n"
    )


def test_a_directory_that_cannot_be_created_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    message = f"run.dir {tmp_path}/file/x: cannot be created: Not a directory; choose another one"
    with pytest.raises(CheckpointError) as caught, locked(tmp_path / "file/x", world=solo()):
        pass
    assert str(caught.value) == message
