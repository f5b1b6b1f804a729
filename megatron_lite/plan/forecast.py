"""The plan of a run, printed at its start and, after some iterations, beside what was measured.

The first rank makes the plan before it joins the process group: a process has one, and the plan needs a fake one.
"""

import os
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from megatron_lite.config.schema import Config
from megatron_lite.config.validate import with_vocab_size
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.errors import ConfigError
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.plan.devices import DATA_SHEETS, Device, device_of
from megatron_lite.plan.estimate import Plan, make_plan
from megatron_lite.plan.links import Machines
from megatron_lite.plan.measured import default_profile, read_profile
from megatron_lite.plan.report import ranks_of
from megatron_lite.plan.units import duration, size_text
from megatron_lite.training.console import say
from megatron_lite.training.run import Run
from megatron_lite.training.state import StepReport
from megatron_lite.training.throughput import known_gpu, peak_memory_gb

SHORTEST = 20  # iterations; a shorter run ends before its plan would tell much
FIRST, LAST = 4, 14  # iterations after a start whose times are compared


class Forecast:
    """The plan of a run on its first rank; elsewhere, and for short runs, nothing."""

    def __init__(self, config: Config) -> None:
        self.plan: Plan | None = None
        self.problem = ""
        self._times: list[float] = []  # of iterations, without evaluations and checkpoints between them
        self._has_rates = False
        if (
            os.environ.get("RANK", "0") != "0"
            or config.train.iterations < SHORTEST
            or torch.distributed.is_initialized()
        ):
            return
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
        try:
            device, self._has_rates = device_here(config, local)
            self.plan = make_plan(_with_vocabulary(config), ranks, Machines(device, local))
        except Exception as error:  # training must not depend on its plan
            self.problem = f"{type(error).__name__}: {error}"
        self._resident = peak_memory_gb(torch.device("cpu"))

    def lines(self) -> list[str]:
        """The lines for the start of a run."""
        if self.plan is None:
            return [f"plan: none ({self.problem})"] if self.problem else []
        plan = self.plan
        needed = f"{size_text(plan.peak_memory)} on the fullest rank ({ranks_of(plan, plan.fullest)})"
        if not self._has_rates:
            hint = " (plan --calibrate)" if plan.device.name == "cpu" else ""
            return [f"plan: {needed}; no time: its rates are unknown{hint}"]
        return [f"plan: {needed}, {duration(plan.step_seconds)} for a step"]

    def after_step(self, run: Run, report: StepReport) -> None:
        """Note the time of an iteration, and print the comparison after some of them."""
        if self.plan is None or len(self._times) > LAST:
            return
        self._times.append(report.seconds)
        if len(self._times) > LAST:
            say(self._comparison(run), run.config.log)

    def _comparison(self, run: Run) -> str:
        plan, device = self.plan, run.ctx.device
        assert plan is not None
        used = peak_memory_gb(device) - (self._resident if device.type == "cpu" else 0.0)
        here = (sum(plan.memory[0].values()) - plan.device.reserved_bytes) / 1e9
        what = "resident memory since its start" if device.type == "cpu" else "allocated"
        memory = f"memory of rank 0: {used:,.3g} GB {what}, {here:,.3g} planned"
        if not self._has_rates or run.config.train.ramp_up:  # the first steps of a ramp are smaller than planned
            return memory
        measured = median(self._times[FIRST + 1 :])
        ratio = plan.step_seconds / measured
        return f"{memory}; iteration {duration(measured)}, {duration(plan.step_seconds)} planned ({ratio:.2f} of it)"


def _with_vocabulary(config: Config) -> Config:
    if config.model.vocab_size or not config.data.tokenizer:
        return config
    return with_vocab_size(config, build_tokenizer(config.data.tokenizer).vocab_size)


def device_here(config: Config, local_ranks: int) -> tuple[Device, bool]:
    """The device of this rank, and whether its rates are known."""
    dtype, precision = PRECISIONS[config.train.precision], config.train.precision
    if config.run.device != "cpu" and torch.cuda.is_available():
        known = known_gpu(torch.cuda.get_device_name()).lower().removeprefix("rtx ").removeprefix("g")
        name = known if known in DATA_SHEETS else "h100"
        size = torch.cuda.get_device_properties(0).total_memory
        return replace(device_of(name, dtype=dtype), memory_bytes=float(size)), known in DATA_SHEETS
    try:
        return read_profile(default_profile(), precision, local_ranks), True
    except ConfigError:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_ranks
        rates: dict[str, Any] = {
            "peak": 1.0,
            "product": 1.0,
            "attention_forward": 1.0,
            "attention_backward": 1.0,
            "memory": 1.0,
        }
        return Device("cpu", **rates, memory_bytes=size, link=1.0, network=1.0, reserved_bytes=0), False
