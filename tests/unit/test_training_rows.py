"""Damaged rows of metrics.jsonl: each reader skips them, says so once and keeps the other rows."""

import json

import pytest

from megatron_lite.training.metrics import MetricsFile
from megatron_lite.training.rows import read_rows
from tests.helpers.cases import all_cases
from tests.helpers.command import run_here
from tests.helpers.metrics_files import write_run

ROW = {"iteration": 3, "consumed_samples": 24, "loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "tokens_per_second": 1.0}


def row(**values: object) -> bytes:
    return json.dumps({**ROW, "seconds": 1.0, **values}).encode()


NOT_ROWS = {
    "bytes that are not UTF-8": b"\xff\xfe",
    "half a surrogate pair in UTF-8": b'{"iteration": 3, "name": "\xed\xa0\x80"}',
    "zero bytes": b"\0" * 100,
    "an empty line": b"",
    "not an object": b"[1]",
    "text": b'"iteration"',
    "no iteration": b'{"validation_loss": 1}',
    "iteration null": b'{"iteration": null, "loss": 1}',
    "iteration text": b'{"iteration": "3"}',
    "iteration true": b'{"iteration": true}',
    "iteration with a fraction": b'{"iteration": 3.5}',
    "iteration NaN": b'{"iteration": NaN}',
    "iteration infinite": b'{"iteration": Infinity}',
    "iteration below 0": b'{"iteration": -1}',
    "iteration of 400 digits": b'{"iteration": 1' + b"0" * 400 + b"}",
    "5,000 digits": b'{"iteration": 3, "loss": 1' + b"0" * 5000 + b"}",
    "deep brackets": b'{"iteration": 3, "loss": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "half a row": b'{"iteration": 3, "lo',
    "a long line": b"x" * 2_000_000,
}
NO_CURVE = {  # rows that a run keeps and that no curve has
    "loss null": row(loss=None),
    "loss of 400 digits": row(loss=10**400),
    "loss above fp32": row(loss=1e300),
    "samples NaN": row(consumed_samples=float("nan")),
    "samples infinite": row(consumed_samples=float("inf")),
    "samples of 400 digits": row(consumed_samples=10**400),
    "seconds infinite": row(seconds=float("inf")),
    "speed below 0": row(tokens_per_second=-1.0),
    "no samples": b'{"iteration": 3, "loss": 1.0}',
    "validation loss is text": b'{"iteration": 3, "validation_loss": "1"}',
}


def test_a_run_resumes_with_its_other_rows_and_says_once_what_it_skipped(tmp_path):
    """A log that was damaged by a full disk would end every restart."""
    path = tmp_path / "metrics.jsonl"
    good = [b'{"iteration": 1, "loss":  NaN}', b'{"loss": 2.0,"iteration": 2}', b'{"iteration": 2, "test_loss": 1}']
    with all_cases() as case:
        for name, line in NOT_ROWS.items():
            path.write_bytes(b"\n".join([good[0], line, *good[1:], b'{"iteration": 9}', b'{"iter']))
            with case(name):
                file = MetricsFile(path, iteration=2)
                assert path.read_bytes() == b"".join(kept + b"\n" for kept in good)
                assert file.notice == f"{path}: skipped 1 damaged row, first line 2"
                assert [kept["iteration"] for kept in file.rows()] == [1, 2, 2]
                file.close()
    assert MetricsFile(path, iteration=2).notice == ""


def test_a_deleted_file_gets_all_its_bytes_again(tmp_path):
    """A byte that is not UTF-8 would end the run."""
    file = MetricsFile(tmp_path / "metrics.jsonl", iteration=0)
    file.add({"iteration": 1})
    damaged = b"\xff\n" + file.path.read_bytes()
    file.path.write_bytes(damaged)
    file.path.unlink()
    file.open_again()
    file.close()
    assert file.path.read_bytes() == damaged


@pytest.mark.parametrize("command", ["plot", "compare"])
def test_a_command_leaves_damaged_rows_out_with_one_notice(tmp_path, command):
    """NaN and large numbers ended plot and compare with tracebacks."""
    for name in ("a", "b"):
        write_run(tmp_path / name, [5.0, 4.0], validation={2: 4.5})
    path = tmp_path / "a" / "metrics.jsonl"
    whole = path.read_bytes()
    expected = run_here(command, "a", "b", cwd=tmp_path).stdout
    with all_cases() as case:
        for name, line in (NOT_ROWS | NO_CURVE).items():
            path.write_bytes(line + b"\n" + whole)
            with case(name):
                done = run_here(command, "a", "b", cwd=tmp_path)
                assert (done.returncode, done.stdout) == (0, expected)
                assert done.stderr == "a/metrics.jsonl: skipped 1 damaged row, first line 1\n"


@pytest.mark.parametrize("command", ["plot", "compare"])
@pytest.mark.parametrize("loss", ["NaN", "-Infinity", "3e38"])
def test_a_loss_that_training_can_have_is_no_damage(tmp_path, command, loss):
    for name in ("a", "b"):
        write_run(tmp_path / name, [5.0, 4.0])
    for name in ("a", "b"):
        values = ROW | {"seconds": 1e30, "loss": float(loss), "grad_norm": float(loss)}
        with (tmp_path / name / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(values | {"iteration": n}) + "\n" for n in range(3, 13)))
    picture = ["--out", "curves.png"] if command == "plot" else []
    done = run_here(command, "a", "b", *picture, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_notice_counts_the_rows_and_names_the_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n\xff\n{}\n{"iteration": 2}')
    rows, notice = read_rows(path)
    assert [found["iteration"] for _, found in rows] == [1, 2]
    assert notice == f"{path}: skipped 2 damaged rows, first line 2"
