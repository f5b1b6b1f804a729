"""Lost output: runs continue, other commands exit."""

import io
import os
import sys

import click
import pytest

import megatron_lite
from megatron_lite.config.load import load_config
from megatron_lite.launch.streams import exit_on_lost_output, survive_lost_output
from megatron_lite.training import pretrain as core

FULL = OSError(28, "No space left on device")
NOTICE = "stdout: cannot write: No space left on device; the run continues without it; {}/metrics.jsonl has every "


class Failing(io.StringIO):
    """A buffered stream whose flush fails while `error` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def flush(self) -> None:
        if self.error:
            raise self.error


@pytest.fixture
def streams(monkeypatch, tmp_path):
    """`streams(out, err)` makes a run survive failures of both streams, which fail with these errors; returns both."""

    def make(out: Exception | None, err: Exception | None) -> tuple[Failing, Failing]:
        found = Failing(out), Failing(err)
        monkeypatch.setattr(sys, "stdout", found[0])
        monkeypatch.setattr(sys, "stderr", found[1])
        survive_lost_output(tmp_path)
        return found

    monkeypatch.delenv("RANK", raising=False)
    return make


def test_a_full_standard_output_is_reported_once(streams, tmp_path):
    """Otherwise a full disk for logs would stop training and lose its progress since the last checkpoint."""
    _, err = streams(FULL, None)
    for number in range(3):
        print(number, flush=True)
    print("another message", file=sys.stderr)
    assert err.getvalue() == NOTICE.format(tmp_path) + "iteration\nanother message\n"


def test_standard_output_recovers_when_the_disk_has_space(streams):
    out, _ = streams(FULL, None)
    print("lost")
    out.error = None
    print("written")
    assert out.getvalue().endswith("written\n")


def test_messages_of_a_full_standard_error_are_printed_on_standard_output(streams):
    """They contain the reason of a failure."""
    out, _ = streams(None, FULL)
    print("the reason", file=sys.stderr)
    notice = "stderr: cannot write: No space left on device; the run continues without it\n"
    assert out.getvalue() == notice + "the reason\n"


@pytest.mark.parametrize("first", ["stdout", "stderr"])
def test_a_file_in_run_dir_has_the_messages_when_both_streams_fail(streams, tmp_path, first):
    streams(BrokenPipeError(32, "Broken pipe"), FULL)
    for name in (first, "stderr", "stdout"):
        print("the reason" if name == "stderr" else "progress", file=getattr(sys, name))
    lines = (tmp_path / "lost_output.txt").read_text().splitlines()
    notices = [line.partition(";")[0] for line in lines if "cannot write" in line]
    assert sorted(notices) == ["stderr: cannot write: No space left on device", "stdout: cannot write: Broken pipe"]
    assert "the reason" in lines and "progress" not in lines


@pytest.mark.parametrize("rank, reported", [("0", True), ("1", False)])
def test_a_closed_standard_output_is_reported_by_one_rank(monkeypatch, rank, reported):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("RANK", rank)
    survive_lost_output(None)
    print("lost")
    assert err.getvalue() == "stdout: cannot write: it is closed; the run continues without it\n" * reported


def test_a_failure_is_reported_once_although_survive_lost_output_is_called_twice(streams, tmp_path):
    """The launcher and `pretrain` both call it."""
    _, err = streams(FULL, None)
    print("lost")
    survive_lost_output(tmp_path / "other")
    print("lost")
    assert err.getvalue().count("cannot write") == 1


def test_a_script_that_calls_pretrain_survives_lost_output(monkeypatch, tmp_path):
    """Training would stop at its first line when the reader of a script's output is gone."""
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Failing(FULL))
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(core, "pretrain", lambda *providers, **options: print("progress"))
    megatron_lite.pretrain(load_config(None, [f"run.dir={tmp_path}"]))
    assert err.getvalue() == NOTICE.format(tmp_path) + "iteration\n"


@pytest.mark.parametrize("error, code, message", [
    (BrokenPipeError(32, "Broken pipe"), 141, ""),
    (FULL, 1, "stdout: cannot write: No space left on device\n"),
    (ValueError("no code for this character"), 1, "stdout: cannot write: no code for this character\n"),
])  # fmt: skip
def test_a_command_exits_without_a_traceback_when_its_output_is_lost(monkeypatch, capsys, error, code, message):
    """Shells report 141 for a program that SIGPIPE ended, as in `inspect | head`."""
    monkeypatch.setattr(sys, "stdout", Failing(error))
    exit_on_lost_output()
    with pytest.raises(SystemExit) as end:
        print("lost")
    assert end.value.code == code
    assert capsys.readouterr().err == message


def test_a_closed_descriptor_is_not_given_to_another_file(monkeypatch, tmp_path):
    """Libraries print to descriptor 2; their text would end up in a checkpoint."""
    monkeypatch.setattr(sys, "stderr", None)
    kept = os.dup(2)
    os.close(2)
    try:
        survive_lost_output(None)
        with (tmp_path / "weights").open("w") as file:
            assert file.fileno() != 2
        os.write(2, b"printed by a library\n")
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_a_stream_in_ascii_shows_escapes_and_other_characters_as_text(monkeypatch):
    """click writes bytes where a stream is in ASCII, which would go past the check of the text."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    exit_on_lost_output()
    click.echo("\x1b[31m é", color=True)
    assert written.getvalue() == rb"\x1b[31m \xe9" + b"\n"
