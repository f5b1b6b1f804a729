"""Timers: their cost, and the share of a step that their phases cover.

    python benchmarks/timers.py [--rounds 40] [--small]

The model is the quickstart's, on two ranks. Cost is the number of begins and ends in a step times the seconds of one,
measured alone in the same processes. Cover is the sum of the phases of a rank over the wall time of the step. A step is
timed as the training loop does it, from the request for data to the end of the optimizer.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contest import Contestant, arguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.helpers

LAYOUTS = {"tp 2": {"tensor": 2}, "pp 2": {"pipeline": 2}}
CALLS = 100_000
SMALL = {"hidden": 64, "sequence": 64}
QUICKSTART = {"hidden": 128, "sequence": 256}


def seconds_of_a_call() -> float:
    """One begin or end of a part, with timers."""
    from megatron_lite.training.progress import Progress
    from megatron_lite.training.timers import Timers

    progress = Progress()
    progress.timers = Timers(torch.device("cpu"))
    started = time.perf_counter()
    for _ in range(CALLS // 2):
        progress.begin("optimizer")
        progress.end("optimizer")
    return (time.perf_counter() - started) / CALLS


def make(parallel: dict[str, int], sizes: dict[str, int], rounds: int) -> Callable[[], float]:
    """Train `rounds` steps; the contestant's answers are then, in turn, wall seconds, phases, calls and seconds of a
    call."""
    from megatron_lite.config.load import load_config
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.setup import setup_model_and_optimizer
    from megatron_lite.training.state import num_microbatches
    from megatron_lite.training.step import train_step
    from tests.helpers.tiny import next_microbatches

    overrides = [f"parallel.{key}={value}" for key, value in {"tensor": 1, **parallel}.items()]
    overrides += [f"model.hidden_size={sizes['hidden']}", f"data.seq_length={sizes['sequence']}"]
    overrides += ["data.tokenizer=bytes", "data.paths=[]", "model.vocab_size=0", "train.precision=fp32"]
    overrides.append(f"run.dir={tempfile.gettempdir()}/no_run_to_resume")
    overrides += ["train.micro_batch_size=1"] if "pipeline" in parallel else []
    config = load_config("configs/quickstart.yaml", overrides)
    run = setup_model_and_optimizer(config, *initialize_megatron(config))
    timers: Any = run.progress.timers
    count = num_microbatches(config.train, 1, 0)
    for _ in range(3):
        train_step(run, next_microbatches(run))
    timers.compared(run.ctx.world)
    calls, begin, wall = 0, timers.begin, 0.0

    def counted(what: Any) -> None:
        nonlocal calls
        calls += 2
        begin(what)

    timers.begin = counted
    for _ in range(rounds):
        batches = next_microbatches(run)
        assert len(batches) == count
        started = time.perf_counter()
        train_step(run, batches)
        wall += time.perf_counter() - started
        timers.end_iteration()
    timers._add(timers._before)
    answers = iter([wall / rounds, sum(timers._seconds.values()) / rounds, calls / rounds, seconds_of_a_call()])
    return lambda: next(answers)


def main() -> None:
    options = arguments(__doc__).parse_args()
    sizes = SMALL if options.small else QUICKSTART
    print(f"{'layout':8}{'step, ms':>10}{'cover':>16}{'calls':>8}{'a call, us':>12}{'cost / step':>14}")
    for port, (name, parallel) in enumerate(LAYOUTS.items(), start=29700):
        contestant = Contestant(partial(make, parallel, sizes, options.rounds), 2, port)
        wall, phases, calls, call = (contestant.answers(True) for _ in range(4))
        contestant.stop()
        cover = [part / step for part, step in zip(phases, wall, strict=True)]
        step, cost = statistics.mean(wall), max(calls) * max(call)
        print(
            f"{name:8}{1000 * step:10.1f}{min(cover):8.3f}{max(cover):8.3f}{max(calls):8.0f}{1e6 * max(call):12.2f}"
            f"{cost / step:14.5f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
