"""Context parallelism: the work of each rank, the bytes that it sends, its peak memory, and the time of a step.

    python benchmarks/context.py [--rounds 5] [--small]

Work is the number of scores that a rank computes with a causal mask, and the seconds of their forward and backward in
this process, which takes the ranks in turn. "plain" gives each rank one block of s/cp neighbouring tokens instead.
Bytes are counted in a forward and backward of attention on real ranks. Memory is the peak of a training step above the
state that exists before it, on the rank with the most. Time is that of a training step; all layouts take turns.
"""

import ctypes
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contest import Contestant, arguments, gpt_config, resident_bytes, timed_in_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.helpers.wire

SHAPE = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 2048, "sequence": 8192, "batch": 1}
SMALL = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 512, "sequence": 512, "batch": 1}
MODES = ("ring", "all_gather", "ulysses")
SIZES = (2, 4, 8)
PORTS = iter(range(29750, 29900))


def positions_of(order: str, length: int, size: int) -> list[torch.Tensor]:
    """The positions of each rank's tokens."""
    from megatron_lite.parallel.zigzag import positions

    if order == "zig-zag":
        return [positions(length, rank, size) for rank in range(size)]
    return list(torch.arange(length, dtype=torch.int32).chunk(size))


def forward_and_backward(positions: list[torch.Tensor], rank: int, shape: dict[str, int]) -> Callable[[], None]:
    """A function that computes the scores of one rank, block by block as in a ring, without communication."""
    from megatron_lite.model.attention_parts import PARTS
    from megatron_lite.model.masks import CAUSAL

    d = shape["hidden"] // shape["heads"]
    generator = torch.Generator().manual_seed(0)
    local = (shape["batch"], shape["heads"], shape["sequence"] // len(positions), d)
    query, key, value, grad = (torch.randn(local, generator=generator) for _ in range(4))
    masks = [CAUSAL.part(positions[rank][None], keys) for keys in positions]
    device = torch.device("cpu")
    seen = [mask for mask in masks if (mask.ranges(local[2], local[2], device).end > 0).any()]

    def run() -> None:
        for mask in seen:
            options = {"mask": mask, "scale": d**-0.5, "softcap": 0.0}
            out, lse = PARTS["sdpa"].forward(query, key, value, **options)
            PARTS["sdpa"].backward(grad, query, key, value, out, lse, **options)

    run()
    return run


def print_work(shape: dict[str, int], rounds: int) -> None:
    length = shape["sequence"]
    print(f"\n{'work of a rank / mean of all ranks':36}{'scores, max':>13}{'min':>7}{'seconds, max':>14}{'min':>7}")
    for size in SIZES:
        for order in ("zig-zag", "plain"):
            positions = positions_of(order, length, size)
            scores = [float((at + 1).sum()) for at in positions]  # a query at position p has p + 1 scores
            ranks = {str(rank): forward_and_backward(positions, rank, shape) for rank in range(size)}
            seconds = [statistics.median(values) for values in timed_in_turns(ranks, rounds).values()]
            (most, least), (slowest, fastest) = (
                (max(of_ranks) / statistics.mean(of_ranks), min(of_ranks) / statistics.mean(of_ranks))
                for of_ranks in (scores, seconds)
            )
            print(f"cp {size}, {order:29}{most:13.3f}{least:7.3f}{slowest:14.3f}{fastest:7.3f}", flush=True)


def attention_bytes(shape: dict[str, int], size: int, mode: str) -> Callable[[], float]:
    """Contestant: a forward and backward of attention; the MB that this rank sends."""
    from megatron_lite.model.context_attention import context_attention
    from megatron_lite.model.masks import CAUSAL
    from megatron_lite.training.initialize import initialize_megatron
    from tests.helpers.wire import Wire

    ctx, _ = initialize_megatron(gpt_config(shape, f"parallel.context={size}", f"parallel.context_mode={mode}"))
    d = shape["hidden"] // shape["heads"]
    tensors = [
        torch.randn(shape["batch"], shape["heads"], shape["sequence"] // size, d, requires_grad=True) for _ in range(3)
    ]
    attend = context_attention(mode, "sdpa", ctx.cp)

    def step() -> float:
        with Wire(at_least=1) as wire:
            attend(*tensors, mask=CAUSAL, scale=d**-0.5, dropout=0.0, softcap=0.0)[0].sum().backward()
        return sum(wire.sent.values()) / 1e6

    return step


def expected_megabytes(shape: dict[str, int], size: int, mode: str) -> float:
    """The formulas of model/context_attention.py in fp32, with as many groups as heads."""
    local = 4 * shape["batch"] * shape["sequence"] // size * shape["hidden"] / 1e6  # of queries; keys, values have 2
    if mode == "ulysses":
        return 2 * (size - 1) / size * 4 * local
    return {"ring": 2 * (size - 1) + size, "all_gather": 3 * (size - 1)}[mode] * 2 * local


def training(shape: dict[str, int], layout: list[str]) -> Callable[[], float]:
    """Contestant: a training step; the MB of its peak above what exists before it."""
    from megatron_lite.data.loader import Batch
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.setup import setup_model_and_optimizer
    from megatron_lite.training.step import local_batches, train_step

    config = gpt_config(shape, *layout)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape["vocab"], (shape["batch"], shape["sequence"] + 1), generator=generator)
    full = Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(shape["batch"], shape["sequence"]))
    batches = local_batches([full], ctx.cp)

    def step() -> float:
        ctypes.CDLL(None).malloc_trim(0)  # returns freed tensors to the system
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the current size
        before = resident_bytes("VmRSS")
        train_step(run, batches)
        return (resident_bytes("VmHWM") - before) / 1e6

    return step


