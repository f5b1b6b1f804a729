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
    """The gradients of one step, from its first backward until they are used."""

    def __init__(self, buffers: list[GradBuffer]):
        self.buffers = buffers
        # The last chunk's backward runs first.
        self.buckets = [bucket for buffer in reversed(buffers) for bucket in buffer.buckets]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.starts}
        self.grads = {name: view for buffer in buffers for name, view in buffer.views.items()}
        self.waits: list[Callable[[], object]] = []  # one for each bucket that has started, in order
        self.clear()

    def wait(self) -> None:
        """Returns once its gradients are summed over dp."""
        for wait in self.waits:
            wait()

    def clear(self) -> None:
        """Forgets its gradients. Their memory is overwritten later, by the first to come."""
        self.written: set[str] = set()
        self.waits = []
        for bucket in self.buckets:
            bucket.missing.update(bucket.starts)


class LocalDDP(DataParallel):
    """Sums the gradients of `params` over micro-batches and over `dp`.

    With a `delay` of k steps, what comes out is the gradient of k steps before, whose sum over dp may take as long as
    these k steps; in the first k steps of a run nothing comes out. That needs k further buffers.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        params: dict[str, nn.Parameter],
        table: ParamTable,
        dp: Group,
        *,
        bucket_mb: float,
        grad_dtype: torch.dtype,
        delay: int = 0,
    ):
        self._chunks = list(chunks)
        self._params = params
        self._dp = dp
        self.weight_dtype = next(iter(params.values())).dtype
        tied = {name for name in params if table[name].tied}
        self._buffer_sets = [
            GradBuffers(
                [
                    GradBuffer(
                        own,
                        bucket_bytes=bucket_mb * 2**20,
                        dtype=grad_dtype,
                        shares=dp.size,
                        alone=tied,
                    )
                    for own in _by_chunk(chunks, params)
                ]
            )
            for _ in range(delay + 1)
        ]
        self._pending: list[GradBuffers] = []  # oldest first
        self.owned = {name: LocalShard(parameter.detach()) for name, parameter in params.items()}
        ddp = proxy(self)  # a hook is where the garbage collector does not look: the cycle would stay for good
        for name, parameter in params.items():
            parameter.register_post_accumulate_grad_hook(partial(LocalDDP._accumulate, ddp, name))
        self.main_grads = self._owned_grads(self._buffer_sets[0])
        self.zero_grad()

    def module(self, chunk: int) -> nn.Module:
        return self._chunks[chunk]

    def zero_grad(self) -> None:
        self._current = next(current for current in self._buffer_sets if current not in self._pending)
        self._current.clear()
        for name, parameter in self._params.items():
            parameter.grad = None
            parameter.main_grad = self._current.grads[name]  # type: ignore[attr-defined]
        self._is_last = False

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        self._is_last = is_last

    def finish_grad_sync(self) -> None:
        """Waits until every bucket is summed over dp; `main_grads` hold the result.

        Buckets with a parameter that got no gradient start here, in the same order on every rank, even if only
        some ranks left that parameter out.
        """
        while len(self._current.waits) < len(self._current.buckets):
            self._start_next_bucket()
        self._pending.append(self._current)
        self.has_grads = len(self._pending) == len(self._buffer_sets)
        if not self.has_grads:
            return
        oldest = self._pending.pop(0)
        oldest.wait()
        self.main_grads = self._owned_grads(oldest)

    def weights(self) -> dict[str, LocalShard]:
        self.wait_for_params()
        return {name: LocalShard(parameter.detach()) for name, parameter in self._params.items()}

    def grad_memory(self) -> list[Tensor]:
        return [buffer.flat for current in self._buffer_sets for buffer in current.buffers]

    def pending_grads(self) -> list[dict[str, Tensor]]:
        for current in self._pending:
            current.wait()
        spare = [current for current in self._buffer_sets if current not in self._pending]
        return [current.grads for current in (*self._pending, *spare)][:-1]

    def resume_pending_grads(self, iteration: int) -> None:
        self._pending = self._buffer_sets[: min(iteration, len(self._buffer_sets) - 1)]
        self.zero_grad()

    def _owned_grads(self, grads: GradBuffers) -> dict[str, Tensor]:
        """The gradients of what this rank owns."""
        return grads.grads

    def _accumulate(self, name: str, parameter: Tensor) -> None:
        """Called by autograd when `parameter.grad` is complete for this backward, however often it was used."""
        current, main_grad = self._current, self._current.grads[name]
        missing = current.bucket_of[name].missing
        assert parameter.grad is not None
        if self._is_last and name not in missing:
            raise TrainingError(
                f"{name} got another gradient after its last one, which may already be summed over data-parallel "
                "ranks; call begin_backward before every backward, with is_last in a chunk's last one only"
            )
        if name in current.written:
            main_grad.add_(parameter.grad)
        else:
            main_grad.copy_(parameter.grad)
            current.written.add(name)
        parameter.grad = None
        if self._is_last:
            missing.remove(name)
            while len(current.waits) < len(current.buckets) and not current.buckets[len(current.waits)].missing:
                self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        current = self._current
        bucket = current.buckets[len(current.waits)]
        for name in bucket.starts:
            if name not in current.written:
                current.grads[name].zero_()
        current.waits.append(self._reduce(bucket))

    def _reduce(self, bucket: Bucket) -> Callable[[], object]:
        """Starts to sum a bucket over dp; what is returned waits for it."""
        _, wait = all_reduce_async(bucket.flat, self._dp)
        return wait


def _by_chunk(chunks: Sequence[nn.Module], params: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The named parameters of each chunk, in order of registration."""
    names = {parameter: name for name, parameter in params.items()}
    return [{names[parameter]: parameter for parameter in chunk.parameters()} for chunk in chunks]
