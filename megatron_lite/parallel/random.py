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

_STREAMS = ("default", "tensor_parallel")
_Stream = dict[str, Tensor]  # state of each kind of generator: "cpu", and "cuda" on a GPU rank


class RngTracker:
    """The default stream, in torch's generators, and the tensor-parallel one."""

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
        """Both streams as byte tensors on the CPU, the same inside and outside of a fork."""
        live, resting = self._read(), self._resting
        streams = zip(_STREAMS, (resting, live) if self._in_fork else (live, resting), strict=True)
        return {f"{name}.{kind}": state for name, stream in streams for kind, state in stream.items()}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Continue both streams from `state_dict`, inside or outside of a fork."""
        names = {f"{name}.{kind}" for name in _STREAMS for kind in self._resting}
        if names != set(states):
            raise CheckpointError(
                f"the random state holds {sorted(states)}, this rank on {self._device.type} needs {sorted(names)}; "
                "resume on the kind of device that saved the state"
            )
        default, tensor_parallel = ({kind: states[f"{name}.{kind}"] for kind in self._resting} for name in _STREAMS)
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
    """The seed of a stream at this place in the grid: reproducible, and unrelated between places."""
    text = f"{seed} {stream} {sorted(place.items())}"
    # torch's CPU generator reads only the low 32 bits of a seed.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def seed_everything(seed: int, ctx: ParallelContext) -> RngTracker:
    """Seed torch's generators for this rank; returns the tracker of its streams."""
    place = ctx.grid.coordinates(ctx.rank)
    replicated = {axis: at for axis, at in place.items() if axis != "tp"}
    return RngTracker(
        ctx.device,
        default_seed=stream_seed(seed, "default", **replicated),
        tensor_parallel_seed=stream_seed(seed, "tensor_parallel", **place),
    )
