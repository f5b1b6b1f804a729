"""The table of `megatron-lite compare`: the config fields that differ, and the results."""

import math
import re

import pytest

from tests.helpers.command import run_here
from tests.helpers.metrics_files import write_run

NAN = math.nan


def table_of(tmp_path, *names):
    """The cells of `compare` by first column."""
    done = run_here("compare", *names, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines() if line]
    return {row[0]: row[1:] for row in rows}


def test_compare_prints_the_fields_that_differ_and_the_results(tmp_path):
    """run.dir differs in every pair of runs and would be noise."""
    losses = [9.0, *[3.0, 2.0] * 5]
    write_run(tmp_path / "a", losses, "optim.lr=0.002", "data.paths=[x,y]", validation={5: 3.0, 11: 2.5}, seconds=60)
    write_run(tmp_path / "b", [2.0, 3.0], "optim.schedule=linear", "data.seq_length=50", validation={1: 4.0})
    done = run_here("compare", "a", "b", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "                                               a         b",
        "data.paths                                     [x, y]    []",
        "data.seq_length                                100       50",
        "optim.lr                                       0.002     0.0003",
        "optim.schedule                                 'cosine'  'linear'",
        "",
        "training loss, mean of the last 10 iterations  2.5000    2.5000 (mean of 2)",
        "validation loss, last evaluation               2.5000    4.0000 (iteration 1)",
        "iterations                                     11        2",
        "tokens                                         8,800     800",
        "tokens per second, median                      13        400",
        "hours                                          0.183     0.000556",
    ]


def test_equal_configs_are_reported(tmp_path):
    """An empty table of differences could also mean that none was looked for."""
    for name in "abc":
        write_run(tmp_path / name, [1.0])
    done = run_here("compare", "a", "b", "c", cwd=tmp_path)
    header, note, blank, *results = done.stdout.splitlines()
    assert header.split() == ["a", "b", "c"]
    assert (note, blank) == ("all config fields are equal (run.dir is not compared)", "")
    assert len(results) == 6


def test_runs_without_iterations_or_evaluations_have_no_values(tmp_path):
    """A sweep is compared while its last run is starting."""
    write_run(tmp_path / "a", [])
    write_run(tmp_path / "b", [1.0])
    table = table_of(tmp_path, "a", "b")
    assert table["training loss, mean of the last 10 iterations"] == ["-", "1.0000 (mean of 1)"]
    assert table["validation loss, last evaluation"] == ["-", "-"]
    assert table["iterations"] == ["0", "1"] and table["tokens"] == ["0", "800"]
    assert table["tokens per second, median"] == ["-", "800"]


def test_losses_that_are_not_finite_are_left_out_of_the_mean_and_counted(tmp_path):
    """One skipped iteration should not hide the loss; a diverged run must show nan."""
    write_run(tmp_path / "a", [*[2.0] * 11, NAN])
    write_run(tmp_path / "b", [2.0] + [NAN] * 10, validation={11: NAN})
    table = table_of(tmp_path, "a", "b")
    assert table["training loss, mean of the last 10 iterations"] == ["2.0000 (mean of 9)", "nan"]
    assert table["validation loss, last evaluation"] == ["-", "nan"]


def test_a_field_of_another_version_is_absent_and_no_error(tmp_path):
    """Otherwise old runs could not be compared with new ones."""
    for name in "ab":
        write_run(tmp_path / name, [1.0])
    path = tmp_path / "a" / "resolved.yaml"
    path.write_text(path.read_text().replace("clip_grad:", "clip_norm:").replace("ramp_up: null", "ramp_up: [1, 2, 3]"))
    table = table_of(tmp_path, "a", "b")
    assert table["optim.clip_norm"] == ["1.0", "absent"]
    assert table["optim.clip_grad"] == ["absent", "1.0"]
    assert table["train.ramp_up"] == ["[1, 2, 3]", "null"]


def test_runs_of_older_versions_have_their_settings_in_config_yaml(tmp_path):
    """Where both files exist, the newer start has written resolved.yaml."""
    for name, rate in (("a", "0.1"), ("b", "0.2")):
        write_run(tmp_path / name, [1.0], f"optim.lr={rate}")
    (tmp_path / "a" / "resolved.yaml").rename(tmp_path / "a" / "config.yaml")
    (tmp_path / "b" / "config.yaml").write_text("optim: {lr: 3}")
    assert table_of(tmp_path, "a", "b")["optim.lr"] == ["0.1", "0.2"]


def test_values_that_are_spelt_differently_are_equal(tmp_path):
    """YAML has several spellings of one number."""
    for name in "ab":
        write_run(tmp_path / name, [1.0])
    path = tmp_path / "a" / "resolved.yaml"
    path.write_text(path.read_text().replace("lr: 0.0003", "lr: 3e-4"))
    assert "optim.lr" not in table_of(tmp_path, "a", "b")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a"], "a: one run alone has no differences; give two or more: compare RUN RUN\n"),
        (["a", "gone"], "gone: no such folder; give the run.dir of a run, a folder with metrics.jsonl\n"),
        (
            ["a", "b"],
            "b/resolved.yaml: no such file; pretrain writes it beside metrics.jsonl, so copy both files of a run\n",
        ),
    ],
)
def test_wrong_runs_exit_with_2_and_a_message(tmp_path, arguments, message):
    for name in "ab":
        write_run(tmp_path / name, [1.0])
    (tmp_path / "b" / "resolved.yaml").unlink()
    done = run_here("compare", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
