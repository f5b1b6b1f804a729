"""The lines that a run prints and the metrics that it records."""

import json
import math
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.checkpoint.lock import Lock, locked
from megatron_lite.config.load import load_config
from megatron_lite.errors import CheckpointError, ConfigError, TrainingError
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.announce import announce_start
from megatron_lite.training.console import WIDTH
from megatron_lite.training.initialize import choose_device
from megatron_lite.training.logs import RunLog, write_config
from megatron_lite.training.metrics import keep_rows, write_errors
from megatron_lite.training.state import StepReport, TrainState
from megatron_lite.training.timers import PhaseTime
from tests.helpers.limits import files_of_at_most
from tests.helpers.locks import other_run
from tests.helpers.printed import unwrapped
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


def printed_line(log: RunLog, capsys, *reports: StepReport, last: int = 1000) -> str:
    """The line of iteration `last` after these reports, each of 8 sequences in half a second."""
    for number, each in enumerate(reports, start=last - len(reports) + 1):
        log.iteration(TrainState(iteration=number), each, 8, 0.5)
    log.close()
    (line,) = capsys.readouterr().out.splitlines()
    return line


def test_a_nan_loss_is_printed(make_log, capsys):
    """Megatron-LM omits the field, which can hide a broken run."""
    log = make_log()
    log.iteration(TrainState(iteration=1, consumed_samples=8), report(math.nan), 8, 0.5)
    log.evaluation(TrainState(iteration=1), {"lm loss": math.nan}, "iteration 1")
    log.close()
    first, evaluation = capsys.readouterr().out.splitlines()
    assert first.startswith("iteration    1/1000  loss nan  1 not finite  lr ")
    assert evaluation == "validation at iteration 1:  loss nan  perplexity nan"


def test_a_line_averages_the_iterations_since_the_previous_line(make_log, capsys):
    log = make_log(0, "log.interval=4", "train.global_batch_size=8")
    for number, (loss, skipped) in enumerate([(9.0, False), (4.0, False), (100.0, True), (2.0, False)], start=1):
        log.iteration(TrainState(iteration=number), report(loss, skipped), 8, number / 10)
    log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert "  loss 9.000  lr 1.00e-03  " in first
    # Without the skipped iteration; 24 sequences of 1,024 tokens in 0.9 seconds; 996 iterations of 0.3 seconds.
    rest = "lr 1.00e-03  27.3k tokens/s  04:58 left  grad norm 2.000"
    assert second == f"iteration    4/1000  loss 3.000  1 skipped  {rest}"


def test_a_line_has_no_field_without_information(make_log, capsys):
    """Constant zeros and ones would distract from the fields that change."""
    line = printed_line(make_log(0, "train.global_batch_size=8"), capsys, report(2.0), last=990)
    assert line == "iteration  990/1000  loss 2.000  lr 1.00e-03  16.4k tokens/s  00:05 left  grad norm 2.000"


def test_the_loss_scale_of_fp16_is_printed_when_it_changes_and_so_are_skipped_iterations(make_log, capsys):
    log = make_log(0, "train.precision=fp16", "log.interval=1")
    for number, scale in enumerate([65536.0, 65536.0, 32768.0], start=1):
        step = replace(report(2.0, skipped=number == 3), loss_scale=scale)
        log.iteration(TrainState(iteration=number), step, 8, 0.5)
    log.close()
    first, second, third = capsys.readouterr().out.splitlines()
    assert "  loss scale 65536  " in first and "loss scale" not in second
    assert "  loss 2.000  1 skipped  loss scale 32768  " in third


def test_the_remaining_time_of_a_ramp_counts_samples(make_log, capsys):
    """The later iterations of a ramp are longer: here 40 of 4 samples, of which 4 took half a second, then 50 of 8."""
    log = make_log(0, "train.global_batch_size=8", "train.ramp_up=[4,4,199]", "train.iterations=100")
    log.iteration(TrainState(iteration=10, consumed_samples=40), report(2.0), 4, 0.5)
    log.close()
    assert "  01:10 left  " in capsys.readouterr().out
    assert log._bar.postfix.startswith("01:10 left, loss 2.000, ")


