"""What conversion takes: memory beside the size of one tensor, and time beside that of copying the bytes.

A GPT whose word embedding is by far its largest tensor, in fp32, is converted between formats and layouts; from our
format to ours with two moments, as a run goes on. Each conversion is a process of its own, and takes turns with `dd`,
which copies as many bytes as the target has, waiting for the disk as conversion does. Sources are dropped from the page
cache before. Memory is the most that was resident (VmHWM: anonymous, and pages of mapped files) beyond what there was
after imports; it is to stay below 2 times the largest tensor.

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

from contest import forget, resident

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
    """A run's checkpoint with random weights and moments, and the same in each format."""
    import torch

    from megatron_lite.config.schema import Config, DataConfig, ModelConfig
    from megatron_lite.convert.driver import Request, convert
    from megatron_lite.convert.grid_files import write_grid
    from megatron_lite.convert.recipe import full_table
    from megatron_lite.parallel.shard import Shard

    model = ModelConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_heads=16,
        max_position_embeddings=512,
        vocab_size=int(megabytes * 1e6) // (4 * HIDDEN),
        activation="gelu_tanh",
    )

    table = full_table(model)

    class Drawn:
        def kinds(self, name: str) -> dict[str, torch.dtype]:
            return dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), torch.float32)

        def cut(self, name: str, kind: str, shard: Shard, rank: int, size: int) -> torch.Tensor:
            return torch.randn(table[name].shape)

    config = Config(model=model, data=DataConfig(seq_length=512))
    state: dict[str, Any] = {"train": {}}
    write_grid(folder / "ours" / "checkpoints", 1, Drawn(), config=config, state=state, progress=lambda count: None)
    for target, to, tensor, pipeline in (
        ("wide", "megatron-lite", 4, 2),
        ("hf", "huggingface", 1, 1),
        ("megatron", "megatron", 4, 1),
    ):
        request = Request(folder / "ours", folder / target, target_format=to, tensor=tensor, pipeline=pipeline)
        convert(request, lambda line: None)


def convert_once(folder: Path, source: str, to: str, tensor: int, pipeline: int, results: Any) -> None:
    """In a process of its own; seconds and peak go into the queue."""
    from megatron_lite.convert.driver import Request, convert

    request = Request(folder / source, folder / "target", target_format=to, tensor=tensor, pipeline=pipeline)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    convert(request, lambda line: None)
    results.put((time.perf_counter() - started, resident("VmHWM") - before))


def copy_once(folder: Path, count: int) -> float:
    """Seconds that dd takes for so many bytes."""
    forget(folder)
    started = time.perf_counter()
    arguments = [f"if={folder / 'blob'}", f"of={folder / 'copy'}", f"count={count}", "iflag=count_bytes", "conv=fsync"]
    subprocess.run(["dd", "bs=8M", *arguments], check=True, capture_output=True)
    (folder / "copy").unlink()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=400, help="size of the word embedding")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    options = parser.parse_args()
    processes = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        maker = processes.Process(target=make_sources, args=(folder, options.mb))
        maker.start()
        maker.join()
        (file,) = (folder / "hf").glob("*.safetensors")
        for _ in range(4):  # the largest target: weights, two moments and a second copy of each tied embedding
            subprocess.run(f"cat {file} >> {folder / 'blob'}", shell=True, check=True)
        print(f"word embedding of {options.mb} MB, {options.rounds} rounds\n")
        print(
            f"{'':30}{'MB written':>11}{'seconds':>9}{'dd':>8}{'rate / dd':>11}{'peak MB':>9}{'peak / embedding':>18}"
        )
        for title, (source, to, tensor, pipeline) in CONVERSIONS.items():
            seconds, copies, peaks, size = [], [], [], 0
            for _ in range(options.rounds):
                forget(folder)
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
