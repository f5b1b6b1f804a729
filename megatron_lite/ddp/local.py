"""LocalDDP: gradients add up in one fp32 buffer and meet across data-parallel ranks while backward still runs.

A hook on every parameter moves each new gradient into the buffer and frees it. In a chunk's last backward, a
bucket is reduced at once when its last gradient has come. Buckets start in the same fixed order on every rank,
whatever the order of arrival: NCCL pairs collectives by order, so two ranks that started two buckets in different
order would add up gradients of different parameters.

The first gradient of a step is copied over what the buffer held, so that nothing is filled with zeros first:
that is half the memory traffic with one micro-batch, and for bf16 a copy costs far less than an addition into fp32.
fp32 gradients take the same way. Letting autograd add in place into a `.grad` that is a view of the buffer was
measured too: it saves no copy, because autograd has made the new gradient elsewhere already, and it needs the
buffer filled with zeros.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron_lite.ddp.buffer import GradBuffer
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.collectives import all_reduce_async
from megatron_lite.parallel.context import Group


class LocalDDP:
    """Sums the gradients of `params` over micro-batches and over `dp`; see `DataParallel` for the order of calls."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        params: dict[str, nn.Parameter],
        dp: Group,
        *,
        bucket_mb: float,
        grad_dtype: torch.dtype,
    ):
        self._chunks = list(chunks)
        self._params = params
        self._dp = dp
        self.buffers = [
            GradBuffer(own, bucket_bytes=bucket_mb * 2**20, dtype=grad_dtype) for own in _by_chunk(chunks, params)
        ]
        self.main_grads: dict[str, Tensor] = {}
        # The last chunk's backward runs first.
        self._buckets = [bucket for buffer in reversed(self.buffers) for bucket in buffer.buckets]
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                for name in bucket.names:
                    parameter, main_grad = params[name], buffer.views[name]
                    self.main_grads[name] = parameter.main_grad = main_grad  # type: ignore[attr-defined]
                    parameter.register_post_accumulate_grad_hook(partial(self._take, name, main_grad, bucket.missing))
        self.zero_grad()

    def module(self, chunk: int) -> nn.Module:
        return self._chunks[chunk]

    def zero_grad(self) -> None:
        """Forgets the gradients of the step before. Their memory is overwritten later, by the first to come."""
        for parameter in self._params.values():
            parameter.grad = None
        self._written: set[str] = set()
        self._waits: list[Callable[[], object]] = []  # one for each bucket that has started, in order
        self._is_last = False
        for bucket in self._buckets:
            bucket.missing.update(bucket.names)

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        self._is_last = is_last

    def finish_grad_sync(self) -> None:
        """Waits until every bucket is summed over dp; `main_grads` hold the result.

        Buckets with a parameter that got no gradient start here, in the same order on every rank, even if only
        some ranks left that parameter out.
        """
        while len(self._waits) < len(self._buckets):
            self._start_next_bucket()
        for wait in self._waits:
            wait()

    def _take(self, name: str, main_grad: Tensor, missing: set[str], parameter: Tensor) -> None:
        """Called by autograd when `parameter.grad` is complete for this backward, however often it was used."""
        assert parameter.grad is not None
        if self._is_last and name not in missing:
            raise TrainingError(
                f"{name} got another gradient after its last one, which may already be summed over data-parallel "
                "ranks; call begin_backward before every backward, with is_last in a chunk's last one only"
            )
        if name in self._written:
            main_grad.add_(parameter.grad)
        else:
            main_grad.copy_(parameter.grad)
            self._written.add(name)
        parameter.grad = None
        if self._is_last:
            missing.remove(name)
            while len(self._waits) < len(self._buckets) and not self._buckets[len(self._waits)].missing:
                self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        bucket = self._buckets[len(self._waits)]
        for name in bucket.names:
            if name not in self._written:
                self.main_grads[name].zero_()
        _, wait = all_reduce_async(bucket.flat, self._dp)
        self._waits.append(wait)


def _by_chunk(chunks: Sequence[nn.Module], params: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The named parameters of each chunk, in order of registration."""
    names = {parameter: name for name, parameter in params.items()}
    return [{names[parameter]: parameter for parameter in chunk.parameters()} for chunk in chunks]
