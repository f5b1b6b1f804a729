"""LocalDDP for the distributed optimizer (ZeRO-1): each rank of dp gets the summed gradients of its shard of a bucket.

LocalDDP all-reduces a bucket. ShardedDDP reduce-scatters it, and all-gathers the updated parameters: the same bytes.
Therefore parameters are views of flat memory, laid out like the buckets of their gradients. Masters and moments exist
for a rank's shards only: 18 bytes a parameter become 6 + 12/dp.

With `optim.distributed_shard`, dp are the ranks of a machine. The sum of a shard is then all-reduced over its copies on
other machines: machines exchange 1/dp of the gradients, and parameters are gathered within each.

The gather starts with the parameters that the next forward needs first, and continues while it runs. A read of a
parameter as an attribute of its module waits for its bucket. (A hook before a module's forward would be too late for
code that reads parameters of other modules; DeepSpeed's ZeRO-3 intercepts the same reads.) Code that keeps parameters
elsewhere, for example in a list, calls `wait_for_params`.
Sources: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.1; Megatron-LM's distrib_optimizer.py, also for the
separate bucket of a tied embedding: both stages must shard it in the same places, because each rank adds only its
shard of the other stage's gradient.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

import torch
from torch import Tensor, nn

from megatron_lite.ddp.buffer import Bucket
from megatron_lite.ddp.data_parallel import Chunks, Params, only_dtype
from megatron_lite.ddp.local import GradBuffers, LocalDDP
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.parallel.collectives import all_gather_single, all_reduce_async, reduce_scatter_single
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.parallel.waiting import finished


class ShardedDDP(LocalDDP):
    """LocalDDP on more than one rank of `dp`, where `owned` and `main_grads` are this rank's ranges of the parameters.

    `gather` has the same ranks and its own connection, so that no other collective waits for weights in flight.
    The ranks of `copies` own the same ranges. A parameter's `main_grad` holds the sum in this rank's range only.
    """

    def __init__(
        self, chunks: Chunks, params: Params, table: ParamTable, dp: Group, *, gather: Group, copies: Group, **settings
    ):
        super().__init__(chunks, params, table, dp, **settings)
        self._copies, self.num_copies = copies, copies.size
        self._sum_copies: Callable[[], object] = lambda: None  # of the newest bucket: starts it, once
        buckets = self._current.buckets
        dtype = only_dtype(params, "optim.distributed")
        self._flat = [_flatten(bucket, params, dtype) for bucket in buckets]
        self.owned = {
            name: LocalShard(flat[at], start, "sharded", flat.numel() // dp.size, each.ranges[name].start, copies.rank)
            for each, flat in zip(buckets, self._flat, strict=True)
            for name, at, start in each.slices(self._shard(each))
        }
        self._gather = gather
        self._gathers: dict[int, Callable[[], object]] = {}  # in flight, by number of the bucket
        number_of = {params[name]: number for number, bucket in enumerate(buckets) for name in bucket.ranges}
        for chunk in chunks:
            for module in chunk.modules():
                module._parameters = _Awaited(module._parameters, lambda read: self._wait_for([number_of[read]]))

    def gather_params(self) -> None:
        self.wait_for_params()
        for number in reversed(range(len(self._flat))):  # gradients come in the reverse order of use
            flat = self._flat[number]
            shard = flat[self._shard(self._current.buckets[number])]
            work = all_gather_single(flat, shard, group=self._gather.pg, async_op=True)
            self._gathers[number] = partial(finished, work, "all_gather", self._gather)

    def wait_for_params(self) -> None:
        self._wait_for(range(len(self._flat)))

    def weights(self) -> dict[str, LocalShard]:
        self.wait_for_params()
        return {name: LocalShard(parameter.detach()) for name, parameter in self._params.items()}

    def _wait_for(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._gathers:
                self._gathers.pop(number)()

    def _shard(self, bucket: Bucket) -> slice:
        return bucket.shard(self._dp.rank, self._dp.size)

    def _owned_grads(self, step: GradBuffers) -> dict[str, Tensor]:
        return {
            name: bucket.flat[place] for bucket in step.buckets for name, place, _ in bucket.slices(self._shard(bucket))
        }

    def _reduce(self, bucket: Bucket) -> Callable[[], object]:
        shard = bucket.flat[self._shard(bucket)]
        work = reduce_scatter_single(shard, bucket.flat, group=self._dp.pg, async_op=True)
        if self._copies.size == 1:
            return partial(finished, work, "reduce_scatter", self._dp)
        self._sum_copies()  # of the bucket before, which most likely is summed over dp by now

        @cache
        def sum_copies() -> Callable[[], object]:
            finished(work, "reduce_scatter", self._dp)
            return all_reduce_async(shard, self._copies)[1]

        self._sum_copies = sum_copies
        return lambda: sum_copies()()


class _Awaited(dict[str, nn.Parameter | None]):
    """A module's parameters; each read calls `wait`. `nn.Module.__getattr__` reads through `_parameters[name]`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], wait: Callable[[nn.Parameter], object]):
        super().__init__(parameters)
        self._wait = wait

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._wait(parameter)
        return parameter


def _flatten(bucket: Bucket, params: Params, dtype: torch.dtype) -> Tensor:
    """Flat memory for the parameters of a bucket, in the ranges of their gradients; they become views of it."""
    flat = torch.zeros(bucket.flat.numel(), dtype=dtype, device=bucket.flat.device)
    for name, place in bucket.ranges.items():
        view = flat[place].view(params[name].shape)
        view.copy_(params[name].detach())
        params[name].data = view
    return flat
