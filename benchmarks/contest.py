"""Code that the benchmarks share: the config of a GPT, and contestants that take turns on one machine.

Taking turns makes the machine's noise the same for all contestants. A `Contestant` has its own processes, one for each
rank; `timed_in_turns` calls functions in this process.
"""

import argparse
import multiprocessing
import os
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = 2  # divided among the ranks of a contestant


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _serve(make: Callable[[], Callable[[], float | None]], rank: int, ranks: int, port: int, pipe: Any) -> None:
    """One rank of a contestant. On each True from the pipe, it takes a step and sends the loss.

    On False it sends its peak memory and ends.
    """
    import torch  # not at the top, where workers of `preprocess` would import it too

    warnings.filterwarnings("ignore")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(max(1, THREADS // ranks))
    step = make()
    while pipe.recv():
        pipe.send(step())
    pipe.send(_resident_mb())


class Contestant:
    """Processes that take steps on request. Each of them calls `make` for its step, which may return a loss."""

    def __init__(self, make: Callable[[], Callable[[], float | None]], ranks: int, port: int) -> None:
        ctx = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=_serve, args=(make, rank, ranks, port, theirs), daemon=True)
            process.start()
            theirs.close()  # otherwise the death of a rank would go unnoticed
            self.pipes.append(ours)
            self.processes.append(process)
        self.seconds: list[float] = []

    def step(self) -> float | None:
        """Take one step and record its seconds; return the first rank's loss, if it has one."""
        start = time.perf_counter()
        loss, *_ = self.answers(True)
        self.seconds.append(time.perf_counter() - start)
        return loss

    def stop(self) -> float:
        """End the processes; return the first rank's peak memory in MB."""
        peak, *_ = self.answers(False)
        for process in self.processes:
            process.join()
        return peak

    def answers(self, take_step: bool) -> list[Any]:
        """Of all ranks: the result of a step, or the peak memory at the end."""
        for pipe in self.pipes:
            pipe.send(take_step)
        return [pipe.recv() for pipe in self.pipes]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options `--rounds`, `--only` and `--small`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each contestant")
    parser.add_argument("--only", default="", help="regular expression; run only contestants whose name matches")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself")
    return parser


def take_turns(contestants: dict[str, Contestant], rounds: int) -> None:
    """Run the steps of all contestants in turn.

    The first two steps allocate and warm up: their losses are printed, and their times are dropped. A contestant that
    dies, as one that needs more memory than the machine has, is removed.
    """
    for round_number in range(rounds + 2):
        for name, contestant in list(contestants.items()):
            try:
                loss = contestant.step()
            except (EOFError, ConnectionError):
                print(f"{name}: its process died in step {round_number + 1}", flush=True)
                del contestants[name]
                continue
            if round_number < 2:
                contestant.seconds.clear()
                if loss is not None:
                    print(f"{name}: loss {loss:.5f} in step {round_number + 1}", flush=True)


def timed_in_turns(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each contestant in each round, in this process.

    Every round has another order, because a contestant that fills the disk's caches slows the next one down.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(contestants), len(contestants)):
            started = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def resident_bytes(field: str) -> int:
    """This process's resident memory by Linux: VmRSS (now) or VmHWM (peak)."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) << 10


def drop_from_page_cache(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def print_table(title: str, first: str, seconds: dict[str, list[float]]) -> None:
    """Print the median and the minimum of each contestant's seconds, and their ratios to those of `first`."""
    print(f"\n{title}\n{'':34}{'median s':>10}{'/ first':>9}{'min s':>10}{'/ first':>9}")
    for name, values in seconds.items():
        print(f"{name:34}", end="")
        for summary in (statistics.median, min):
            print(f"{summary(values):10.4f}{summary(values) / summary(seconds[first]):9.3f}", end="")
        print()


def gpt_config(shape: dict[str, int], *changes: str) -> Any:
    """The config of a GPT of these sizes without dropout, on the CPU, with `section.field=value` changes."""
    from megatron_lite.config.load import load_config

    fields = {
        "model.num_layers": shape["layers"],
        "model.hidden_size": shape["hidden"],
        "model.num_heads": shape["heads"],
        "model.vocab_size": shape["vocab"],
        "model.max_position_embeddings": shape["sequence"],
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "data.seq_length": shape["sequence"],
        "train.micro_batch_size": shape["batch"],
        "run.device": "cpu",
        "run.dir": "/nonexistent/benchmark",
    }
    return load_config(None, [*(f"{key}={value}" for key, value in fields.items()), *changes])
