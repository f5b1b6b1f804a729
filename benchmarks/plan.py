"""Planned against measured step times of one model under many layouts, on the CPUs of this machine.

The machine is calibrated first, as `megatron-lite plan --calibrate` does. Each layout then trains a few steps in each
round, and the median counts. More ranks than cores take turns, so of those the order counts.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.config.schema import Config
from megatron_lite.config.validate import validate
from megatron_lite.launch.pool import Ranks
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.random import seed_everything
from megatron_lite.plan.calibrate import measure_rank, new_profile, profile_of
from megatron_lite.plan.estimate import make_plan
from megatron_lite.plan.fake_world import empty_batch, grid_of
from megatron_lite.plan.formulas import spearman
from megatron_lite.plan.links import Machines
from megatron_lite.plan.measured import read_profile
from megatron_lite.training.setup import build_run
from megatron_lite.training.step import local_batches, train_step

MODEL = {"hidden_size": 256, "num_layers": 8, "num_heads": 8, "vocab_size": 2048, "max_position_embeddings": 256}
LAYOUTS: list[tuple[int, str]] = [
    (1, ""),
    (1, "train.micro_batch_size=8"),
    (1, "train.recompute=full"),
    (1, "train.precision=bf16"),
    (2, ""),
    (2, "optim.distributed=true"),
    (2, "parallel.ddp=fsdp"),
    (2, "parallel.tensor=2"),
    (2, "parallel.tensor=2 parallel.sequence=true"),
    (2, "parallel.pipeline=2"),
    (2, "parallel.pipeline=2 parallel.schedule=zb-h1"),
    (2, "parallel.pipeline=2 parallel.schedule=interleaved parallel.virtual_pipeline=2"),
    (2, "parallel.pipeline=2 parallel.schedule=gpipe train.recompute=full"),
    (2, "parallel.context=2"),
    (2, "parallel.context=2 parallel.context_mode=ulysses"),
    (4, ""),
    (4, "parallel.tensor=2"),
    (4, "parallel.tensor=4"),
    (4, "parallel.pipeline=4"),
    (4, "parallel.tensor=2 parallel.pipeline=2"),
]


def config_of(changes: str) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {**MODEL, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "train": {"micro_batch_size": 2, "global_batch_size": 16},
        "data": {"seq_length": 256},
        "parallel": {},
        "optim": {},
    }
    for change in changes.split():
        name, _, value = change.partition("=")
        section, field = name.split(".")
        sections[section][field] = {"true": True}.get(value, int(value) if value.isdigit() else value)
    return Config.model_validate(sections)


def step_seconds(config: Config, steps: int) -> float:
    """The median time of a step on this rank, which begins when all ranks do. Collective over the world."""
    device, grid = torch.device("cpu"), grid_of(config, dist.get_world_size())
    ctx = ParallelContext.create(grid, device, 60.0)
    run = build_run(config, ctx, seed_everything(config.run.seed, ctx))
    count = config.train.global_batch(grid.dp) // (config.train.micro_batch_size * grid.dp)
    batches, found = local_batches([empty_batch(config, device)] * count, ctx.cp), []
    for step in range(steps + 1):
        dist.barrier()
        start = time.perf_counter()
        train_step(run, batches)
        run.ddp.wait_for_params()
        dist.barrier()
        if step:
            found.append(time.perf_counter() - start)
    return median(found)


def calibrated(pool: Ranks, counts: list[int], path: Path) -> None:
    entries = {}
    for precision in ("fp32", "bf16"):
        for count in counts:
            entries[f"{precision} of {count}"] = profile_of(pool(count, measure_rank, precision), precision)
    path.write_text(json.dumps(new_profile(entries)), encoding="utf-8")


def measured(pool: Ranks, layouts: list[tuple[int, str]], rounds: int, steps: int) -> Iterator[list[float]]:
    """The times of each layout, a round after the other."""
    for _ in range(rounds):
        yield [max(pool(ranks, step_seconds, config_of(changes), steps)) for ranks, changes in layouts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    pool = Ranks(timeout_seconds=600)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        calibrated(pool, sorted({ranks for ranks, _ in LAYOUTS}), path)
        times = [median(column) for column in zip(*measured(pool, LAYOUTS, given.rounds, given.steps), strict=True)]
        planned = []
        for ranks, changes in LAYOUTS:
            config = config_of(changes)
            validate(config, ranks)
            device = read_profile(path, config.train.precision, ranks)
            planned.append(make_plan(config, ranks, Machines(device, ranks)).step_seconds)
    pool.close()
    print(
        f"GPT of {MODEL['num_layers']} layers, hidden {MODEL['hidden_size']}, {os.cpu_count()} cores, one thread a rank"
    )
    print("ranks  measured ms  planned ms  planned / measured  layout")
    for (ranks, changes), real, plan in zip(LAYOUTS, times, planned, strict=True):
        print(f"{ranks:5}  {real * 1e3:11.1f}  {plan * 1e3:10.1f}  {plan / real:18.2f}  {changes or 'data parallel'}")
    print(f"rank correlation (Spearman) of all layouts {spearman(times, planned):.2f}")


if __name__ == "__main__":
    main()
