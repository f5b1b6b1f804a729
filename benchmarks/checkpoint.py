"""Checkpoints against the disk and against torch.distributed.checkpoint, and what training waits for.

The same bytes for everyone, in one process: weights and two moments of a model, in fp32. All contestants of a table
take turns; where others use the disk too, the least of the times tells more than their median. `dd` writes (and waits
for the disk, as all do) or reads the bytes as one file, and is the bar: ours is to reach 0.8 of its rate, which is 1.25
times its time. Files are dropped from the page cache before they are read, as on a machine that has just come up.
A background save is to stop training for less than a tenth of what a plain one does: between the save and the next step
of the optimizer, which waits for the copy, there is the work of a third of a second. What that work takes longer beside
the copying and writing, on the same two cores, is added in a last row. Measured from the second save on, because the
first gets the memory for the copy. Last, the most memory that loading takes beside the tensors it
fills (bar: 0.2 times these), into the same layout and into one of four tensor-parallel cuts; it is some 20 MB for the
two blocks that are read at a time, whatever the sizes.

    python benchmarks/checkpoint.py [--rounds 5] [--mb 1200] [--folder .]
"""

import argparse
import multiprocessing as mp
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from contest import forget, print_table, resident, timed_in_turns

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard

HIDDEN = 1024


def silent(line: str) -> None:
    pass


def table_of(megabytes: int) -> ParamTable:
    """Matrices of a model, with two moments each together about so large, cut by rows and by columns."""
    count = max(1, round(megabytes * 1e6 / (3 * 4 * 4 * HIDDEN * HIDDEN)))
    return {f"layers.{n}.up": ParamMeta((4 * HIDDEN, HIDDEN), Shard(n % 2), "normal") for n in range(count)}


def state_of(table: ParamTable, tp: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    """Of one tensor-parallel rank."""
    return {
        name: {
            kind: torch.randn(meta.shard.local_shape(meta.shape, tp)) for kind in ("weight", "exp_avg", "exp_avg_sq")
        }
        for name, meta in table.items()
    }


def as_held(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict]:
    return {
        "weights": {name: LocalShard(kinds["weight"]) for name, kinds in state.items()},
        "optimizer_state": {
            name: {kind: LocalShard(value) for kind, value in kinds.items() if kind != "weight"}
            for name, kinds in state.items()
        },
    }


def dd(*arguments: str) -> None:
    subprocess.run(["dd", "bs=8M", *arguments], check=True, capture_output=True)


def seconds_of(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Benchmark:
    """The contestants over one state."""

    def __init__(self, folder: Path, megabytes: int):
        self.ctx = ParallelContext.create(Grid(), torch.device("cpu"), 60)
        self.table = table_of(megabytes)
        self.state = state_of(self.table)
        self.bytes = sum(value.nbytes for kinds in self.state.values() for value in kinds.values())
        self.folder, self.root = folder, folder / "ours"
        self.rest = {"table": self.table, "rng": {}, "state": {}, "config": {}, "keep": 1}
        self.saver = Saver(self.ctx, in_background=True, timeout_seconds=60)
        self.iteration = 0
        self.factor, self.product = torch.randn(2, 2048, 2048)

    def save(self) -> None:
        self.iteration += 1
        store.save(self.root, self.iteration, ctx=self.ctx, **as_held(self.state), **self.rest)

    def start_save(self) -> None:
        """The part that training waits for."""
        self.iteration += 1
        options = {"must_be_done": False, "copy_at_once": False}
        self.saver.save(self.root, self.iteration, silent, **options, **as_held(self.state), **self.rest)

    def work(self) -> None:
        """Two threads multiply matrices, as in a forward and backward pass."""
        for _ in range(4):
            torch.mm(self.factor, self.factor, out=self.product)

    def save_dcp(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.state, checkpoint_id=self.folder / "dcp")

    def save_dd(self) -> None:
        dd("if=/dev/zero", f"of={self.folder / 'dd'}", "conv=fsync", f"count={self.bytes}", "iflag=count_bytes")

    def load(self) -> None:
        forget(self.root)
        store.load(self.root, self.iteration, ctx=self.ctx, table=self.table, **as_held(self.state), config={})

    def load_dcp(self) -> None:
        forget(self.folder / "dcp")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(self.state, checkpoint_id=self.folder / "dcp")

    def load_dd(self) -> None:
        forget(self.folder)
        dd(f"if={self.folder / 'dd'}", "of=/dev/null")


def peak_while_loading(root: Path, iteration: int, table: ParamTable, tp: int, results: Any) -> None:
    """In a process of its own: the bytes of what a rank of `tp` holds, and how far memory rises to fill it."""
    ctx = replace(ParallelContext.at(Grid(tp=tp), tp - 1), world=solo("world"))
    state = state_of(table, tp)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    store.load(root, iteration, ctx=ctx, table=table, **as_held(state), config={})
    results.put((resident("VmHWM") - before, sum(value.nbytes for kinds in state.values() for value in kinds.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=1200, help="size of the checkpoint")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(2)
    processes = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = Benchmark(Path(folder), options.mb)
        size = f"{run.bytes / 1e6:,.0f} MB in {3 * len(run.table)} tensors"
        print(f"torch {torch.__version__}, {size}, {options.rounds} rounds")
        for warm_up in (run.save_dd, run.save, run.save_dcp, run.start_save):
            warm_up()
            run.saver.wait(silent)
        saves = {"dd": run.save_dd, "megatron_lite": run.save, "torch.distributed.checkpoint": run.save_dcp}
        print_table("Save", "dd", timed_in_turns(saves, options.rounds))
        loads = {"dd": run.load_dd, "megatron_lite": run.load, "torch.distributed.checkpoint": run.load_dcp}
        print_table("Load", "dd", timed_in_turns(loads, options.rounds))
        waits: dict[str, list[float]] = {name: [] for name in ("plain save", "background save", "and slower work")}
        for _ in range(options.rounds):
            plain, alone = seconds_of(run.save), seconds_of(run.work)
            start, beside, rest = seconds_of(run.start_save), seconds_of(run.work), seconds_of(run.saver.wait_for_copy)
            run.saver.wait(silent)
            for name, value in zip(waits, (plain, start + rest, start + rest + beside - alone), strict=True):
                waits[name].append(value)
        print_table("What training waits for", "plain save", waits)
        print("\nMost memory that loading takes beside the tensors it fills")
        for tp in (1, 4):
            forget(run.root)
            results = processes.Queue()
            process = processes.Process(
                target=peak_while_loading, args=(run.root, run.iteration, run.table, tp, results)
            )
            process.start()
            beside, own = results.get(timeout=300)
            process.join()
            sizes = f"{beside / 1e6:5.0f} MB beside {own / 1e6:5.0f} MB"
            print(f"into one of {tp} tensor-parallel cuts   {sizes}: {beside / own:.2f}")
        run.saver.close(silent)


if __name__ == "__main__":
    main()
