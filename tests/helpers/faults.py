"""Faults injected into a training run at a given iteration and rank, and the function that the run's ranks execute."""

import contextlib
import json
import os
import random
import resource
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from megatron_lite.training.loop import train_step
from tests.helpers.runs import train_to_end

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    kind: str  # a key of SIGNALS, "nan", "weight" or "disk"
    iteration: int
    rank: int
    delay: float  # seconds into the iteration, for signals


def inject(fault: Fault, run, microbatches) -> None:
    """Inject `fault` into this rank."""
    if fault.kind in SIGNALS:
        threading.Timer(fault.delay, os.kill, (os.getpid(), SIGNALS[fault.kind])).start()
    elif fault.kind == "nan":
        microbatches[0].loss_mask[0, 0] = float("nan")
    elif fault.kind == "weight":
        name = random.Random(fault.iteration).choice(sorted(run.params))
        bits = run.params[name].detach().view(-1).view(torch.int32)
        bits[-1] ^= 1 << 20  # a mantissa bit: only a comparison of replicas detects it
    elif fault.kind == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def faulty_step(run, microbatches, *, folder: Path, faults: list[Fault]):
    """`train_step` with the faults of this rank and iteration; restarts do not repeat a fault."""
    for number, fault in enumerate(faults):
        if fault.rank == run.ctx.rank and fault.iteration == run.state.iteration + 1:
            with contextlib.suppress(FileExistsError):
                (folder / f"fault_{number}").touch(exist_ok=False)
                inject(fault, run, microbatches)
    return train_step(run, microbatches)


def train_with_faults(folder: str, faults: str, changes: str) -> None:
    """Train on this rank; `faults` and `changes` of the config are JSON."""
    torch.set_num_threads(1)
    all_faults = [Fault(**fault) for fault in json.loads(faults)]

    def step(run, microbatches):
        return faulty_step(run, microbatches, folder=Path(folder), faults=all_faults)

    with mock.patch("megatron_lite.training.loop.train_step", step):
        train_to_end(Path(folder), "codegeex", **json.loads(changes))