@pytest.mark.parametrize(("consumed", "batch"), [(0, "8 sequences of 1024 tokens each (4 at first, "), (200, "8 ")])
def test_the_start_has_the_batch_of_the_first_iteration(make_log, capsys, consumed, batch):
    """A user who sees the full batch takes the first speed of a ramp for that of the job."""
    config = load_config(None, ["train.global_batch_size=8", "train.ramp_up=[4,4,199]", "train.iterations=100"])
    dp, state = SimpleNamespace(size=1), TrainState(iteration=10, consumed_samples=consumed)
    run: Any = SimpleNamespace(config=config, ctx=SimpleNamespace(dp=dp), state=state)
    announce_start(run, make_log())
    printed = unwrapped(capsys.readouterr().out)
    assert printed.startswith(f"training from iteration 10 to 100, {batch}") and ("ramps up" in printed) == (
        not consumed
    )


def test_the_first_and_the_last_line_have_no_remaining_time(make_log, capsys):
    """The first iteration includes compilation, so an estimate from it would be far too long."""
    log = make_log()
    for number in (1, 1000):
        log.iteration(TrainState(iteration=number), report(2.0), 8, 30.0)
    log.close()
    assert " left" not in capsys.readouterr().out


def test_a_line_has_the_losses_and_scalars_of_a_forward_step(make_log, capsys):
    """The total is called loss, and comes first: training minimizes it."""
    losses = {"lm loss": 5.0, "sop loss": 1.0, "loss": 6.0, "accuracy of even": 0.25}
    line = printed_line(make_log(), capsys, replace(report(6.0), losses=losses), last=500)
    shown = "loss 6.000  lm 5.000  sop 1.000  lr 1.00e-03  16.4k tokens/s"
    assert line.startswith(f"iteration  500/1000  {shown}  ") and line.endswith(" left  ...")


def test_a_long_name_hides_no_other_field(make_log, capsys):
    """A person needs speed and remaining time in each line."""
    losses = {"loss": 6.0, "load balancing of the experts in all layers together": 1.0}
    line = printed_line(make_log(), capsys, replace(report(6.0), losses=losses), last=500)
    shown = "load balancing of... 1.000  16.4k tokens/s  00:31 left"
    assert line == f"iteration  500/1000  loss 6.000  {shown}  ..."


@pytest.mark.parametrize("names", [1, 3, 20])
@pytest.mark.parametrize("length", [1, 40, 200])
def test_a_line_has_100_columns_whatever_the_scalars_are_called(make_log, capsys, names, length):
    """What is wrong comes before the scalars; only the end of a line may be missing, and the line shows that it is."""
    losses = {"loss": math.nan} | {f"{'x' * length}{number}": 1e-9 for number in range(names)}
    bad = replace(report(math.nan, skipped=True), losses=losses, loss_scale=0.5, grad_norm=math.inf)
    line = printed_line(make_log(0, "train.precision=fp16", "train.iterations=1000000"), capsys, bad, last=123450)
    assert len(line) <= WIDTH
    assert line.startswith("iteration  123450/1000000  loss nan  1 not finite  1 skipped  loss scale 0.5  ")
    assert line.endswith("  ...")


def test_a_long_message_continues_on_indented_lines(make_log, capsys):
    """A path stays whole, so that it can be copied. With `log.megatron_line` a parser gets one line."""
    path, words = "/" + 120 * "p", "a sentence of words " * 10
    make_log().say(f"DAMAGED: {words}{path}")
    first, *others, last = capsys.readouterr().out.splitlines()
    assert first.startswith("DAMAGED: a sentence") and last == f"    {path}"
    assert all(line.startswith("    ") for line in others) and max(map(len, [first, *others])) <= WIDTH
    make_log(0, "log.megatron_line=true").say(words)
    assert capsys.readouterr().out == f"{words}\n"


def test_a_message_of_several_lines_keeps_them(make_log, capsys):
    make_log().say("FAILED:\n  first  " + "word " * 30 + "\n  second")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("  second")] == ["  second"]


def test_the_megatron_line_is_the_line_of_megatron(make_log, capsys):
    """Its parsers split it at bars and colons."""
    log = make_log(0, "log.megatron_line=true")
    log.iteration(TrainState(iteration=10, consumed_samples=80), report(2.0), 8, 0.5)
    log.evaluation(TrainState(iteration=10), {"lm loss": 2.0}, "iteration 10")
    log.close()
    line, above, evaluation, below = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]", line[:29])
    throughput = f"{log.flops_per_token * 8 * 1024 / 0.5 / 1e12:.1f}"
    assert line[29:] == (
        " iteration       10/    1000 | consumed samples:           80 | elapsed time per iteration (ms): 500.0 | "
        f"throughput per GPU (TFLOP/s/GPU): {throughput} | learning rate: 1.000000E-03 | global batch size:     8 | "
        "lm loss: 2.000000E+00 | loss scale: 1.0 | grad norm: 2.000 | number of skipped iterations:   0 | number of "
        "nan iterations:   0 |"
    )
    assert above == below == "-" * 100
    assert evaluation == " validation loss at iteration 10 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "


