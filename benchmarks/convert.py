"""Peak memory of conversions compared with one tensor, and their time compared with a copy of the bytes.

A GPT in fp32 is converted between formats and layouts; its word embedding is by far its largest tensor. From our format
to ours, two moments are converted too, so that the run can resume. Each conversion has its own process and takes turns
with `dd`, which copies as many bytes as the target has. Both wait for the disk, and sources are first dropped from the
page cache. Memory is the peak of resident memory (VmHWM: anonymous memory and pages of mapped files) above that after
imports; the bar is 2 times the largest tensor.

    python benchmarks/convert.py [--rounds 3] [--mb 400] [--folder .]
"""

import argparse
import multiprocessing as mp
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from contest import drop_from_page_cache, resident_bytes

HIDDEN = 1024
CONVERSIONS = {  # name -> source, format, layout
    "ours tp 1 -> ours tp 4 pp 2": ("ours", "megatron-lite", 4, 2),
    "ours tp 4 pp 2 -> ours tp 1": ("wide", "megatron-lite", 1, 1),
    "ours -> huggingface": ("ours", "huggingface", 1, 1),
    "huggingface -> ours tp 4": ("hf", "megatron-lite", 4, 1),
    "ours -> megatron tp 4": ("ours", "megatron", 4, 1),
    "megatron tp 4 -> ours": ("megatron", "megatron-lite", 1, 1),
}


def make_sources(folder: Path, megabytes: int) -> None:
    """Write a run's checkpoint with random weights and moments, and convert it to each format."""
    import torch

    from megatron_lite.config.schema import Config, DataConfig, ModelConfig
    from megatron_lite.convert.driver import Request, convert
    from megatron_lite.convert.grid_files import write_grid
    from megatron_lite.convert.recipe import stage_tables
    from megatron_lite.parallel.shard import Shard

    model = ModelConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_heads=16,
        max_position_embeddings=512,
        vocab_size=int(megabytes * 1e6) // (4 * HIDDEN),
        activation="gelu_tanh",
    )
    (table,) = tables = stage_tables(model, None, tensor=1, pipeline=1)

    class RandomValues:
        def kinds(self, name: str) -> dict[str, torch.dtype]:
            return dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), torch.float32)

        def shard_of(self, name: str, kind: str, shard: Shard, rank: int, size: int) -> torch.Tensor:
            return torch.randn(table[name].shape)

    config = Config(model=model, data=DataConfig(seq_length=512))
    write_grid(
        folder / "ours" / "checkpoints",
        1,
        RandomValues(),
        tables=tables,
        config=config,
        state={"train": {}},
        origin={},
        progress=lambda count: None,
    )
    for target, to, tensor, pipeline in (
        ("wide", "megatron-lite", 4, 2),
        ("hf", "huggingface", 1, 1),
        ("megatron", "megatron", 4, 1),
    ):
        request = Request(folder / "ours", folder / target, target_format=to, tensor=tensor, pipeline=pipeline)
        convert(request, lambda line: None)


def convert_once(folder: Path, source: str, to: str, tensor: int, pipeline: int, results: Any) -> None:
    """Convert in this process; put the seconds and the rise of peak memory into the queue."""
    from megatron_lite.convert.driver import Request, convert

    request = Request(folder / source, folder / "target", target_format=to, tensor=tensor, pipeline=pipeline)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    convert(request, lambda line: None)
    results.put((time.perf_counter() - started, resident_bytes("VmHWM") - before))


def copy_once(folder: Path, count: int) -> float:
    """Seconds that dd takes to copy `count` bytes."""
    drop_from_page_cache(folder)
    started = time.perf_counter()
    arguments = [f"if={folder / 'blob'}", f"of={folder / 'copy'}", f"count={count}", "iflag=count_bytes", "conv=fsync"]
    subprocess.run(["dd", "bs=8M", *arguments], check=True, capture_output=True)
    (folder / "copy").unlink()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=400, help="size of the word embedding")
    parser.add_argument("--folder", default=".", help="a folder on the measured disk")
    options = parser.parse_args()
    processes = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        maker = processes.Process(target=make_sources, args=(folder, options.mb))
        maker.start()
        maker.join()
        (file,) = (folder / "hf").glob("*.safetensors")
        for _ in range(4):  # as large as the largest target: weights, two moments and second copies of tied embeddings
            subprocess.run(f"cat {file} >> {folder / 'blob'}", shell=True, check=True)
        print(f"word embedding of {options.mb} MB, {options.rounds} rounds\n")
        print(
            f"{'':30}{'MB written':>11}{'seconds':>9}{'dd':>8}{'rate / dd':>11}{'peak MB':>9}{'peak / embedding':>18}"
        )
        for title, (source, to, tensor, pipeline) in CONVERSIONS.items():
            seconds, copies, peaks, size = [], [], [], 0
            for _ in range(options.rounds):
                drop_from_page_cache(folder)
                results = processes.Queue()
                process = processes.Process(target=convert_once, args=(folder, source, to, tensor, pipeline, results))
                process.start()
                taken, peak = results.get(timeout=600)
                process.join()
                size = sum(path.stat().st_size for path in (folder / "target").rglob("*") if path.is_file())
                shutil.rmtree(folder / "target")
                seconds.append(taken)
                peaks.append(peak / 1e6)
                copies.append(copy_once(folder, size))
            taken, copied, peak = statistics.median(seconds), statistics.median(copies), max(peaks)
            print(
                f"{title:30}{size / 1e6:11,.0f}{taken:9.2f}{copied:8.2f}{copied / taken:11.2f}{peak:9,.0f}"
                f"{peak / options.mb:18.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
