"""What a run shows and records: printed lines, metrics.jsonl and TensorBoard. Rank 0 writes, the others are silent.

The iteration line has Megatron-LM's fields and format, so that its users' parsers work. Unlike there, a loss
that is not a number is printed as `nan` and does not vanish from the line.
"""

import contextlib
import json
import math
import os
import sys
import threading
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.schema import Config
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.training.initialize import DTYPES
from megatron_lite.training.state import TrainState
from megatron_lite.training.step import StepReport
from megatron_lite.training.throughput import peak_memory_gb, peak_tflops

BAR = "-" * 100
# tqdm's own lock is a semaphore of the system, which outlives a rank that is killed.
tqdm.set_lock(threading.RLock())


class RunLog:
    """The outputs of one run; `say` prints above the progress bar."""

    def __init__(self, config: Config, ctx: ParallelContext, state: TrainState) -> None:
        self.config, self.ctx = config, ctx
        self.active = ctx.rank == 0
        self._recent: dict[str, float] = defaultdict(float)
        if not self.active:
            return
        self.peak = config.log.peak_tflops or peak_tflops(ctx.device, DTYPES[config.train.precision])
        self.flops_per_token = flops_per_token(config.model, config.data.seq_length)
        folder = Path(config.run.dir)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            keep_rows(folder / "metrics.jsonl", state.iteration)
            self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
            self._board = self._open_board(folder / "tensorboard", state.iteration)
        self._bar = tqdm(
            total=config.train.iterations, initial=state.iteration, unit="it", disable=None, dynamic_ncols=True
        )

    def _open_board(self, folder: Path, iteration: int) -> Any:
        if not self.config.log.tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=iteration + 1 if iteration else None)

    def say(self, text: str) -> None:
        """Prints on rank 0, above the progress bar."""
        if self.active:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def iteration(self, state: TrainState, report: StepReport, global_batch: int, seconds: float) -> None:
        """Records one finished iteration everywhere; prints a line every `log.interval`, and the first."""
        if not self.active:
            return
        tokens = global_batch * self.config.data.seq_length
        tflops = tokens * self.flops_per_token / seconds / self.ctx.grid.world_size / 1e12
        row = {
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
        }
        self._write_row(row)
        self._write_board(state, report, global_batch, seconds, tflops)
        self._bar.set_postfix_str(f"loss {report.loss:.3f}, {row['tokens_per_second']:,.0f} tokens/s", refresh=False)
        self._bar.update(state.iteration - self._bar.n)
        self._collect(report, seconds, tflops)
        if state.iteration % self.config.log.interval == 0 or state.iteration == 1:
            self.say(self._line(state, report, global_batch))
            self._recent.clear()

    def _collect(self, report: StepReport, seconds: float, tflops: float) -> None:
        recent = self._recent
        recent["iterations"] += 1
        recent["seconds"] += seconds
        recent["tflop_seconds"] += tflops * seconds
        recent["skipped"] += report.skipped
        recent["nan"] += not math.isfinite(report.loss)
        if not report.skipped:
            recent["loss"] += report.loss
            recent["losses"] += 1

    def _line(self, state: TrainState, report: StepReport, global_batch: int) -> str:
        recent = self._recent
        loss = recent["loss"] / recent["losses"] if recent["losses"] else report.loss
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S.%f}"
        fields = [
            f" [{now}] iteration {state.iteration:8d}/{self.config.train.iterations:8d}",
            f" consumed samples: {state.consumed_samples:12d}",
            f" elapsed time per iteration (ms): {1000 * recent['seconds'] / recent['iterations']:.1f}",
            f" throughput per GPU (TFLOP/s/GPU): {recent['tflop_seconds'] / recent['seconds']:.1f}",
            f" learning rate: {report.lr:.6E}",
            f" global batch size: {global_batch:5d}",
            f" lm loss: {scientific(loss)}",
            f" loss scale: {report.loss_scale:.1f}",
            f" grad norm: {report.grad_norm:.3f}",
            f" number of skipped iterations: {int(recent['skipped']):3d}",
            f" number of nan iterations: {int(recent['nan']):3d}",
        ]
        return " |".join(fields) + " |"

    def evaluation(self, state: TrainState, loss: float, where: str, split: str = "validation") -> None:
        """Records and prints a validation or test loss."""
        if not self.active:
            return
        perplexity = math.exp(min(loss, 20.0))  # in this order a nan stays a nan
        self._write_row({"iteration": state.iteration, f"{split}_loss": loss, f"{split}_ppl": perplexity})
        tag = f"lm loss {split}"
        self._add_scalars({tag: loss, f"{tag} ppl": perplexity}, state.iteration)
        self._add_scalars({f"{tag} vs samples": loss}, state.consumed_samples)
        numbers = f"lm loss value: {scientific(loss)} | lm loss PPL: {scientific(perplexity)}"
        self.say(f"{BAR}\n {split} loss at {where} | {numbers} | \n{BAR}")

    def has_evaluation(self, iteration: int, name: str = "validation") -> bool:
        """Whether metrics.jsonl holds an evaluation on that data after this iteration."""
        lines = (Path(self.config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return any(row["iteration"] == iteration and f"{name}_loss" in row for row in map(json.loads, lines))

    def _write_row(self, row: dict[str, Any]) -> None:
        with writing(Path(self.config.run.dir)):
            self._metrics.write(json.dumps(row) + "\n")

    def _write_board(
        self, state: TrainState, report: StepReport, global_batch: int, seconds: float, tflops: float
    ) -> None:
        scalars = {
            "lm loss": report.loss,
            "learning-rate": report.lr,
            "grad-norm": report.grad_norm,
            "loss-scale": report.loss_scale,
            "batch-size": global_batch,
            "iteration-time": seconds,
            "throughput": tflops,
        }
        self._add_scalars(scalars, state.iteration)
        for_samples = ("lm loss", "learning-rate", "grad-norm", "batch-size")
        self._add_scalars({f"{tag} vs samples": scalars[tag] for tag in for_samples}, state.consumed_samples)

    def _add_scalars(self, scalars: dict[str, float], step: int) -> None:
        if self._board is None:
            return
        with writing(Path(self.config.run.dir) / "tensorboard"):
            for tag, value in scalars.items():
                self._board.add_scalar(tag, value, step)

    def close(self) -> None:
        """Closes all outputs. A disk that is full was reported where it was written to, or loses only curves."""
        if not self.active:
            return
        self._bar.close()
        with contextlib.suppress(OSError):
            self._metrics.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()


def scientific(value: float) -> str:
    """Megatron-LM's format of a loss; `nan` and `inf` in the spelling that people search for."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)


class writing:
    """Turns an OSError in its body into a message that names the place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise TrainingError(
                f"{error.filename or self.path}: cannot write: {reason}; "
                "free space or fix the permissions, or choose another run.dir, and run the same command again"
            ) from error


def keep_rows(path: Path, iteration: int) -> None:
    """Drops the rows of a metrics file that are later than `iteration`, and a half-written last one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("iteration", 0) <= iteration:
            kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