def test_a_file_of_the_user_in_run_dir_is_never_overwritten(tmp_path):
    """settings.yaml is a name that a user may give; config.yaml is the user's. A killed run leaves a part of a row."""
    config = load_config(None, [f"run.dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text("mine")
    for _ in range(2):
        write_config(config)
    assert (tmp_path / "config.yaml").read_text() == "mine"
    (tmp_path / "heartbeat").mkdir()
    for name in ("settings.yaml", "resolved.yaml", "metrics.jsonl", "exit_code", "heartbeat/hang"):
        if (tmp_path / name).exists():
            (tmp_path / name).unlink()
        (tmp_path / name).write_text("optim: {lr: 1}")
        with pytest.raises(ConfigError, match=rf"{name}: was not written by megatron-lite.*; rename it"):
            write_config(config)
        assert (tmp_path / name).read_text() == "optim: {lr: 1}"
        (tmp_path / name).unlink()
    others = '{"iteration": 1, "my_tool": "export"}\n'
    for name, text in (("metrics.jsonl", others), ("metrics.jsonl", "notes\n"), ("exit_code", "7\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"{name}: was not written by megatron-lite"):
            write_config(config)
        (tmp_path / name).unlink()
    for name, text in (("metrics.jsonl", '{"iter'), ("metrics.jsonl", '{"iteration": 1}\n'), ("exit_code", "75\n")):
        (tmp_path / name).write_text(text)
        write_config(config)


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
        assert (tmp_path / "settings.yaml").exists() and (tmp_path / "resolved.yaml").exists()
        assert (
            unwrapped(capsys.readouterr().out).count(
                f"DELETED: {tmp_path} was deleted during iteration 4; it is created"
            )
            == 1
        )
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


def test_a_full_disk_of_the_board_is_one_error_without_the_traceback_of_its_thread(make_log, tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    log = make_log(0, "log.tensorboard=true")
    with pytest.raises(TrainingError, match="writing failed: File too large"), files_of_at_most(8192):
        for number in range(1, 10_000):
            log.iteration(TrainState(iteration=number, consumed_samples=8 * number), report(2.0), 8, 0.5)
            (tmp_path / "metrics.jsonl").write_text("")
    log.close()
    assert printed == []


def test_rows_of_an_earlier_start_are_kept_beside_those_of_a_new_one(tmp_path):
    """Its checkpoints may have been moved away; the rows are all that is left."""
    path = tmp_path / "metrics.jsonl"
    for number in (1, 2):
        path.write_text(f'{{"iteration": 5, "consumed_samples": {number}}}\n')
        assert keep_rows(path, 0) == f"{path}.{number}: has the rows of an earlier start."
        assert not path.exists() and f"{number}}}" in path.with_name(f"metrics.jsonl.{number}").read_text()


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


def test_timers_follow_the_megatron_line_and_are_in_the_row_of_their_iteration(make_log, capsys, tmp_path):
    """Times after the last line, such as those of the last save, are printed: rows belong to iterations."""
    for overrides in ([], ["log.megatron_line=true"]):
        log = make_log(0, *overrides)
        times = {"forward-compute": PhaseTime(0.01, 0.02, 3)}
        log.iteration(TrainState(iteration=1), report(2.0), 8, 0.5, times)
        log.times(TrainState(iteration=1), {"save-checkpoint": PhaseTime(1.0, 1.0, 0)})
        log.times(TrainState(iteration=1), {})
        log.close()
        (first,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert first["timers"] == {"forward-compute": {"min_seconds": 0.01, "max_seconds": 0.02, "slowest_rank": 3}}
        lines = capsys.readouterr().out.splitlines()
        if not overrides:
            assert len(lines) == 1
            continue
        at = lines.index(" timers (ms per iteration): forward-compute 20.0")
        assert "| lm loss: " in lines[at - 1]
        assert lines[at + 1] == " outside of iterations (ms in all): save-checkpoint 1000.0"
