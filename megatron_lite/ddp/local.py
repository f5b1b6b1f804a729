"""LocalDDP: gradients accumulate in one fp32 buffer and are summed over data-parallel ranks while backward still runs.

A hook on every parameter moves each new gradient into the buffer and frees it. In a chunk's last backward, a bucket is
reduced as soon as its last gradient has arrived. Buckets start in the same fixed order on every rank, whatever the
order of arrival: NCCL pairs collectives by order, so two ranks with different orders would sum gradients of different
parameters.

The first gradient of a step overwrites the buffer, which is never filled with zeros: this halves the memory traffic of
one micro-batch. A `.grad` that is a view of the buffer was measured too: it saves no copy and needs the zeros.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from weakref import proxy

import torch
from torch import Tensor

from megatron_lite.ddp.buffer import Bucket, GradBuffer
from megatron_lite.ddp.data_parallel import Chunks, DataParallel, Params, names_by_chunk
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.collectives import all_reduce_async
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.parallel.weight_grads import has_product_into


class GradBuffers:
    """The gradients of one step, from its first backward until the optimizer uses them."""

    def __init__(self, buffers: list[GradBuffer]):
        self.buffers = buffers
        # The last chunk's backward runs first.
        self.buckets = [bucket for buffer in reversed(buffers) for bucket in buffer.buckets]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.ranges}
        self.grads = {name: view for buffer in buffers for name, view in buffer.views.items()}
        self.clear()

    def next_is_complete(self) -> bool:
        """Whether the next bucket has all its gradients."""
        return len(self.waits) < len(self.buckets) and not self.buckets[len(self.waits)].missing

    def wait(self) -> None:
        """Return once all gradients are summed over dp."""
        for wait in self.waits:
            wait()

    def clear(self) -> None:
        """Mark all gradients as missing; the next gradient of a parameter overwrites its memory."""
        self.filled: set[str] = set()
        self.waits: list[Callable[[], object]] = []  # one for each bucket that has started, in order
        for bucket in self.buckets:
            bucket.missing.update(bucket.ranges)


class LocalDDP(DataParallel):
    """The engine that keeps full replicas and sums the gradients of `params` over micro-batches and over `dp`."""

    def __init__(
        self, chunks: Chunks, params: Params, table: ParamTable, dp: Group, *, bucket_mb: float, grad_dtype: torch.dtype
    ):
        self._chunks = chunks
        self._params = params
        self._dp = dp
        self.weight_dtype = next(iter(params.values())).dtype
        tied = {name for name in params if table[name].tied}
        of_chunks = [{name: params[name] for name in names} for names in names_by_chunk(chunks, params)]
        settings = {"bucket_bytes": bucket_mb * 2**20, "dtype": grad_dtype, "num_shards": dp.size, "alone": tied}
        self._new_buffers = lambda: GradBuffers([GradBuffer(of_chunk, **settings) for of_chunk in of_chunks])
        self._current = self._new_buffers()
        self.owned = {name: LocalShard(parameter.detach()) for name, parameter in params.items()}
        ddp = proxy(self)  # a hook is invisible to the garbage collector: the cycle would never be freed
        for name, parameter in params.items():
            parameter.register_post_accumulate_grad_hook(partial(LocalDDP._accumulate, ddp, name))
            if parameter.dim() == 2 and has_product_into(grad_dtype, parameter):
                parameter.add_grad = partial(LocalDDP._add_grad, ddp, name)  # type: ignore[attr-defined]
        # For each tensor that `_add_grad` has returned, its address and whether it has values.
        self._written: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        self._vectors: dict[str, Tensor] = {}  # gradients of vectors that are not added yet
        self.main_grads = self._owned_grads(self._current)
        self.zero_grad()

    def zero_grad(self) -> None:
        self._current.clear()
        self._written.clear()  # of a step that an error has ended
        self._vectors.clear()
        for name, parameter in self._params.items():
            parameter.grad = None
            parameter.main_grad = self._current.grads[name]  # type: ignore[attr-defined]
        self._is_last = False

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        self._add_vectors()
        self._is_last = is_last

    def finish_grad_sync(self) -> None:
        self._start_all_buckets()
        self._current.wait()

    def grad_memory(self) -> list[Tensor]:
        return [buffer.flat for buffer in self._current.buffers]

    def _owned_grads(self, step: GradBuffers) -> dict[str, Tensor]:
        """The gradients of the parameters, or of the ranges, that this rank owns."""
        return step.grads

    def _accumulate(self, name: str, parameter: Tensor) -> None:
        """The hook that autograd calls once in a backward, when `parameter.grad` is complete."""
        step, main_grad = self._current, self._current.grads[name]
        missing = step.bucket_of[name].missing
        if self._is_last and name not in missing:
            raise TrainingError(
                f"{name} got another gradient after its last one, when its sum over dp may have started; "
                "call begin_backward before every backward, with is_last in a chunk's last one only"
            )
        if parameter.grad is None or self._is_written(name, parameter.grad):
            pass  # a tied head without a lookup returns None
        elif parameter.dim() == 1:
            self._vectors[name] = parameter.grad
        elif name in step.filled:
            main_grad.add_(parameter.grad)
        else:
            main_grad.copy_(parameter.grad)
            step.filled.add(name)
        parameter.grad = None
        if self._is_last:
            missing.remove(name)
            while step.next_is_complete():
                self._start_next_bucket()

    def _add_grad(
        self, name: str, write: Callable[..., None], returned: Tensor | None = None, *, has_values: bool = False
    ) -> Tensor | None:
        """Let a layer write into a gradient; see `weight_grads.AddGrad`."""
        step = self._current
        write(step.grads[name], overwrite=name not in step.filled)
        step.filled.add(name)
        if returned is not None:
            self._written[name].append((returned.data_ptr(), has_values))
        return returned

    def _is_written(self, name: str, grad: Tensor) -> bool:
        """Whether layers have written all of a gradient, and `grad` consists of the tensors that they returned."""
        returned = self._written.pop(name, [])
        if len(returned) == 1 and (grad.data_ptr() != returned[0][0] or grad._version > 0) and not returned[0][1]:
            raise TrainingError(
                f"{name} belongs to a parallel layer, and another operation uses it in the same forward; call "
                "megatron_lite.parallel.linear.column_parallel_linear instead of the layer"
            )
        is_alone = len(returned) == 1 and grad.data_ptr() == returned[0][0] and grad._version == 0
        return is_alone or any(not has_values for _, has_values in returned)

    def _add_vectors(self) -> None:
        """Add the gradients of biases and norms that have arrived. One kernel does it for many of them."""
        step, vectors = self._current, self._vectors
        if not vectors:
            return
        copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        first = [name for name in vectors if name not in step.filled]
        if first:
            copy([step.grads[name] for name in first], [vectors.pop(name) for name in first])
        if vectors:
            totals = [step.grads[name] for name in vectors]
            wide = [torch.empty_like(total) for total in totals]
            copy(wide, list(vectors.values()))  # a list of two dtypes would be a kernel for each tensor
            torch._foreach_add_(totals, wide)  # pyright: ignore[reportPrivateImportUsage]
        step.filled.update(first)
        vectors.clear()

    def _start_all_buckets(self) -> None:
        """Start all other buckets: those with unused parameters and those after them, in the order of every rank."""
        while len(self._current.waits) < len(self._current.buckets):
            self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        self._add_vectors()
        step = self._current
        bucket = step.buckets[len(step.waits)]
        for name in bucket.ranges.keys() - step.filled:
            step.grads[name].zero_()
        step.waits.append(self._reduce(bucket))

    def _reduce(self, bucket: Bucket) -> Callable[[], object]:
        """Start the sum of a bucket over dp; return a function that waits for it."""
        return all_reduce_async(bucket.flat, self._dp)[1]
