"""Two random streams for each rank: one for replicated activations, one for activations sharded over tp.

Dropout on a replicated activation must drop the same units on every rank of tp, or the copies diverge. On a sharded
one it must not, or the shards are correlated. So the default stream, torch's generators, is equal over tp, and
`RngTracker.fork` switches to the other one in a tensor-parallel region.

Both streams differ over data, context and pipeline coordinates. Megatron-LM (megatron/core/tensor_parallel/random.py)
seeds data-parallel ranks alike: replicas drop the same units, which correlates the noise that their average should
reduce. Its seeds are sums of coordinates, which can collide; a hash does not.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext


class RngTracker:
    """The default stream, in torch's generator of the device, and the tensor-parallel one.

    On a GPU activations draw from its generator alone, so a fork exchanges only its state.
    """

    def __init__(self, device: torch.device, *, default_seed: int, tensor_parallel_seed: int):
        self._device = device
        self._in_fork = False
        torch.manual_seed(tensor_parallel_seed)
        self._resting = self._read()
        torch.manual_seed(default_seed)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Inside, torch draws from the tensor-parallel stream; a nested fork changes nothing."""
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
        """Both streams as byte tensors on the CPU, the same inside and outside of a fork; on a GPU also the state of
        the CPU's generator, which a script may use."""
        live, resting = self._read(), self._resting
        default, tensor_parallel = (resting, live) if self._in_fork else (live, resting)
        kind = "cuda" if self._device.type == "cuda" else "cpu"
        host = {"host.cpu": torch.get_rng_state()} if kind == "cuda" else {}
        return {f"default.{kind}": default, f"tensor_parallel.{kind}": tensor_parallel, **host}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Continue both streams from the `state_dict` of the same kind of device, inside or outside of a fork.

        CheckpointError: a state is not one of a generator.
        """
        default, tensor_parallel, *host = (states[name] for name in self.state_dict())
        live, self._resting = (tensor_parallel, default) if self._in_fork else (default, tensor_parallel)
        try:
            for state in (self._resting, live):  # the first one only for its error
                self._write(state)
            for state in host:
                torch.set_rng_state(state)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's random states are damaged: {error}; load another one") from None

    def _swap(self) -> None:
        live = self._read()
        self._write(self._resting)
        self._resting = live

    def _read(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def _write(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


def stream_seed(seed: int, stream: str, **place: int) -> int:
    """The seed of a stream at this place in the grid: reproducible, and unrelated between places."""
    text = f"{seed} {stream} {sorted(place.items())}"
    # torch's CPU generator reads only the low 32 bits of a seed; one of a GPU reads all.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def seed_everything(seed: int, ctx: ParallelContext) -> RngTracker:
    """Seed torch's generators for this rank; returns the tracker of its streams."""
    place = ctx.grid.coordinates(ctx.rank)
    replicated = {axis: at for axis, at in place.items() if axis != "tp"}
    return RngTracker(
        ctx.device,
        default_seed=stream_seed(seed, "default", **replicated),
        tensor_parallel_seed=stream_seed(seed, "tensor_parallel", **place),
    )
