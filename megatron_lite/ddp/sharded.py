"""LocalDDP for the distributed optimizer (ZeRO-1): a rank of dp gets the summed gradients of its share of each bucket.

Where LocalDDP all-reduces a bucket, this one reduce-scatters it; and since an all-reduce is a reduce-scatter and an
all-gather, nothing more travels when the other half brings the updated parameters instead. For that, parameters lie
in flat memory of their own, bucket by bucket as their gradients do. Masters and moments exist for a rank's share only:
18 bytes a parameter become 6 + 12/dp.

The gather starts with what the next forward needs first, and goes on while that runs: a parameter is waited for when it
is read as an attribute of its module, by whomever. (A hook before a module's forward would come too late for those who
read its parameters from outside; DeepSpeed's ZeRO-3 watches the same place.) Who keeps parameters elsewhere, in a list
of its own, calls `wait_for_params`.
Sources: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.1; Megatron-LM's distrib_optimizer.py, from which the
bucket of its own for a tied embedding is: both of its stages must cut it in the same places, because each rank adds
only its share of the other stage's gradient.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron_lite.ddp.buffer import Bucket
from megatron_lite.ddp.data_parallel import only_dtype
from megatron_lite.ddp.local import GradBuffers, LocalDDP
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.parallel.collectives import all_gather_single, reduce_scatter_single
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.parallel.waiting import finished


class ShardedDDP(LocalDDP):
    """As LocalDDP, on more than one rank of `dp`; `owned` and `main_grads` are this rank's runs of the parameters.

    `gather` are the same ranks over a connection of its own, where nothing waits for weights that are on their way.
    A parameter's `main_grad` holds the sum over dp in this rank's run only.
    """

    is_sharded = True

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        params: dict[str, nn.Parameter],
        table: ParamTable,
        dp: Group,
        *,
        gather: Group,
        bucket_mb: float,
        grad_dtype: torch.dtype,
    ):
        super().__init__(chunks, params, table, dp, bucket_mb=bucket_mb, grad_dtype=grad_dtype)
        buckets = self._current.buckets
        dtype = only_dtype(params, "optim.distributed")
        self._flat = [_flatten(bucket, params, dtype) for bucket in buckets]
        self.owned = {
            name: LocalShard(flat[place], start, "sharded")
            for bucket, flat in zip(buckets, self._flat, strict=True)
            for name, place, start in bucket.runs(bucket.share(dp.rank, dp.size))
        }
        self._gather = gather
        self._gathers: dict[int, Callable[[], object]] = {}  # under way, by number of the bucket
        number_of = {params[name]: number for number, bucket in enumerate(buckets) for name in bucket.starts}
        for chunk in chunks:
            for module in chunk.modules():
                module._parameters = _Awaited(module._parameters, lambda read: self._wait_for([number_of[read]]))

    def gather_params(self) -> None:
        self.wait_for_params()
        for number in reversed(range(len(self._flat))):  # gradients come in the reverse order of use
            flat = self._flat[number]
            own = flat[self._current.buckets[number].share(self._dp.rank, self._dp.size)]
            work = all_gather_single(flat, own, group=self._gather.pg, async_op=True)
            self._gathers[number] = partial(finished, work, "all_gather", self._gather)

    def wait_for_params(self) -> None:
        self._wait_for(range(len(self._flat)))

    def _wait_for(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._gathers:
                self._gathers.pop(number)()

    def _owned_grads(self, step: GradBuffers) -> dict[str, Tensor]:
        return {
            name: bucket.flat[place]
            for bucket in step.buckets
            for name, place, _ in bucket.runs(bucket.share(self._dp.rank, self._dp.size))
        }

    def _reduce(self, bucket: Bucket) -> Callable[[], object]:
        own = bucket.flat[bucket.share(self._dp.rank, self._dp.size)]
        work = reduce_scatter_single(own, bucket.flat, group=self._dp.pg, async_op=True)
        return partial(finished, work, "reduce_scatter", self._dp)


class _Awaited(dict[str, nn.Parameter | None]):
    """A module's parameters; `wait` is called with each one that is read."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], wait: Callable[[nn.Parameter], object]):
        super().__init__(parameters)
        self._wait = wait

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._wait(parameter)
        return parameter


def _flatten(bucket: Bucket, params: dict[str, nn.Parameter], dtype: torch.dtype) -> Tensor:
    """Flat memory for the parameters of a bucket, in the places that their gradients have; they become views of it."""
    flat = torch.zeros(bucket.flat.numel(), dtype=dtype, device=bucket.flat.device)
    for name, start in bucket.starts.items():
        parameter = params[name]
        place = flat[start : start + parameter.numel()].view(parameter.shape)
        place.copy_(parameter.detach())
        parameter.data = place
    return flat
