"""Two streams of random numbers a rank: one for what tensor-parallel ranks hold alike, one for what they split.

Dropout on an activation that every tensor-parallel rank holds must drop the same units on each, or the copies
drift apart; dropout on a split activation must not, or the pieces are correlated. So the default stream, torch's
own generators, starts alike over tp, and `RngTracker.fork` puts another in its place for a tensor-parallel region.

Both streams differ over the data, context and pipeline coordinates. Megatron-LM seeds all data-parallel ranks
alike (megatron/core/tensor_parallel/random.py: seed + 100 * pp_rank, and + 2718 + tp_rank for the second
stream); that drops the same units of every replica's samples and so correlates the noise that averaging over
replicas should reduce. Its sums also collide (pp 1 is dp 10 there, where dp counts); a hash of the place does not.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext

_Stream = dict[str, Tensor]  # state of each kind of generator: "cpu", and "cuda" on a GPU rank


class RngTracker:
    """The default stream in torch's generators, and the tensor-parallel one beside it."""

    def __init__(self, device: torch.device, *, default_seed: int, tensor_parallel_seed: int):
        self._device = device
        self._in_fork = False
        torch.manual_seed(tensor_parallel_seed)
        self._resting = self._read()
        torch.manual_seed(default_seed)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Inside, torch draws from the tensor-parallel stream; after it, also after an error, from the default one.

        A fork inside a fork changes nothing.
        """
        if self._in_fork:
            yield
            return
        self._swap()
        self._in_fork = True
        try:
            yield
        finally:
            self._swap()
            self._in_fork = False

    def state_dict(self) -> dict[str, Tensor]:
        """Both streams as byte tensors on the CPU.

        Recomputation reads it before a forward and loads it to replay; whether a fork is open is not part of it.
        """
        live, resting = self._read(), self._resting
        default, tensor_parallel = (resting, live) if self._in_fork else (live, resting)
        states = {f"default.{kind}": state for kind, state in default.items()}
        return states | {f"tensor_parallel.{kind}": state for kind, state in tensor_parallel.items()}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Both streams go on from where `state_dict` was taken, inside or outside a fork."""
        kinds = tuple(self._resting)
        names = {f"{stream}.{kind}" for stream in ("default", "tensor_parallel") for kind in kinds}
        if names != set(states):
            raise CheckpointError(
                f"the random state holds {sorted(states)}, this rank on {self._device.type} needs {sorted(names)}; "
                "go on with the kind of device that the state was saved on"
            )
        default = {kind: states[f"default.{kind}"] for kind in kinds}
        tensor_parallel = {kind: states[f"tensor_parallel.{kind}"] for kind in kinds}
        live, self._resting = (tensor_parallel, default) if self._in_fork else (default, tensor_parallel)
        self._write(live)

    def _swap(self) -> None:
        live = self._read()
        self._write(self._resting)
        self._resting = live

    def _read(self) -> _Stream:
        stream = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            stream["cuda"] = torch.cuda.get_rng_state(self._device)
        return stream

    def _write(self, stream: _Stream) -> None:
        torch.set_rng_state(stream["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(stream["cuda"], self._device)


def stream_seed(seed: int, stream: str, **place: int) -> int:
    """A seed for the named stream at this place in the grid: the same in every run, unrelated between places."""
    text = f"{seed} {stream} {sorted(place.items())}"
    # torch's CPU generator reads only the low 32 bits of a seed.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def seed_everything(seed: int, ctx: ParallelContext) -> RngTracker:
    """Seeds torch's generators for this rank and returns the tracker of its two streams."""
    place = ctx.grid.coordinates(ctx.rank)
    replicated = {axis: at for axis, at in place.items() if axis != "tp"}
    return RngTracker(
        ctx.device,
        default_seed=stream_seed(seed, "default", **replicated),
        tensor_parallel_seed=stream_seed(seed, "tensor_parallel", **place),
    )
