"""LocalDDP: gradients accumulate in one fp32 buffer and are summed over data-parallel ranks while backward still runs.

A hook on every parameter moves each new gradient into the buffer and frees it. In a chunk's last backward, a bucket is
reduced as soon as its last gradient has arrived. Buckets start in the same fixed order on every rank, whatever the
order of arrival: NCCL pairs collectives by order, so two ranks with different orders would sum gradients of different
parameters.

The first gradient of a step is copied over the buffer's old content, so the buffer is never filled with zeros. That
halves the memory traffic of one micro-batch, and a copy of bf16 costs far less than an addition into fp32. Letting
autograd add in place into a `.grad` that is a view of the buffer was measured too: it saves no copy, because autograd
has already allocated the new gradient elsewhere, and it needs the zeros.
"""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import proxy

import torch
from torch import Tensor, nn

from megatron_lite.ddp.buffer import Bucket, GradBuffer
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.collectives import all_reduce_async
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamTable


class GradBuffers:
    """The gradients of one step, from its first backward until the optimizer uses them."""

    def __init__(self, buffers: list[GradBuffer]):
        self.buffers = buffers
        # The last chunk's backward runs first.
        self.buckets = [bucket for buffer in reversed(buffers) for bucket in buffer.buckets]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.starts}
        self.grads = {name: view for buffer in buffers for name, view in buffer.views.items()}
        self.waits: list[Callable[[], object]] = []  # one for each bucket that has started, in order
        self.clear()

    def wait(self) -> None:
        """Returns once all gradients are summed over dp."""
        for wait in self.waits:
            wait()

    def clear(self) -> None:
        """Marks all gradients as missing; the next gradient of a parameter overwrites its memory."""
        self.filled: set[str] = set()
        self.waits = []
        for bucket in self.buckets:
            bucket.missing.update(bucket.starts)


class LocalDDP(DataParallel):
    """Sums the gradients of `params` over micro-batches and over `dp`."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        params: dict[str, nn.Parameter],
        table: ParamTable,
        dp: Group,
        *,
        bucket_mb: float,
        grad_dtype: torch.dtype,
    ):
        self._chunks = list(chunks)
        self._params = params
        self._dp = dp
        self.weight_dtype = next(iter(params.values())).dtype
        tied = {name for name in params if table[name].tied}

        def new_buffers() -> GradBuffers:
            settings = {"bucket_bytes": bucket_mb * 2**20, "dtype": grad_dtype, "shares": dp.size, "alone": tied}
            return GradBuffers([GradBuffer(chunk, **settings) for chunk in _by_chunk(chunks, params)])

        self._new_buffers = new_buffers
        self._current = new_buffers()
        self.owned = {name: LocalShard(parameter.detach()) for name, parameter in params.items()}
        ddp = proxy(self)  # a hook is invisible to the garbage collector: the cycle would never be freed
        for name, parameter in params.items():
            parameter.register_post_accumulate_grad_hook(partial(LocalDDP._accumulate, ddp, name))
        self.main_grads = self._owned_grads(self._current)
        self.zero_grad()

    def module(self, chunk: int) -> nn.Module:
        return self._chunks[chunk]

    def zero_grad(self) -> None:
        self._current.clear()
        for name, parameter in self._params.items():
            parameter.grad = None
            parameter.main_grad = self._current.grads[name]  # type: ignore[attr-defined]
        self._is_last = False

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        self._is_last = is_last

    def finish_grad_sync(self) -> None:
        """Returns once every bucket is summed over dp; `main_grads` hold the result."""
        self._start_all_buckets()
        self._current.wait()

    def weights(self) -> dict[str, LocalShard]:
        self.wait_for_params()
        return {name: LocalShard(parameter.detach()) for name, parameter in self._params.items()}

    def grad_memory(self) -> list[Tensor]:
        return [buffer.flat for buffer in self._current.buffers]

    def _owned_grads(self, step: GradBuffers) -> dict[str, Tensor]:
        """The gradients of what this rank owns."""
        return step.grads

    def _accumulate(self, name: str, parameter: Tensor) -> None:
        """Called by autograd when `parameter.grad` is complete for this backward, however often it was used."""
        step, main_grad = self._current, self._current.grads[name]
        missing = step.bucket_of[name].missing
        assert parameter.grad is not None
        if self._is_last and name not in missing:
            raise TrainingError(
                f"{name} got another gradient after its last one, which may already be summed over data-parallel "
                "ranks; call begin_backward before every backward, with is_last in a chunk's last one only"
            )
        if name in step.filled:
            main_grad.add_(parameter.grad)
        else:
            main_grad.copy_(parameter.grad)
            step.filled.add(name)
        parameter.grad = None
        if self._is_last:
            missing.remove(name)
            while len(step.waits) < len(step.buckets) and not step.buckets[len(step.waits)].missing:
                self._start_next_bucket()

    def _start_all_buckets(self) -> None:
        """Starts the buckets in which a parameter got no gradient, in the same order on every rank, even if only some
        ranks left that parameter out."""
        while len(self._current.waits) < len(self._current.buckets):
            self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        step = self._current
        bucket = step.buckets[len(step.waits)]
        for name in bucket.starts:
            if name not in step.filled:
                step.grads[name].zero_()
        step.waits.append(self._reduce(bucket))

    def _reduce(self, bucket: Bucket) -> Callable[[], object]:
        """Starts the sum of a bucket over dp and returns a function that waits for it."""
        _, wait = all_reduce_async(bucket.flat, self._dp)
        return wait


def _by_chunk(chunks: Sequence[nn.Module], params: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The named parameters of each chunk, in order of registration."""
    names = {parameter: name for name, parameter in params.items()}
    return [{names[parameter]: parameter for parameter in chunk.parameters()} for chunk in chunks]
