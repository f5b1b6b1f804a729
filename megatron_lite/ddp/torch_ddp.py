"""PyTorch's DistributedDataParallel behind the same interface as LocalDDP.

Three things differ from its usual use. Two are in the communication hook: our loss is divided by the number of target
tokens in the global batch, so gradients are summed, where DDP takes a mean (multiplying by dp afterwards would
round, and overflow fp16 sooner). And bf16 or fp16 gradients are summed in fp32: in bf16 each addition keeps 8
bits, so the sum would depend on the number of ranks. That costs twice the bytes on the wire. And a pipeline runs
further forwards between a micro-batch's forward and its backward, so it is not a forward that tells DDP to expect the
last gradients, but the moment before the last backward (as torch.distributed.pipelining does it).

DDP lays its buckets out anew after the first step, in the order in which gradients came. With more than two
ranks the order of a floating-point sum may then change with the bucket that a gradient is in: from the second
step on the last bits can differ from a run resumed there. LocalDDP's buckets never move.

Every parameter must be used in every micro-batch: DDP's search for unused ones costs a walk of the graph each time,
and no model here has any.
"""

import warnings
from collections.abc import Sequence
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import Group


class TorchDDP(DataParallel):
    """Sums the gradients of `params` over micro-batches and over `dp`. `main_grads` are new tensors in each step."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        params: dict[str, nn.Parameter],
        dp: Group,
        *,
        bucket_mb: float,
        grad_dtype: torch.dtype,
    ):
        self._params = params
        self._names = {parameter: name for name, parameter in params.items()}
        self._dp = dp
        self._grad_dtype = grad_dtype
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers; the new name is not there in 2.8.
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
        self.weight_dtype = next(iter(params.values())).dtype
        self.owned = {name: LocalShard(parameter.detach()) for name, parameter in params.items()}
        self._of_chunk = [[self._names[parameter] for parameter in chunk.parameters()] for chunk in chunks]
        for wrapped in self._wrapped:
            wrapped.register_comm_hook(proxy(self), TorchDDP._sum_bucket)
            wrapped.require_backward_grad_sync = False  # as in `no_sync()`: a forward announces nothing
        self.zero_grad()

    def module(self, chunk: int) -> nn.Module:
        return self._wrapped[chunk]

    def zero_grad(self) -> None:
        for parameter in self._params.values():
            parameter.grad = None
        self.main_grads: dict[str, Tensor] = {}
        self._earlier: dict[str, Tensor] = {}  # low-precision gradients of the micro-batches before this one, in fp32

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        self._keep_low_precision_grads(self._of_chunk[chunk])
        if is_last:
            self._wrapped[chunk].reducer.prepare_for_backward([])

    def finish_grad_sync(self) -> None:
        """DDP has waited at the end of backward; here the result is checked to be whole."""
        absent = [name for name in self._params if name not in self.main_grads]
        if absent:
            unused = [name for name in absent if self._params[name].grad is None]
            raise TrainingError(
                f"parallel.ddp=torch: the gradients of {len(absent)} of {len(self._params)} parameters were not summed "
                f"over data-parallel ranks, because {(unused or absent)[0]} was not used in the last micro-batch; "
                "use every parameter in every micro-batch, or parallel.ddp=local, which allows unused ones"
            )
        # Not in the order of the buckets, which move: the norm of the gradient is a sum over them.
        self.main_grads = {name: self.main_grads[name] for name in self._params}

    def weights(self) -> dict[str, LocalShard]:
        return self.owned

    def grad_memory(self) -> list[Tensor]:
        own = [parameter.grad for parameter in self._params.values() if parameter.grad is not None]
        return [*own, *self.main_grads.values(), *self._earlier.values()]

    def _keep_low_precision_grads(self, names: list[str]) -> None:
        """Autograd would add up the micro-batches' gradients in bf16."""
        for name in names:
            parameter = self._params[name]
            if parameter.grad is not None and parameter.grad.dtype != self._grad_dtype:
                if name in self._earlier:
                    self._earlier[name].add_(parameter.grad)
                else:
                    self._earlier[name] = parameter.grad.to(self._grad_dtype)
                parameter.grad = None

    def _sum_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Called by DDP when a bucket is complete; starts its sum over dp. `main_grads` become views of the result."""
        own = bucket.buffer()
        total = own.to(self._grad_dtype)  # the same memory unless it is low precision
        moved = total.storage_offset() - own.storage_offset()
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[parameter]  # type: ignore[index]
            main_grad = total.as_strided(grad.shape, grad.stride(), grad.storage_offset() + moved)
            if name in self._earlier:
                main_grad.add_(self._earlier.pop(name))
            self.main_grads[name] = main_grad
        work = dist.all_reduce(total, group=self._dp.pg, async_op=True)
        assert work is not None
        # DDP makes .grad from what the future returns; nobody reads .grad of low precision.
        return work.get_future().then(lambda _: own)
