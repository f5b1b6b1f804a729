"""Time and memory of head and loss for a large vocabulary: all logits at once, and in chunks (`train.head_chunk`).

A step is forward and backward of the head and the loss of megatron_lite's model, or of a linear layer and torch's cross
entropy, which transformers uses. Memory is the peak of a step above what remains after a step of one position. So
weights and their gradients do not count, but memory that the loss keeps for the next step does. All other memory goes
back to the system after each step, so times include page faults.

    python benchmarks/head.py [--rounds 8] [--only REGEX] [--small] [--vocab 151936] [--chunks 512,256,128]
"""

import ctypes
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from contest import Contestant, arguments, gpt_config, resident_bytes

Shape = dict[str, int]
SHAPE = {"layers": 1, "hidden": 512, "heads": 8, "sequence": 2048, "batch": 1}
SMALL = SHAPE | {"hidden": 64, "sequence": 128}


def inputs(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [s, b, h] and labels [b, s]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape["sequence"], shape["batch"], shape["hidden"], generator=generator)
    return hidden, torch.randint(shape["vocab"], (shape["batch"], shape["sequence"]), generator=generator)


class Step:
    """Forward and backward of `losses`, a function of hidden states [s, b, h] and labels [b, s]."""

    def __init__(self, losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], shape: Shape) -> None:
        self.losses = losses
        self.hidden, self.labels = inputs(shape)
        self._run(positions=1)  # writes the gradients of all weights, whose pages exist from then on
        self.before = resident_bytes("VmRSS")

    def __call__(self) -> float:
        """Take a step; return its peak memory above what remains after a step of one position, in MB."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the current size
        self._run(self.labels.shape[1])
        return (resident_bytes("VmHWM") - self.before) / 1e6

    def _run(self, positions: int) -> None:
        x = self.hidden[:positions].clone().requires_grad_()
        self.losses(x, self.labels[:, :positions]).mean().backward()
        ctypes.CDLL(None).malloc_trim(0)  # returns freed tensors to the system


def ours(shape: Shape, chunk: int) -> Step:
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.setup import setup_model_and_optimizer

    config = gpt_config(shape, f"train.head_chunk={chunk}")
    run = setup_model_and_optimizer(config, *initialize_megatron(config))
    # The lambda keeps `run`, whose parts hold weak references to each other.
    return Step(lambda x, labels: run.model[0]._losses_of(x, labels), shape)  # type: ignore[operator]


def plain(shape: Shape) -> Step:
    weight = torch.randn(shape["vocab"], shape["hidden"], requires_grad=True)
    return Step(lambda x, labels: F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.t().flatten()), shape)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--chunks", default="512,256,128", help="values of train.head_chunk, with commas")
    args = parser.parse_args()
    shape = SMALL | {"vocab": 4096} if args.small else SHAPE | {"vocab": args.vocab}
    chunks = [16] if args.small else [int(chunk) for chunk in args.chunks.split(",")]
    makers: dict[str, Callable[[], Step]] = {"megatron_lite, all logits": partial(ours, shape, 0)}
    makers |= {f"megatron_lite, {chunk} positions": partial(ours, shape, chunk) for chunk in chunks}
    makers["torch: linear, cross_entropy"] = partial(plain, shape)
    names = [name for name in makers if re.search(args.only, name)]
    running: dict[str, Any] = {name: Contestant(makers[name], 1, 29630 + at) for at, name in enumerate(names)}
    peaks: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(args.rounds + 2):
        for name, contestant in running.items():
            peaks[name].append(contestant.step())
    print(f"torch {torch.__version__}, fp32, {args.rounds} rounds, {shape}")
    print(f"{'':34}{'median ms':>10}{'/ first':>9}{'peak MB':>9}{'/ first':>9}")
    first: tuple[float, float] | None = None
    for name, contestant in running.items():
        contestant.stop()
        seconds, peak = statistics.median(contestant.seconds[2:]), max(peaks[name][2:])
        first = first or (seconds, peak)
        print(f"{name:34}{1000 * seconds:10.1f}{seconds / first[0]:9.2f}{peak:9.1f}{peak / first[1]:9.3f}")


if __name__ == "__main__":
    main()
