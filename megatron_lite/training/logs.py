"""The outputs of a run, on rank 0 alone: printed lines, metrics.jsonl and TensorBoard.

A printed line is short, for a person. `log.megatron_line` prints Megatron-LM's lines in its words, for its parsers, and
the timers. Unlike Megatron-LM, both show a loss that is not finite, as `nan`.
"""

import contextlib
import math
import threading
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_lite.checkpoint.lock import Lock
from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.load import RESOLVED, SETTINGS, WRITTEN, dump_config, dump_settings
from megatron_lite.config.schema import Config, LogConfig
from megatron_lite.files import atomic_write
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.training import console
from megatron_lite.training.board import Board
from megatron_lite.training.console import brief
from megatron_lite.training.metrics import MetricsFile, check_run_dir, write_errors
from megatron_lite.training.state import StepReport, TrainState, samples_for
from megatron_lite.training.throughput import peak_memory_gb, peak_tflops
from megatron_lite.training.timers import PhaseTime, timers_line

BAR = "-" * 100
# tqdm's default lock is a semaphore of the system, which would outlive a killed rank.
tqdm.set_lock(threading.RLock())


class RunLog:
    """The outputs of one run; `say` prints above the progress bar."""

    def __init__(self, config: Config, ctx: ParallelContext, state: TrainState, lock: Lock | None = None) -> None:
        self.config, self.ctx = config, ctx
        self.active = ctx.rank == 0
        self._recent: dict[str, float] = defaultdict(float)
        self._losses: dict[str, float] = defaultdict(float)  # sums over recent iterations that were not skipped
        self._printed_scale = 0.0
        if not self.active:
            return
        self.peak = config.log.peak_tflops or peak_tflops(ctx.device, PRECISIONS[config.train.precision])
        decoder_length = config.data.decoder_length if config.model.encoder_layers else 0
        self.flops_per_token = flops_per_token(config.model, config.data.seq_length, decoder_length)
        self.folder, self._lock = Path(config.run.dir), lock
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._metrics = MetricsFile(self.folder / "metrics.jsonl", state.iteration)
            self._board = self._open_board(state)
        self.say(self._metrics.notice)
        self._bar = tqdm(
            total=config.train.iterations, initial=state.iteration, disable=None, dynamic_ncols=True, **console.BAR
        )

    def _open_board(self, state: TrainState) -> Board | None:
        if self.config.log.tensorboard and find_spec("tensorboard") is None:
            self.say("no TensorBoard files: Python cannot import tensorboard (pip install tensorboard)")
            return None
        return Board(self.folder / "tensorboard", self.config, state) if self.config.log.tensorboard else None

    def say(self, text: str) -> None:
        """Print on rank 0, above the progress bar."""
        if self.active and text:
            console.say(text, self.config.log)

    def say_either(self, text: str, in_megatron_words: str) -> None:
        """Print the first text or, with `log.megatron_line`, the second one."""
        self.say(in_megatron_words if self.config.log.megatron_line else text)

    def iteration(
        self,
        state: TrainState,
        report: StepReport,
        global_batch: int,
        seconds: float,
        times: Mapping[str, PhaseTime] | None = None,
    ) -> None:
        """Record a finished iteration; print the first one and every `log.interval`-th, then `times`."""
        if not self.active:
            return
        tokens = report.tokens
        tflops = tokens * self.flops_per_token / seconds / self.ctx.grid.world_size / 1e12
        row: dict[str, Any] = {
            "iteration": state.iteration,
            "consumed_samples": state.consumed_samples,
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "loss_scale": report.loss_scale,
            "skipped": report.skipped,
            "tokens_per_second": tokens / seconds,
            "mfu": tflops / self.peak if self.peak else 0.0,
            "memory_gb": peak_memory_gb(self.ctx.device),
            "seconds": seconds,
            **{name: value for name, value in report.losses.items() if name != total_name(report.losses)},
        }
        if times:
            row["timers"] = {name: time._asdict() for name, time in times.items()}
        speed = {"mfu": row["mfu"]} if self.ctx.device.type == "cuda" else {"gflops-per-second": 1000 * tflops}
        scalars = {
            **report.losses,
            "learning-rate": report.lr,
            "grad-norm": report.grad_norm,
            "loss-scale": report.loss_scale,
            "batch-size": global_batch,
            "iteration-time": seconds,
            "throughput": tflops,
            "tokens-per-second": row["tokens_per_second"],
            "memory-gb": row["memory_gb"],
            "skipped-iterations": state.skipped,
        }
        self._record(row, scalars | speed | times_for_board(times or {}), state)
        rate = f"{tqdm.format_sizeof(row['tokens_per_second'])} tokens/s"
        self._collect(report, global_batch, seconds, tflops)
        postfix = f"{self._left(state)} left, loss {brief(report.loss)}, lr {report.lr:.2e}, {rate}"
        self._bar.set_postfix_str(postfix, refresh=False)
        self._bar.update(state.iteration - self._bar.n)
        if is_printed(state.iteration, self.config.log):
            count = self._recent["losses"]
            means = {name: self._losses[name] / count if count else value for name, value in report.losses.items()}
            self.say_either(self._line(state, report, means), self._megatron_line(state, report, means, global_batch))
            if times:
                self.say_either("", timers_line(times, self.ctx.world.size))
            self._printed_scale = report.loss_scale
            self._recent.clear()
            self._losses.clear()

    def times(self, state: TrainState, times: Mapping[str, PhaseTime]) -> None:
        """Print the times of phases after the last printed iteration, which TensorBoard has too."""
        if self.active and times:
            if self._board is not None:
                self._board.add(times_for_board(times), state)
            self.say_either("", timers_line(times, self.ctx.world.size))

    def _record(self, row: dict[str, Any], scalars: dict[str, float], state: TrainState) -> None:
        with write_errors(self.folder):
            self._restore_folder(state)
            self._metrics.add(row)
            if self._board is not None:
                self._board.add(scalars, state)

    def _restore_folder(self, state: TrainState) -> None:
        """Create a deleted run.dir again. Raise CheckpointError where another run uses it by now."""
        if not self._metrics.is_replaced():
            return
        was_deleted = not self._metrics.path.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            self._lock.take_again()
        self._metrics.open_again()
        write_config(self.config)
        if self._board is not None and was_deleted:
            self._board.close()
            self._board = self._open_board(state)
        if was_deleted:
            self.say(
                f"DELETED: {self.folder} was deleted during iteration {state.iteration}; it is created again with all "
                "rows of metrics.jsonl, but earlier checkpoints and TensorBoard points are lost"
            )

    def _collect(self, report: StepReport, samples: int, seconds: float, tflops: float) -> None:
        recent = self._recent
        recent["iterations"] += 1
        recent["seconds"] += seconds
        recent["samples"] += samples
        recent["tokens"] += report.tokens
        recent["tflop_seconds"] += tflops * seconds
        recent["skipped"] += report.skipped
        recent["nan"] += not math.isfinite(report.loss)
        if not report.skipped:
            recent["losses"] += 1
            for name, value in report.losses.items():
                self._losses[name] += value

    def _left(self, state: TrainState) -> str:
        """The remaining time at the speed since the last printed line."""
        samples = samples_for(self.config.train, self.ctx.dp.size, state) - state.consumed_samples  # a ramp grows
        return tqdm.format_interval(self._recent["seconds"] / self._recent["samples"] * samples)

    def _line(self, state: TrainState, report: StepReport, means: dict[str, float]) -> str:
        recent, total, others = self._recent, self.config.train.iterations, dict(means)
        loss = others.pop(total_name(means), report.loss)
        is_new_scale = self.config.train.precision == "fp16" and report.loss_scale != self._printed_scale
        fields = {  # the smaller the number, the longer a narrow line shows it; 0: not shown
            f"iteration {state.iteration:{len(str(total))}}/{total}": 1,
            f"loss {brief(loss)}": 1,
            f"{recent['nan']:.0f} not finite": int(recent["nan"] > 0),
            f"{recent['skipped']:.0f} skipped": int(recent["skipped"] > 0),
            f"loss scale {report.loss_scale:g}": int(is_new_scale),
            **dict.fromkeys(named(others), 3),
            f"lr {report.lr:.2e}": 4,
            f"{tqdm.format_sizeof(recent['tokens'] / recent['seconds'])} tokens/s": 2,
            f"{self._left(state)} left": 2 * (1 < state.iteration < total),  # the first one also compiles and allocates
            f"grad norm {brief(report.grad_norm)}": 5,
        }
        return console.one_line({text: number for text, number in fields.items() if number})

    def _megatron_line(self, state: TrainState, report: StepReport, means: dict[str, float], global_batch: int) -> str:
        recent, total = self._recent, self.config.train.iterations
        fields = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {state.iteration:8d}/{total:8d}",
            f" consumed samples: {state.consumed_samples:12d}",
            f" elapsed time per iteration (ms): {1000 * recent['seconds'] / recent['iterations']:.1f}",
            f" throughput per GPU (TFLOP/s/GPU): {recent['tflop_seconds'] / recent['seconds']:.1f}",
            f" learning rate: {report.lr:.6E}",
            f" global batch size: {global_batch:5d}",
            *[f" {name}: {scientific(value)}" for name, value in means.items()],
            f" loss scale: {report.loss_scale:.1f}",
            f" grad norm: {report.grad_norm:.3f}",
            f" number of skipped iterations: {recent['skipped']:3.0f}",
            f" number of nan iterations: {recent['nan']:3.0f}",
        ]
        return " |".join(fields) + " |"

    def evaluation(self, state: TrainState, losses: dict[str, float], where: str, split: str = "validation") -> None:
        """Record and print the losses of validation or test data."""
        if not self.active:
            return
        row: dict[str, float] = {"iteration": state.iteration}
        scalars, text, total = {}, "", total_name(losses)
        short = named({"loss" if name == total else name: value for name, value in losses.items()})
        for name, value in losses.items():
            row[f"{split}_loss" if name == total else f"{split}_{name}"] = scalars[f"{name} {split}"] = value
            text += f" {name} value: {scientific(value)} |"
            if name == "lm loss":
                perplexity = math.exp(min(value, 20.0))  # in this order min keeps a nan
                row[f"{split}_ppl"] = scalars[f"{name} {split} ppl"] = perplexity
                text += f" {name} PPL: {scientific(perplexity)} |"
                short.append(f"perplexity {brief(perplexity)}")
        self._record(row, scalars, state)
        self.say_either(f"{split} at {where}:  {'  '.join(short)}", f"{BAR}\n {split} loss at {where} |{text} \n{BAR}")

    def tasks(self, state: TrainState, results: Mapping[str, Mapping[str, float]], where: str) -> None:
        """Record and print the results of tasks."""
        if not self.active:
            return
        scalars = {f"{task} {name}": value for task, values in results.items() for name, value in values.items()}
        self._record({"iteration": state.iteration, "tasks": results}, scalars, state)
        for task, values in results.items():
            self.say(f"task {task} at {where}:  {'  '.join(named(values))}")

    def evaluated_at(self) -> dict[str, int]:
        """The iteration of the last evaluation in metrics.jsonl, by split."""
        with write_errors(self.folder):
            rows = self._metrics.rows()
        keys = {"validation_loss": "validation", "test_loss": "test", "tasks": "tasks"}
        return {name: row["iteration"] for row in rows for key, name in keys.items() if key in row}

    def close(self) -> None:
        """Close all outputs. An error here was reported by an earlier write."""
        if not self.active:
            return
        self._bar.close()
        with contextlib.suppress(OSError):
            self._metrics.close()
        if self._board is not None:
            self._board.close()


