"""The lines that a run prints and the metrics that it records."""

import json
import math
import shutil
from pathlib import Path

import pytest

from megatron_lite.checkpoint.lock import Lock, locked
from megatron_lite.config.load import load_config
from megatron_lite.errors import CheckpointError, TrainingError
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.initialize import choose_device
from megatron_lite.training.logs import RunLog
from megatron_lite.training.metrics import keep_rows, write_errors
from megatron_lite.training.state import StepReport, TrainState
from megatron_lite.training.timers import PhaseTime
from tests.helpers.locks import other_run
from tests.helpers.tensorboard_files import tensorboard_events


@pytest.fixture
def make_log(tmp_path):
    def make(iteration: int = 0, *overrides: str, consumed: int = 0, lock: Lock | None = None) -> RunLog:
        fields = [f"run.dir={tmp_path}", "model.vocab_size=64", "log.peak_tflops=1", "log.tensorboard=false"]
        config = load_config(None, [*fields, *overrides])
        ctx = ParallelContext.create(Grid(), choose_device("cpu", 0), 60)
        return RunLog(config, ctx, TrainState(iteration=iteration, consumed_samples=consumed), lock)

    return make


def report(loss: float, skipped: bool = False) -> StepReport:
    losses = {"lm loss": loss}
    return StepReport(
        loss=loss, grad_norm=2.0, lr=1e-3, loss_scale=1.0, skipped=skipped, losses=losses, tokens=8 * 1024
    )


def test_a_nan_loss_is_printed(make_log, capsys):
    """Megatron-LM omits the field, which can hide a broken run."""
    log = make_log()
    log.iteration(TrainState(iteration=1, consumed_samples=8), report(math.nan), 8, 0.5)
    log.evaluation(TrainState(iteration=1), {"lm loss": math.nan}, "iteration 1")
    log.close()
    printed = capsys.readouterr().out
    assert "| lm loss: nan |" in printed
    assert "number of nan iterations:   1 |" in printed
    assert "lm loss PPL: nan" in printed


def test_a_line_averages_the_iterations_since_the_previous_line(make_log, capsys):
    log = make_log(0, "log.interval=4")
    for number, (loss, skipped) in enumerate([(9.0, False), (4.0, False), (100.0, True), (2.0, False)], start=1):
        log.iteration(TrainState(iteration=number), report(loss, skipped), 8, number / 10)
    log.close()
    first, second = [line for line in capsys.readouterr().out.splitlines() if " iteration " in line]
    assert " lm loss: 9.000000E+00 |" in first
    assert " lm loss: 3.000000E+00 |" in second  # without the skipped iteration
    assert " number of skipped iterations:   1 |" in second
    assert " elapsed time per iteration (ms): 300.0 |" in second


FIELDS_OF_MEGATRON = [
    *("consumed samples", "elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)", "learning rate"),
    *("global batch size", "lm loss", "loss scale", "grad norm"),
    *("number of skipped iterations", "number of nan iterations"),
]


def fields_of(line: str) -> dict[str, str]:
    """Values of an iteration line by name, without the iteration itself."""
    pairs = [field.partition(":") for field in line.split(" |")[1:-1]]
    return {name.strip(): value.strip() for name, _, value in pairs}


def test_a_line_has_no_field_without_information(make_log, capsys):
    """Constant zeros and ones would distract from the fields that change."""
    log = make_log(0, "train.global_batch_size=8")
    log.iteration(TrainState(iteration=990, consumed_samples=8), report(2.0), 8, 0.5)
    log.close()
    fields = fields_of(capsys.readouterr().out)
    assert list(fields) == [
        *("consumed samples", "elapsed time per iteration (ms)", "throughput per rank (GFLOP/s)"),
        *("tokens per second", "learning rate", "global batch size", "lm loss", "grad norm", "remaining time"),
    ]
    assert fields["tokens per second"] == "16384"
    assert fields["remaining time"] == "00:05"  # ten iterations of half a second
    assert float(fields["throughput per rank (GFLOP/s)"]) > 100


def test_the_remaining_time_of_a_ramp_counts_samples(make_log, capsys):
    """The later iterations of a ramp are longer: here 40 of 4 samples, of which 4 took half a second, then 50 of 8."""
    log = make_log(0, "train.global_batch_size=8", "train.ramp_up=[4,4,199]", "train.iterations=100")
    log.iteration(TrainState(iteration=10, consumed_samples=40), report(2.0), 4, 0.5)
    log.close()
    assert fields_of(capsys.readouterr().out)["remaining time"] == "01:10"


def test_the_loss_scale_of_fp16_and_skipped_iterations_are_printed(make_log, capsys):
    log = make_log(0, "train.precision=fp16")
    log.iteration(TrainState(iteration=10), report(2.0, skipped=True), 8, 0.5)
    log.close()
    fields = fields_of(capsys.readouterr().out)
    assert (fields["loss scale"], fields["number of skipped iterations"]) == ("1.0", "1")
    assert "number of nan iterations" not in fields


def test_the_first_line_has_no_remaining_time(make_log, capsys):
    """The first iteration includes compilation, so an estimate from it would be far too long."""
    log = make_log()
    log.iteration(TrainState(iteration=1), report(2.0), 8, 30.0)
    log.close()
    assert "remaining time" not in capsys.readouterr().out


def test_the_megatron_line_has_the_fields_of_megatron_in_order(make_log, capsys):
    log = make_log(0, "log.megatron_line=true")
    log.iteration(TrainState(iteration=10), report(2.0), 8, 0.5)
    log.close()
    assert list(fields_of(capsys.readouterr().out)) == FIELDS_OF_MEGATRON


