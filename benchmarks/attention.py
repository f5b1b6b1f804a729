"""Time and peak memory of every implementation of attention that trains on this device, over the sequence length.

One forward and backward of core attention, causal. The implementations take turns; a ratio is to sdpa's median in the
same rounds. Each one's memory is measured in a process of its own: on a GPU the peak of torch's allocator, on a CPU the
peak resident set, minus what the process had before the first call. An implementation that would need more memory than
the machine has is left out at that length.
`--mask documents` packs documents of 512 tokens, `--mask window` has a window of 512.

    python benchmarks/attention.py [--rounds 5] [--lengths 512,2048] [--mask causal] [--only REGEX] [--heads 4]
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.attention import Request, obstacles
from megatron_lite.model.core_attention import IMPLEMENTATIONS
from megatron_lite.model.masks import Mask
from megatron_lite.parallel.dtypes import PRECISIONS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNIT = 512  # tokens of a document and of the window


def mask_of(kind: str, length: int) -> Mask:
    if kind == "documents":
        return Mask(documents=(torch.arange(length, device=DEVICE)[None] // UNIT).int())
    return Mask(window=UNIT if kind == "window" else 0)


def contestants(args: argparse.Namespace, length: int) -> list[str]:
    """The implementations that train on this device at this length."""
    found = []
    for name in IMPLEMENTATIONS:
        request = Request(
            length, args.head_size, mask_of(args.mask, length).kinds, 0.0, 0.0, args.precision, DEVICE.type, trains=True
        )
        interpreted = name == "triton" and DEVICE.type == "cpu"
        # The reference stores scores, probabilities, their gradients and masks: about 30 bytes for each score.
        too_large = name == "math" and 30 * args.heads * length**2 > 0.7 * _memory()
        if re.search(args.only, name) and not interpreted and not too_large and not any(obstacles(name, request)):
            found.append(name)
    return found


def _memory() -> int:
    if DEVICE.type == "cuda":
        return torch.cuda.get_device_properties(DEVICE).total_memory
    return 1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])


def step_of(args: argparse.Namespace, name: str, length: int) -> Callable[[], None]:
    """One forward and backward."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, args.heads, length, args.head_size)
    drawn = [torch.randn(shape, generator=generator).to(DEVICE, PRECISIONS[args.precision]) for _ in range(4)]
    leaves, grad = [x.requires_grad_() for x in drawn[:3]], drawn[3]
    mask, scale = mask_of(args.mask, length), args.head_size**-0.5

    def step() -> None:
        out, _ = IMPLEMENTATIONS[name](*leaves, mask=mask, scale=scale, dropout=0.0, softcap=0.0)
        torch.autograd.grad(out, leaves, grad)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return step


def peak_mb(args: argparse.Namespace, name: str, length: int) -> float:
    """MB above the inputs, measured in a new process."""
    words = [sys.executable, __file__, "--measure", f"{name},{length}", "--mask", args.mask]
    for option in ("heads", "head_size", "precision"):
        words += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def measure(args: argparse.Namespace) -> None:
    name, length = args.measure.split(",")
    if DEVICE.type == "cuda":
        step = step_of(args, name, int(length))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        print((torch.cuda.max_memory_allocated() - before) / 1e6)
        return
    step_of(args, name, 16)()  # loads code and starts threads
    step = step_of(args, name, int(length))
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present size
    before = _peak()
    step()
    print((_peak() - before) / 1e6)


def _peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def main() -> None:
    args = parse()
    if args.measure:
        measure(args)
        return
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"torch {torch.__version__}, {device}, {args.precision}, mask {args.mask}, 1 x {args.heads} heads of "
        f"{args.head_size}, {args.rounds} rounds"
    )
    print(f"{'tokens':>6}  {'':8} {'median ms':>10} {'min ms':>10} {'time / sdpa':>12} {'peak MB':>9}")
    for length in args.lengths:
        names = contestants(args, length)
        steps = {name: step_of(args, name, length) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for step in steps.values():
            step()
        for _ in range(args.rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                times[name].append(1e3 * (time.perf_counter() - start))
        base = statistics.median(times["sdpa"]) if "sdpa" in times else None
        for name in names:
            median = statistics.median(times[name])
            ratio, peak = f"{median / base:.2f}" if base else "-", peak_mb(args, name, length)
            print(f"{length:6}  {name:8} {median:10.1f} {min(times[name]):10.1f} {ratio:>12} {peak:9.1f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time and memory of the implementations of attention.")
    add: Any = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--lengths", type=lambda words: [int(word) for word in words.split(",")], default=[512, 2048, 8192, 16384])
    add("--mask", choices=["causal", "documents", "window"], default="causal")
    add("--only", default="", help="a regular expression of names")
    add("--heads", type=int, default=4 if DEVICE.type == "cpu" else 16)
    add("--head-size", type=int, default=64 if DEVICE.type == "cpu" else 128)
    add("--precision", choices=list(PRECISIONS), default="fp32" if DEVICE.type == "cpu" else "bf16")
    add("--measure", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