def write_config(config: Config) -> None:
    """Write the given settings and all fields into run.dir. A start that fails leaves the old files."""
    check_run_dir(config)
    for name, text in ((SETTINGS, dump_settings(config)), (RESOLVED, dump_config(config))):
        path = Path(config.run.dir) / name
        with write_errors(path.parent):
            atomic_write(path, WRITTEN + text)


def is_printed(iteration: int, log: LogConfig) -> bool:
    """True for an iteration with a printed line: the first one and every `log.interval`-th."""
    return iteration == 1 or iteration % log.interval == 0


def times_for_board(times: Mapping[str, PhaseTime]) -> dict[str, float]:
    """The seconds of the slowest rank under Megatron-LM's tags."""
    return {f"{name}-time": time.max_seconds for name, time in times.items()}


def total_name(losses: dict[str, float]) -> str:
    """The name of the loss that training minimizes."""
    return "loss" if "loss" in losses else "lm loss"


def named(values: Mapping[str, float]) -> list[str]:
    """`lm 5.369` for a `lm loss`: what follows the total loss in a line."""
    return [f"{name.replace('_', ' ').removesuffix(' loss')} {brief(value)}" for name, value in values.items()]


def scientific(value: float) -> str:
    """Megatron-LM's format of a loss, and `nan` or `inf`."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)
