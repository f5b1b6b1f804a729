"""Local SGD and DiLoCo: data-parallel ranks step independently and synchronize their weights every H iterations.

All ranks of dp share a common model. The mean distance of their weights from it, the drift, is the gradient of an outer
SGD step on the common model, from which the ranks continue. Outer rate 1 without momentum gives the mean of their
weights: local SGD. The bytes between ranks fall to 1/H.

Streaming DiLoCo spreads this over the H iterations: fragments of the model synchronize in turn. With a delay the ranks
continue while the mean is in flight, and then keep a part of their new weights: mix * local + (1 - mix) * common.

How late other ranks use a step: a synchronization at the end of iteration t has all steps up to t - delay, and the
next one comes at t + H. So other ranks use a step at most H + delay iterations later (without local steps: 1).
Sources: Stich, Local SGD, arXiv 1805.09767; Douillard et al., DiLoCo, arXiv 2311.08105, and Streaming DiLoCo, arXiv
2501.18512, algorithm 2; torch.optim.SGD for the outer arithmetic.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.schema import Config, SyncConfig
from megatron_lite.ddp.buffer import GradBuffer
from megatron_lite.ddp.data_parallel import Params
from megatron_lite.ddp.local_shard import LocalShard, Shards, State
from megatron_lite.ddp.wrap import bucket_mb
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer, Optimizer, StepOutcome
from megatron_lite.parallel.collectives import all_reduce_async
from megatron_lite.parallel.context import Group, ParallelContext, duplicate_group
from megatron_lite.parallel.shard import ParamTable


@dataclass
class PendingDrift:
    """A fragment's drift in flight: summed over dp once all waits have returned."""

    buffer: GradBuffer
    waits: list[Callable[[], object]]

    def wait(self) -> dict[str, Tensor]:
        """The sum over dp of `common - master` by parameter name."""
        while self.waits:
            self.waits.pop()()
        return self.buffer.views


def wrap(
    config: Config, inner: MixedPrecisionOptimizer, params: Params, table: ParamTable, ctx: ParallelContext
) -> "OuterOptimizer":
    """The optimizer of `sync.mode: local_sgd` and `diloco` around `inner`. Collective over dp."""
    dp = duplicate_group(ctx.dp, config.train.comm_timeout) if config.sync.delay else ctx.dp
    size = bucket_mb(config.parallel.bucket_mb, dp.size)
    return OuterOptimizer(inner, params, table, config.sync, dp, bucket_mb=size)