def layouts(sizes: tuple[int, ...]) -> dict[str, tuple[int, list[str]]]:
    """Name -> number of ranks and config changes."""
    made: dict[str, tuple[int, list[str]]] = {"one process": (1, [])}
    for size in sizes:
        for mode in MODES:
            made[f"cp {size}, {mode}"] = (size, [f"parallel.context={size}", f"parallel.context_mode={mode}"])
    return made


def main() -> None:
    args = arguments(__doc__).parse_args()
    shape: Any = SMALL if args.small else SHAPE
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {args.rounds} rounds, fp32, {shape}", flush=True)
    print_work(shape, args.rounds)

    print(f"\n{'MB sent for one layer':36}{'counted':>10}{'formula':>10}")
    for size in (2, 4):
        for mode in MODES:
            ranks = Contestant(partial(attention_bytes, shape, size, mode), size, next(PORTS))
            counted = ranks.step()
            ranks.stop()
            print(f"cp {size}, {mode:29}{counted:10.3f}{expected_megabytes(shape, size, mode):10.3f}", flush=True)

    print(f"\n{'peak MB of a step on a rank':36}{'MB':>10}{'/ first':>9}{'cp x that':>11}")
    first = 0.0
    for name, (size, layout) in layouts((2, 4)).items():
        ranks = Contestant(partial(training, shape, layout), size, next(PORTS))
        ranks.step()  # allocates gradients and moments
        peak = max(ranks.step() for _ in range(3))
        ranks.stop()
        first = first or peak
        print(f"{name:36}{peak:10.1f}{peak / first:9.3f}{size * peak / first:11.3f}", flush=True)
    running = {
        name: Contestant(partial(training, shape, layout), size, next(PORTS))
        for name, (size, layout) in layouts((2,)).items()
    }
    for number in range(args.rounds + 1):
        for contestant in running.values():
            contestant.step()
            if number == 0:
                contestant.seconds.clear()
    print(f"\n{'seconds of a step, 2 cores':36}{'median':>10}{'/ first':>9}")
    baseline = statistics.median(running["one process"].seconds)
    for name, contestant in running.items():
        contestant.stop()
        median = statistics.median(contestant.seconds)
        print(f"{name:36}{median:10.3f}{median / baseline:9.3f}")


if __name__ == "__main__":
    main()