def points(folder: Path) -> dict[str, list[int]]:
    """The steps of every scalar in TensorBoard's files."""
    events = tensorboard_events(folder, size_guidance={"scalars": 0})
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_resume_keeps_all_points_of_every_curve(make_log, tmp_path):
    """If one purge handled both kinds of steps, it would delete all points with more samples than iterations."""
    on = "log.tensorboard=true"
    for first, end in ((1, 4), (3, 6)):  # the second start is from the checkpoint of iteration 2
        log = make_log(first - 1, on, consumed=8 * (first - 1))
        for number in range(first, end + 1):
            state = TrainState(iteration=number, consumed_samples=8 * number)
            log.iteration(state, report(2.0), 8, 0.5)
        log.evaluation(state, {"lm loss": 2.0}, "the end")
        log.close()
    by_iteration, by_samples = points(tmp_path / "tensorboard"), points(tmp_path / "tensorboard" / "samples")
    assert by_iteration.pop("lm loss validation") == by_iteration.pop("lm loss validation ppl") == [6]
    assert by_samples.pop("lm loss validation vs samples") == [48]
    assert set(map(tuple, by_iteration.values())) == {(1, 2, 3, 4, 5, 6)}
    assert set(map(tuple, by_samples.values())) == {(8, 16, 24, 32, 40, 48)}
    assert {"tokens-per-second", "gflops-per-second", "memory-gb", "skipped-iterations"} <= set(by_iteration)
    assert {"lm loss vs samples", "learning-rate vs samples"} <= set(by_samples)


def test_tensorboard_has_the_config_as_text(make_log, tmp_path):
    make_log(0, "log.tensorboard=true", "optim.lr=0.125").close()
    events = tensorboard_events(tmp_path / "tensorboard")
    (event,) = events.Tensors("config/text_summary")
    assert b"lr: 0.125" in event.tensor_proto.string_val[0]


def rows(folder: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# TensorBoard's thread can flush just after the folder is deleted.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_folder_is_deleted_reports_it_once_and_loses_no_row(make_log, tmp_path, capsys):
    """Rows would be written to an unlinked file, and a second run could start in the folder unnoticed."""
    with locked(tmp_path, world=solo()) as lock:
        log = make_log(0, "log.interval=100", "log.tensorboard=true", lock=lock)
        for number in range(1, 6):
            log.iteration(TrainState(iteration=number, consumed_samples=8 * number), report(2.0), 8, 0.5)
            if number == 3:  # a rename is atomic; rmtree would race with TensorBoard's thread
                tmp_path.rename(tmp_path.with_name("deleted"))
        assert log.evaluated_at() == {}
        log.close()
        assert rows(tmp_path) == [1, 2, 3, 4, 5]
        assert points(tmp_path / "tensorboard")["lm loss"] == [4, 5]
        assert (tmp_path / "config.yaml").exists()
        assert capsys.readouterr().out.count(f"DELETED: {tmp_path} was deleted during iteration 4; it is created") == 1
        _, problem = other_run(tmp_path).communicate()
        assert "is in use by process" in problem


def test_a_run_stops_if_another_one_has_started_in_its_deleted_folder(make_log, tmp_path):
    with locked(tmp_path, world=solo()) as lock:
        log = make_log(lock=lock)
        log.iteration(TrainState(iteration=1), report(2.0), 8, 0.5)
        shutil.rmtree(tmp_path)
        other = other_run(tmp_path)
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=rf"is in use by process {other.pid} on"):
            log.iteration(TrainState(iteration=2), report(2.0), 8, 0.5)
        other.communicate()
        log.close()


def test_rows_after_the_loaded_iteration_are_dropped(make_log, tmp_path):
    """The resumed run writes those iterations again. A line that a kill has truncated is dropped too."""
    kept = {"iteration": 1, "loss": 3.0}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(kept)}\n{{"iteration": 2, "loss": 2.0}}\n{{"iter')
    make_log(iteration=1).close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [kept]


def test_keep_rows_creates_no_file(tmp_path):
    keep_rows(tmp_path / "metrics.jsonl", 0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_error_of_a_failed_write_names_the_file(tmp_path):
    words = r"no/such: writing failed: No such file or directory. Every rank"
    with pytest.raises(TrainingError, match=words), write_errors(tmp_path):
        (tmp_path / "no" / "such").write_text("")


def test_a_row_has_unrounded_values(make_log, tmp_path):
    log = make_log()
    log.iteration(TrainState(iteration=1, consumed_samples=8), report(1 / 3), 8, 0.5)
    log.close()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["loss"] == 1 / 3
    assert row["tokens_per_second"] == 8 * 1024 / 0.5
    assert row["mfu"] == pytest.approx(8 * 1024 * log.flops_per_token / 0.5 / 1e12)


def test_timers_follow_the_line_of_their_iteration_and_are_in_its_row(make_log, capsys, tmp_path):
    """Times after the last line, such as those of the last save, are printed: rows belong to iterations."""
    log = make_log()
    times = {"forward-compute": PhaseTime(0.01, 0.02, 3)}
    log.iteration(TrainState(iteration=1), report(2.0), 8, 0.5, times)
    log.times(TrainState(iteration=1), {"save-checkpoint": PhaseTime(1.0, 1.0, 0)})
    log.times(TrainState(iteration=1), {})
    log.close()
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(" timers (ms per iteration): forward-compute 20.0")
    assert "| lm loss: " in lines[at - 1]
    assert lines[at + 1] == " outside of iterations (ms in all): save-checkpoint 1000.0"
    (first,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["timers"] == {"forward-compute": {"min_seconds": 0.01, "max_seconds": 0.02, "slowest_rank": 3}}
