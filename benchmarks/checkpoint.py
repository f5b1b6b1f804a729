"""Time and memory of saving and loading checkpoints, compared with `dd` and torch.distributed.checkpoint.

All contestants save and load the same bytes in one process: the weights and two moments of a model, in fp32. They take
turns. If other programs use the disk too, the minimum is more informative than the median.

Save and load: `dd` writes or reads the bytes as one file. The bar is 0.8 of its rate, which is 1.25 times its time.
Every save waits for the disk. Files are dropped from the page cache before a load, as after a restart of the machine.

Background save: it may stop training for a tenth of the time of a plain save. A third of a second of work separates the
save from the next optimizer step, which waits for the copy. Copying and writing slow this work down, because they share
its two cores; the last row includes this. The first save is not measured, because it allocates the memory of the copy.

Memory of a load: the peak beside the loaded tensors (bar: 0.2 times their size), for the saved layout and for a
tensor-parallel size of 4. It is about 20 MB at any size, for the two blocks that are read at a time.

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
from contest import drop_from_page_cache, print_table, resident_bytes, timed_in_turns

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.contents import Contents
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, ParamTable, Shard

HIDDEN = 1024


def silent(line: str) -> None:
    pass


def table_of(megabytes: int) -> ParamTable:
    """Matrices split by rows or columns. With two moments each, they have about this size."""
    count = max(1, round(megabytes * 1e6 / (3 * 4 * 4 * HIDDEN * HIDDEN)))
    return {f"layers.{n}.up": ParamMeta((4 * HIDDEN, HIDDEN), Shard(n % 2), "normal") for n in range(count)}


def state_of(table: ParamTable, tp: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    """Random weights and moments of one tensor-parallel rank of `tp`: name -> kind -> tensor."""
    return {
        name: {
            kind: torch.randn(meta.shard.local_shape(meta.shape, tp)) for kind in ("weight", "exp_avg", "exp_avg_sq")
        }
        for name, meta in table.items()
    }


def contents_of(state: dict[str, dict[str, torch.Tensor]]) -> Contents:
    return Contents(
        weights={name: LocalShard(kinds["weight"]) for name, kinds in state.items()},
        optimizer_state={
            name: {kind: LocalShard(value) for kind, value in kinds.items() if kind != "weight"}
            for name, kinds in state.items()
        },
    )


def dd(*arguments: str) -> None:
    subprocess.run(["dd", "bs=8M", *arguments], check=True, capture_output=True)


def seconds_of(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Benchmark:
    """The contestants, which save and load the same state."""

    def __init__(self, folder: Path, megabytes: int):
        self.ctx = ParallelContext.create(Grid(), torch.device("cpu"), 60)
        self.table = table_of(megabytes)
        self.state = state_of(self.table)
        self.bytes = sum(value.nbytes for kinds in self.state.values() for value in kinds.values())
        self.folder, self.root = folder, folder / "ours"
        self.contents = contents_of(self.state)
        self.options = {"table": self.table, "state": {}, "config": {}, "origin": {}, "keep": 1}
        self.saver = Saver(self.ctx, in_background=True)
        self.iteration = 0
        self.factor, self.product = torch.randn(2, 2048, 2048)

    def save(self) -> None:
        self.iteration += 1
        store.save(self.root, self.iteration, ctx=self.ctx, contents=self.contents, **self.options)

    def start_save(self) -> None:
        """The part of a background save that training waits for."""
        self.iteration += 1
        options = {"must_be_done": False, "copy_at_once": False, **self.options}
        self.saver.save(self.root, self.iteration, silent, contents=self.contents, **options)

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
        drop_from_page_cache(self.root)
        store.load(self.root, self.iteration, ctx=self.ctx, table=self.table, contents=self.contents, config={})

    def load_dcp(self) -> None:
        drop_from_page_cache(self.folder / "dcp")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(self.state, checkpoint_id=self.folder / "dcp")

    def load_dd(self) -> None:
        drop_from_page_cache(self.folder)
        dd(f"if={self.folder / 'dd'}", "of=/dev/null")


def peak_while_loading(root: Path, iteration: int, table: ParamTable, tp: int, results: Any) -> None:
    """Load the last of `tp` ranks in this process; the queue gets the rise of memory and the bytes of the tensors."""
    ctx = replace(ParallelContext.at(Grid(tp=tp), tp - 1), world=solo("world"))
    contents = contents_of(state := state_of(table, tp))
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    store.load(root, iteration, ctx=ctx, table=table, contents=contents, config={})
    results.put(
        (resident_bytes("VmHWM") - before, sum(value.nbytes for kinds in state.values() for value in kinds.values()))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=1200, help="size of the checkpoint")
    parser.add_argument("--folder", default=".", help="a folder on the measured disk")
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
        waits: dict[str, list[float]] = {
            name: [] for name in ("plain save", "background save", "background save and slower work")
        }
        for _ in range(options.rounds):
            plain, alone = seconds_of(run.save), seconds_of(run.work)
            start, beside, rest = seconds_of(run.start_save), seconds_of(run.work), seconds_of(run.saver.wait_for_copy)
            run.saver.wait(silent)
            for name, value in zip(waits, (plain, start + rest, start + rest + beside - alone), strict=True):
                waits[name].append(value)
        print_table("Time that training waits", "plain save", waits)
        print("\nPeak memory of a load beside the loaded tensors")
        for tp in (1, 4):
            drop_from_page_cache(run.root)
            results = processes.Queue()
            process = processes.Process(
                target=peak_while_loading, args=(run.root, run.iteration, run.table, tp, results)
            )
            process.start()
            beside, own = results.get(timeout=300)
            process.join()
            sizes = f"{beside / 1e6:5.0f} MB beside {own / 1e6:5.0f} MB"
            print(f"tensor-parallel size {tp}   {sizes}: {beside / own:.2f}")
        run.saver.close(silent)


if __name__ == "__main__":
    main()
