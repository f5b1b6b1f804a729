"""Cost of fault detection in every step, and time to recover from a killed rank.

Overhead: two data-parallel ranks of one thread train a GPT with and without fault detection, in turns. Fault detection
is the watchdog, the record of waits, the search for stragglers (in each 10th step, the default) and the comparison of
replicas (in each 100th step). The machine's noise hides such small differences, so each part is also timed alone.

Recovery: one of four ranks is killed. The time from there to the end of the next iteration is compared with the time of
the same command from its start, under our launcher and under torchrun --max-restarts.

    python benchmarks/faults.py [--rounds 60] [--kills 3] [--small]
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from contest import Contestant, gpt_config, take_turns
from engines import SHAPE, SMALL, microbatch

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
PATIENCE_SECONDS = 180.0  # for a launcher to resume training after a kill


def trainer(shape: dict[str, int], watched: bool) -> Callable[[], float]:
    """A step as in the training loop, with or without fault detection."""
    from megatron_lite.observers.stragglers import Stragglers
    from megatron_lite.observers.watchdog import Watchdog
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.setup import setup_model_and_optimizer
    from megatron_lite.training.state import due
    from megatron_lite.training.step import train_step

    if not watched:
        for module in ("parallel.collectives.communicating", "parallel.waiting.communicating"):
            mock.patch(f"megatron_lite.{module}", lambda op, group: nullcontext()).start()
    config = gpt_config(shape, *(["faults.check_replicas=100"] if watched else []))
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    batches, stragglers = [microbatch(shape, ctx.rank)], Stragglers(run)
    if watched:
        folder = Path(tempfile.mkdtemp())
        Watchdog(run.progress, folder, rank=ctx.rank, world_size=RANKS, hang_timeout=300.0).__enter__()

    def step() -> float:
        compares = watched and due(run.state.iteration + 1, 10)
        with stragglers.measured() if compares else nullcontext():
            report = train_step(run, batches)
        if compares:
            stragglers.line()
        return report.loss

    return step


def parts(shape: dict[str, int]) -> Callable[[], float]:
    """A step that measures each part of fault detection alone; the first rank prints the milliseconds."""
    from megatron_lite.observers.stragglers import Stragglers
    from megatron_lite.observers.watchdog import Watchdog
    from megatron_lite.parallel.context import Group
    from megatron_lite.parallel.waiting import communicating, current_wait
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.replicas import check_replicas_equal
    from megatron_lite.training.setup import setup_model_and_optimizer
    from megatron_lite.training.step import train_step

    config = gpt_config(shape)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    batches = [microbatch(shape, ctx.rank)]

    def milliseconds(work: Callable[[], object], count: int) -> float:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return 1000 * statistics.median(times)

    def one_wait() -> None:
        with communicating("all_reduce", Group("dp", (0, 1), 0)):
            pass

    def straggling() -> None:
        stragglers = Stragglers(run)
        with stragglers.measured():
            pass
        stragglers.line()

    def measure() -> float:
        step = milliseconds(lambda: train_step(run, batches), 10)
        before = current_wait()[1]
        train_step(run, batches)
        waits = current_wait()[1] - before
        folder = Path(tempfile.mkdtemp())
        watchdog = Watchdog(run.progress, folder, rank=ctx.rank, world_size=RANKS, hang_timeout=300.0)
        (folder / "heartbeat").mkdir()
        rows = [
            (f"record of {waits} waits", waits * milliseconds(one_wait, 1000), 1.0, "in each step"),
            ("heartbeat", milliseconds(lambda: watchdog._beat("training", 0.0), 100), step / 5000, "every 5 s"),
            ("search for stragglers", milliseconds(straggling, 20), 0.1, "in each 10th step"),
            ("comparison of replicas", milliseconds(lambda: check_replicas_equal(run), 10), 0.01, "in each 100th step"),
        ]
        if ctx.rank == 0:
            print(f"\nOf a step of {step:.1f} ms\n{'':32}{'ms':>8}{'share of a step':>18}")
            for name, cost, share, when in rows:
                print(f"{name:32}{cost:8.3f}{cost * share / step:17.3%}  {when}")
            print(f"{'total':32}{'':8}{sum(cost * share for _, cost, share, _ in rows) / step:17.3%}")
        return 0.0

    return measure


def overhead(shape: dict[str, int], rounds: int) -> None:
    contestants = {
        "without fault detection": Contestant(partial(trainer, shape, False), RANKS, 29611),
        "defaults and replica checks": Contestant(partial(trainer, shape, True), RANKS, 29612),
    }
    take_turns(contestants, rounds)
    print(f"{'':32}{'median ms':>10}{'/ first':>10}{'min ms':>10}{'/ first':>10}")
    median, minimum = {}, {}
    for name, contestant in contestants.items():
        times = contestant.seconds
        median[name], minimum[name] = 1000 * statistics.median(times), 1000 * min(times)
        first = next(iter(median))
        print(
            f"{name:32}{median[name]:10.1f}{median[name] / median[first]:10.3f}"
            f"{minimum[name]:10.1f}{minimum[name] / minimum[first]:10.3f}"
        )
        contestant.stop()
    alone = Contestant(partial(parts, shape), RANKS, 29613)
    alone.step()
    alone.stop()


def recovery(kills: int) -> None:
    """Kill a rank `kills` times under each launcher, and print the times to the next iteration."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers.command import environment, make_corpus, tiny_yaml

    print(f"\nSeconds to the end of the next iteration, four ranks\n{'':32}{'median':>8}{'min':>8}{'/ start':>9}")
    pretrain = ["-m", "megatron_lite", "pretrain"]
    launchers = {
        "our launcher": [sys.executable, *pretrain, "--nproc-per-node", "4", "--max-restarts", "100"],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "4", "--max-restarts", "100", *pretrain],
    }
    start = 0.0
    for name, launcher in launchers.items():
        folder = Path(tempfile.mkdtemp())
        settings = {"parallel": {"tensor": 2}, "train": {"iterations": 10**6, "comm_timeout": 60.0}}
        checkpoint = {"checkpoint": {"interval": 1, "keep": 1}}
        config = tiny_yaml(folder, make_corpus(folder), **settings, **checkpoint)
        process = subprocess.Popen(
            [*launcher, "--config", str(config)],
            env=environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        began = time.perf_counter()
        try:
            if not wait_for_iteration(process):
                raise SystemExit(f"{name} did not start")
            from_start = time.perf_counter() - began
            start = start or from_start
            if name == "our launcher":
                print(f"{'from the start of the command':32}{start:8.1f}{start:8.1f}{1.0:9.2f}")
            times = []
            for _ in range(kills):
                time.sleep(2)
                began = time.perf_counter()
                os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
                if not wait_for_iteration(process, after="training from iteration"):
                    break
                times.append(time.perf_counter() - began)
            result = f"  did not resume within {PATIENCE_SECONDS:g} s"
            if times:
                result = f"{statistics.median(times):8.1f}{min(times):8.1f}{statistics.median(times) / start:9.2f}"
            print(f"{f'after a killed rank, {name}':32}{result}  {len(times)} of {kills} kills survived")
        finally:
            end(process)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def wait_for_iteration(process: subprocess.Popen, after: str = "") -> bool:
    """Read the output up to the line of an iteration; skip lines before one that contains `after`.

    Returns False if the output ends first. After PATIENCE_SECONDS the process is killed.
    """
    assert process.stdout is not None
    end_it = threading.Timer(PATIENCE_SECONDS, end, (process,))
    end_it.start()
    try:
        seen = not after
        for line in process.stdout:
            seen = seen or after in line
            if seen and re.search(r"iteration +\d+/", line):
                return True
        return False
    finally:
        end_it.cancel()


def ranks_of(launcher: int) -> list[int]:
    """The process ids of a launcher's ranks."""
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, words in commands.items() if b"spawn_main" in words or b"megatron_lite" in words]


def end(process: subprocess.Popen) -> None:
    """Kill a launcher and its ranks, which torchrun puts in other sessions."""
    with contextlib.suppress(OSError):
        ranks = ranks_of(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each contestant")
    parser.add_argument("--kills", type=int, default=3, help="ranks to kill under each launcher")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself")
    given = parser.parse_args()
    print(f"torch {torch.__version__}")
    overhead(SMALL if given.small else SHAPE, given.rounds)
    recovery(given.kills)
