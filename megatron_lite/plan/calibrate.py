"""The profile of this machine's CPUs: measured rates, and factors by which real training steps differ from them.

Rates of products, attention, additions and collectives are measured (`measure.py`), then real steps of a few small
models. The factors with which the kernels' times add up to those of the steps follow by least squares: a real product
has other shapes than the measured ones, and an activation may still be in a cache. All ranks measure at once, and the
profile has an entry for each number of ranks.
"""

import platform
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from megatron_lite.config.schema import Config
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from megatron_lite.plan.fake_world import empty_batch
from megatron_lite.plan.measure import MESSAGES, measured_rates
from megatron_lite.plan.measured import KINDS, Measured
from megatron_lite.plan.stage import kernels, trace_rank
from megatron_lite.training.setup import build_run
from megatron_lite.training.step import train_step

# Hidden size, layers, tokens of a sequence, sequences, family of the models whose steps are measured.
REFERENCES = ((64, 2, 64, 2, "gpt"), (128, 4, 128, 4, "llama"), (256, 4, 256, 2, "gpt"), (512, 2, 256, 4, "llama"))
FAMILIES = {
    "gpt": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "llama": {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "attention_dropout": 0.0},
}
STEPS = 5
PRIOR = {"product": 1.0, "attention": 1.0, "memory": 1.0, "start": 1e-5}
WEAK = 0.01  # the weight of PRIOR against a relative error of 1


def reference(precision: str, hidden: int, layers: int, length: int, batch: int, family: str) -> Config:
    """The config of a small model."""
    model = {"hidden_size": hidden, "num_layers": layers, "num_heads": hidden // 32, "vocab_size": 1024}
    model |= {"max_position_embeddings": length, **FAMILIES[family]}
    train = {"precision": precision, "micro_batch_size": batch}
    return Config.model_validate({"model": model, "train": train, "data": {"seq_length": length}})


def measure_rank(precision: str) -> dict[str, Any]:
    """The rates of this rank, and the seconds of real steps of the reference models. Collective over the world."""
    rates = measured_rates(str(PRECISIONS[precision]).removeprefix("torch."))
    steps = [step_seconds(reference(precision, *sizes)) for sizes in REFERENCES]
    return {**rates, "steps": steps}


def step_seconds(config: Config) -> float:
    """The median time of a training step of one rank alone."""
    grid, device = Grid(), torch.device("cpu")
    ctx = ParallelContext._build(grid, 0, device, (0,), lambda name, ranks: None)
    run = build_run(config, ctx, seed_everything(config.run.seed, ctx))
    batches, found = [empty_batch(config, device)], []
    for step in range(STEPS + 1):
        start = time.perf_counter()
        train_step(run, batches)
        if step:
            found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]


def profile_of(answers: list[dict[str, Any]], precision: str) -> dict[str, Any]:
    """The entry of a profile, from what each rank has measured; the slowest rank counts in each."""
    rates = {
        name: _worst([answer[name] for answer in answers]) for name in ("products", "attention", "memory", "cache")
    }
    steps = [max(answer["steps"][place] for answer in answers) for place in range(len(REFERENCES))]
    measured = Measured(**rates, factors=dict.fromkeys(KINDS, 1.0))
    factors = fitted(measured, steps, precision)
    entry = asdict(Measured(**rates, factors=factors))
    if "collectives" in answers[0]:
        count = len(answers)
        small, large = (max(answer["collectives"][str(size)] for answer in answers) for size in MESSAGES)
        per_byte = (large - small) / (MESSAGES[1] - MESSAGES[0])
        entry["link"] = 2 * (count - 1) / count / max(per_byte, 1e-12)
        entry["latency"] = small
    return entry


def _worst(values: list[Any]) -> Any:
    """The smallest of each number in values of one shape."""
    if isinstance(values[0], dict):
        return {key: min(value[key] for value in values) for key in values[0]}
    if isinstance(values[0], list):
        return [min(pair) for pair in zip(*values, strict=True)]
    return min(values)


def fitted(measured: Measured, steps: list[float], precision: str) -> dict[str, float]:
    """The factors with which the kernels of the reference models take as long as their steps, none below 0."""
    rows = []
    for sizes in REFERENCES:
        trace = trace_rank(reference(precision, *sizes), 0, 1, fusion="off")
        row: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        passes = [each.events for chunk in trace.chunks for each in chunk.passes.values()]
        for kernel in (kernel for events in (*passes, trace.end.events) for kernel in kernels(events)):
            kind, base = measured.base(kernel)
            row[kind] += base
            row["start"] += kernel.launches
        rows.append([row[kind] for kind in KINDS])
    return dict(zip(KINDS, _nonnegative(np.array(rows), np.array(steps)), strict=True))


def _nonnegative(rows: np.ndarray, steps: np.ndarray) -> list[float]:
    """Least squares of relative errors, none below 0. What the steps do not decide stays near `PRIOR`."""
    design, prior = rows / steps[:, None], np.array([PRIOR[kind] for kind in KINDS])
    free = list(range(len(KINDS)))
    found = np.zeros(len(KINDS))
    while free:
        part = design[:, free] * prior[free]
        left = np.concatenate([part, np.sqrt(WEAK) * np.eye(len(free))])
        right = np.concatenate([np.ones(len(steps)), np.full(len(free), np.sqrt(WEAK))])
        values = np.linalg.lstsq(left, right, rcond=None)[0]
        found[:] = 0.0
        found[free] = values * prior[free]
        if (values >= 0).all():
            break
        free = [place for place, value in zip(free, values, strict=True) if value > 0]
    return [float(value) for value in found]


def new_profile(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A profile with entries by precision and number of ranks, such as `fp32 of 2`."""
    return {"format": 1, "machine": platform.processor() or platform.machine(), "torch": torch.__version__, **entries}
