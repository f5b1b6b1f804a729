"""PyTorch's DistributedDataParallel (DDP) as an engine of this project.

Its use differs in three ways:
- Gradients are summed, not averaged: our loss is divided by the target tokens of the global batch. A multiplication by
  dp after the mean would round, and overflow fp16 sooner.
- bf16 and fp16 gradients are summed in fp32, at twice the bytes on the wire. In bf16 each addition keeps 8 bits, so the
  sum would depend on the number of ranks.
- DDP expects the last gradients from the moment before the last backward, not from a forward: a pipeline runs other
  forwards between a micro-batch's forward and its backward. torch.distributed.pipelining does the same.

DDP rebuilds its buckets after the first step, in the order of arrival. With more than two ranks the bucket can change
the order of a sum, so from the second step on the last bits can differ from a run resumed there.
Every parameter must be used in every micro-batch: DDP's search for unused ones would walk the graph in each.
"""

import warnings
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.ddp.data_parallel import Chunks, DataParallel, Params, ToWrap, names_by_chunk
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.ddp.wrap import bucket_mb
from megatron_lite.engines.gradients import check_gradients
from megatron_lite.parallel.context import Group


def wrap(given: ToWrap) -> "TorchDDP":
    """The engine of `parallel.ddp: torch`. Collective over dp."""
    size = bucket_mb(given.config.parallel.bucket_mb, given.dp.size)
    return TorchDDP(given.chunks, given.params, given.dp, bucket_mb=size, grad_dtype=given.grad_dtype)


class TorchDDP(DataParallel):
    """The engine that sums the gradients of `params` with torch's DDP; `main_grads` are new tensors in each step."""

    def __init__(self, chunks: Chunks, params: Params, dp: Group, *, bucket_mb: float, grad_dtype: torch.dtype):
        self._params = params
        self._names = {parameter: name for name, parameter in params.items()}
        self._dp = dp
        self._grad_dtype = grad_dtype
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers; 2.8 does not have the new name.
            warnings.simplefilter("ignore", FutureWarning)
            self._wrapped = [
                DistributedDataParallel(
                    chunk,
                    process_group=dp.pg,
                    bucket_cap_mb=bucket_mb,
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                )
                for chunk in chunks
            ]
        self._chunks = self._wrapped
        self.weight_dtype = next(iter(params.values())).dtype
        self.owned = {name: LocalShard(parameter.detach()) for name, parameter in params.items()}
        self._names_by_chunk = names_by_chunk(chunks, params)
        for wrapped in self._wrapped:
            wrapped.register_comm_hook(proxy(self), TorchDDP._sum_bucket)
            wrapped.require_backward_grad_sync = False  # as in `no_sync()`
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self._params.values():
            parameter.grad = None
        self.main_grads: dict[str, Tensor] = {}
        self._earlier: dict[str, Tensor] = {}  # low-precision gradients of earlier micro-batches, in fp32

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        for name in self._names_by_chunk[chunk]:
            parameter = self._params[name]
            if parameter.grad is not None and parameter.grad.dtype != self._grad_dtype:
                # Autograd would add the next micro-batch's gradient in low precision.
                if name in self._earlier:
                    self._earlier[name].add_(parameter.grad)
                else:
                    self._earlier[name] = parameter.grad.to(self._grad_dtype)
                parameter.grad = None
        if is_last:
            self._wrapped[chunk].reducer.prepare_for_backward([])

    def finish_grad_sync(self) -> None:
        # DDP waited at the end of backward, but sums no bucket that lacks a gradient.
        absent = [name for name in self._params if name not in self.main_grads]
        unused = [name for name in absent if self._params[name].grad is None]
        check_gradients("torch", unused or absent, len(self._params))
        # In a fixed order, because the norm is a sum over them and DDP changes the order of its buckets.
        self.main_grads = {name: self.main_grads[name] for name in self._params}

    def grad_memory(self) -> list[Tensor]:
        grads = [parameter.grad for parameter in self._params.values() if parameter.grad is not None]
        return [*grads, *self.main_grads.values(), *self._earlier.values()]

    def _sum_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the sum over dp of a complete bucket; `main_grads` become views of the result. DDP calls this hook."""
        flat = bucket.buffer()
        total = flat.to(self._grad_dtype)  # the same memory unless it is low precision
        moved = total.storage_offset() - flat.storage_offset()
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[parameter]  # type: ignore[index]
            main_grad = total.as_strided(grad.shape, grad.stride(), grad.storage_offset() + moved)
            if name in self._earlier:
                main_grad.add_(self._earlier.pop(name))
            self.main_grads[name] = main_grad
        work = dist.all_reduce(total, group=self._dp.pg, async_op=True)
        assert work is not None
        # DDP makes .grad from the result of the future; a .grad of low precision is never read.
        return work.get_future().then(lambda _: flat)