class OuterOptimizer(Optimizer):
    """Steps of `inner` on this rank's gradients, and outer steps on `common`, the model that all ranks of dp share.

    common    name -> like the master, and equal on all ranks of dp

    Of F fragments one synchronizes at the end of every (H/F)-th iteration, the last at multiples of H; skipped steps
    count.
    """

    copies_at_save = True  # an outer step in flight changes the common model

    def __init__(
        self,
        inner: MixedPrecisionOptimizer,
        params: Params,
        table: ParamTable,
        sync: SyncConfig,
        dp: Group,
        *,
        bucket_mb: float,
    ):
        self.scaler = inner.scaler
        self.common = {name: master.clone() for name, master in inner.masters.items()}
        self._inner = inner
        self._params = params
        self._dp = dp
        self._bucket_bytes = bucket_mb * 2**20
        self._tied = {name for name in params if table[name].tied}
        self._sync = sync
        self._fragments: list[list[str]] = [[] for _ in range(sync.fragments)]
        for name in params:
            self._fragments[fragment_of(name, sync.fragments)].append(name)
        self._lr, self._momentum = (1.0, 0.0) if sync.mode == "local_sgd" else (sync.outer_lr, sync.outer_momentum)
        self._velocity = {name: torch.zeros_like(common) for name, common in self.common.items() if self._momentum}
        self._iteration = 0
        self._pending: PendingDrift | None = None

    def measure(self) -> Tensor:
        return self._inner.measure()

    def step(self, lr: float, measured: Sequence[float] | None = None) -> StepOutcome:
        """An inner step, then the outer step of a fragment that is due. The norm is of this rank's gradient: each rank
        of dp has a different one, and clips by it.

        Communicates: as the inner step; at the start of an outer step a fragment over dp.
        """
        outcome = self._inner.step(lr, measured)
        self._iteration += 1
        if fragment := self._due(self._iteration + self._sync.delay):
            self._start_sum(fragment)
        if self._pending is not None and self._due(self._iteration):
            self._outer_step(self._pending.wait())
            self._pending = None
        return outcome

    @property
    def step_count(self) -> int:
        return self._inner.step_count

    def weights(self) -> Shards:
        """The common model."""
        return {name: LocalShard(common.to(self._params[name].dtype)) for name, common in self.common.items()}

    def state(self) -> State:
        """The inner state, local to each rank of dp, and the replicated state of outer steps. Waits for drift in
        flight; the outer step still applies it in its iteration."""
        drift = self._pending.wait() if self._pending is not None else {}
        state: State = {}
        for name, kinds in self._inner.state().items():
            local = {kind: shard.values for kind, shard in kinds.items()} | {"master": self._inner.masters[name]}
            state[name] = {kind: LocalShard(values, across_dp="local") for kind, values in local.items()}
            if self.common[name].dtype != self._params[name].dtype:
                state[name]["common"] = LocalShard(self.common[name])
            if self._velocity:
                state[name]["outer_momentum"] = LocalShard(self._velocity[name])
            if self._sync.delay:
                state[name]["drift"] = LocalShard(drift[name] if name in drift else torch.zeros_like(self.common[name]))
        return state

    @torch.no_grad()
    def load(self, weights: Shards, state: State, steps: int, iteration: int) -> None:
        self._inner.load(weights, state, steps, iteration)
        for name, common in self.common.items():
            if "common" not in state.get(name, {}):
                common.copy_(weights[name].values)
        self._iteration = iteration
        self._pending = None
        later = range(iteration + 1, iteration + 1 + self._sync.delay)
        if state and (names := [name for number in later for name in self._due(number)]):
            self._pending = PendingDrift(self._buffer(names), [])
            for name, drift in self._pending.buffer.views.items():
                drift.copy_(state[name]["drift"].values)

    def bytes_held(self) -> dict[str, int]:
        counts = self._inner.bytes_held()
        counts["optimizer"] += sum(tensor.nbytes for tensor in (*self.common.values(), *self._velocity.values()))
        counts["buckets"] = self._pending.buffer.flat.nbytes if self._pending is not None else 0
        return counts

    @contextmanager
    def common_model(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the common model and the masters; a second call undoes the first."""
        for name, master in self._inner.masters.items():
            copy = master.clone()
            master.copy_(self.common[name])
            self.common[name].copy_(copy)
        self._inner.publish_masters()

    def _due(self, iteration: int) -> list[str]:
        """The parameters of the fragment that synchronizes at the end of this iteration."""
        number, remainder = divmod(iteration, self._sync.interval // self._sync.fragments)
        return [] if remainder else self._fragments[(number - 1) % self._sync.fragments]

    def _buffer(self, names: list[str]) -> GradBuffer:
        # A tied embedding has its own bucket on both of its stages, so that both compute the same bits.
        params, dtype = {name: self._params[name] for name in names}, self.common[names[0]].dtype
        return GradBuffer(params, bucket_bytes=self._bucket_bytes, dtype=dtype, alone=self._tied)

    @torch.no_grad()
    def _start_sum(self, names: list[str]) -> None:
        """Start to sum the drift of these parameters over dp."""
        buffer = self._buffer(names)
        for name, drift in buffer.views.items():
            torch.sub(self.common[name], self._inner.masters[name], out=drift)
        self._pending = PendingDrift(buffer, [all_reduce_async(bucket.flat, self._dp)[1] for bucket in buffer.buckets])

    @torch.no_grad()
    def _outer_step(self, total: dict[str, Tensor]) -> None:
        """The step of torch.optim.SGD on the common model; then this rank continues from it. Modifies the sums."""
        for name, drift in total.items():
            drift.div_(self._dp.size)
            if self._momentum:
                velocity = self._velocity[name].mul_(self._momentum).add_(drift)
                drift = drift.add_(velocity, alpha=self._momentum) if self._sync.outer_nesterov else velocity
            common, master = self.common[name].sub_(drift, alpha=self._lr), self._inner.masters[name]
            if self._sync.delay:
                master.mul_(self._sync.mix).add_(common, alpha=1.0 - self._sync.mix)
            else:
                master.copy_(common)
        self._inner.publish_masters()


def fragment_of(name: str, fragments: int) -> int:
    """The fragment of a parameter. Layers go to the fragments in turn, so that every pipeline stage has a part of each;
    other parameters go to the first, such as an embedding and its tied copy."""
    layer = re.search(r"\.(\d+)\.", name)
    return int(layer[1]) % fragments if layer else 0
