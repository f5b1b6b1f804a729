"""What a run prints and records, without a run."""

import json
import math

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.initialize import choose_device
from megatron_lite.training.logs import RunLog, keep_rows, writing
from megatron_lite.training.state import TrainState
from megatron_lite.training.step import StepReport


@pytest.fixture
def make_log(tmp_path):
    def make(iteration: int = 0, *overrides: str) -> RunLog:
        fields = [f"run.dir={tmp_path}", "model.vocab_size=64", "log.peak_tflops=1", "log.tensorboard=false"]
        config = load_config(None, [*fields, *overrides])
        ctx = ParallelContext.create(Grid(), choose_device("cpu", 0), 60)
        return RunLog(config, ctx, TrainState(iteration=iteration))

    return make


def report(loss: float, skipped: bool = False) -> StepReport:
    return StepReport(loss=loss, grad_norm=2.0, lr=1e-3, loss_scale=1.0, skipped=skipped)


def test_a_loss_that_is_no_number_is_printed_as_nan(make_log, capsys):
    """Megatron-LM leaves the field out, and a broken run looks like a quiet one."""
    log = make_log()
    log.iteration(TrainState(iteration=1, consumed_samples=8), report(math.nan), 8, 0.5)
    log.evaluation(TrainState(iteration=1), math.nan, "iteration 1")
    log.close()
    printed = capsys.readouterr().out
    assert "| lm loss: nan |" in printed
    assert "number of nan iterations:   1 |" in printed
    assert "lm loss PPL: nan" in printed


def test_a_line_averages_what_came_since_the_last_one(make_log, capsys):
    log = make_log(0, "log.interval=4")
    for number, (loss, skipped) in enumerate([(9.0, False), (4.0, False), (100.0, True), (2.0, False)], start=1):
        log.iteration(TrainState(iteration=number), report(loss, skipped), 8, number / 10)
    log.close()
    first, second = [line for line in capsys.readouterr().out.splitlines() if " iteration " in line]
    assert " lm loss: 9.000000E+00 |" in first
    assert " lm loss: 3.000000E+00 |" in second  # the skipped one does not count
    assert " number of skipped iterations:   1 |" in second
    assert " elapsed time per iteration (ms): 300.0 |" in second


def test_rows_after_the_loaded_iteration_are_dropped(make_log, tmp_path):
    """They belong to a future that the resumed run will write again; a line cut by a kill is no row."""
    kept = {"iteration": 1, "loss": 3.0}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(kept)}\n{{"iteration": 2, "loss": 2.0}}\n{{"iter')
    make_log(iteration=1).close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [kept]


def test_a_first_run_has_no_rows_to_keep(tmp_path):
    keep_rows(tmp_path / "metrics.jsonl", 0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_error_of_the_disk_names_the_place(tmp_path):
    words = r"no/such: cannot write: No such file or directory; free space or fix"
    with pytest.raises(TrainingError, match=words), writing(tmp_path):
        (tmp_path / "no" / "such").write_text("")


def test_a_row_has_unrounded_numbers(make_log, tmp_path):
    log = make_log()
    log.iteration(TrainState(iteration=1, consumed_samples=8), report(1 / 3), 8, 0.5)
    log.close()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["loss"] == 1 / 3
    assert row["tokens_per_second"] == 8 * 1024 / 0.5
    assert row["mfu"] == pytest.approx(8 * 1024 * log.flops_per_token / 0.5 / 1e12)
