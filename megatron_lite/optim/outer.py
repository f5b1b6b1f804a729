"""Local SGD and DiLoCo: data-parallel ranks step on their own, and meet every H iterations in a common model.

How far the ranks have drifted from the common model, in the mean, is the gradient of an outer SGD step that moves it;
from there they go on. With outer rate 1 and no momentum it goes to the mean of their weights: local SGD. What travels
between ranks falls to an H-th.

Streaming DiLoCo spreads this over the H iterations: the model is cut into fragments, which meet in turn. And with a
delay the ranks step on while the mean is on its way. What a rank does meanwhile is not in it, so the rank keeps a part
of its own weights: mix * own + (1 - mix) * common.

How old can what a rank knows of the others get? A meeting at the end of iteration t brings their steps up to t - delay,
and until the end of iteration t + H no other comes: that one lacks the H + delay - 1 iterations before it. So a step is
in the weights that other ranks use at most H + delay iterations later; it is 1 where every gradient is summed.
Sources: Stich, Local SGD, arXiv 1805.09767; Douillard et al., DiLoCo, arXiv 2311.08105, and Streaming DiLoCo, arXiv
2501.18512, algorithm 2; torch.optim.SGD for the outer arithmetic.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import SyncConfig
from megatron_lite.ddp.buffer import GradBuffer
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer, StepOutcome
from megatron_lite.parallel.collectives import all_reduce_async
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamTable


@dataclass
class Meeting:
    """A fragment's drift on its way: summed over dp once all waits have returned."""

    buffer: GradBuffer
    waits: list[Callable[[], object]]

    def drift(self) -> dict[str, Tensor]:
        """By parameter name, the sum over dp of `common - master`."""
        while self.waits:
            self.waits.pop()()
        return self.buffer.views


class OuterOptimizer:
    """Steps of `inner`, which sees this rank's gradients alone, and outer steps on `common`, the model all ranks share.

    common    name -> like the master, and equal on all ranks of dp

    Of F fragments one meets at the end of every (H/F)-th iteration, the last at multiples of H; skipped steps count.
    """

    copies_at_save = True  # an outer step in flight changes the common model

    def __init__(
        self,
        inner: MixedPrecisionOptimizer,
        params: dict[str, nn.Parameter],
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
        self._meeting: Meeting | None = None

    def step(self, lr: float) -> StepOutcome:
        """An inner step, then what is due of an outer one. The norm is of this rank's own gradient: each rank of dp
        has another, and clips by it.

        Communicates: as the inner step; now and then a fragment over dp.
        """
        outcome = self._inner.step(lr)
        self._iteration += 1
        if fragment := self._due(self._iteration + self._sync.delay):
            self._set_out(fragment)
        if self._meeting is not None and self._due(self._iteration):
            self._arrive(self._meeting.drift())
            self._meeting = None
        return outcome

    def skip(self) -> StepOutcome:
        raise AssertionError("the config refuses faults.spike_factor where ranks step on their own")

    @property
    def step_count(self) -> int:
        return self._inner.step_count

    def weights(self) -> dict[str, LocalShard]:
        """The common model."""
        return {name: LocalShard(common.to(self._params[name].dtype)) for name, common in self.common.items()}

    def state(self) -> dict[str, dict[str, LocalShard]]:
        """The inner optimizer's, which each rank of dp has for itself, and of the common model what `weights` do not
        say. Drift that is on its way is waited for: it comes in as late as if nobody had."""
        drift = self._meeting.drift() if self._meeting is not None else {}
        state: dict[str, dict[str, LocalShard]] = {}
        for name, kinds in self._inner.state().items():
            own = {kind: held.values for kind, held in kinds.items()} | {"master": self._inner.masters[name]}
            same: dict[str, Tensor] = {}
            if self.common[name].dtype != self._params[name].dtype:
                same["common"] = self.common[name]
            if self._velocity:
                same["outer_momentum"] = self._velocity[name]
            if self._sync.delay:
                same["drift"] = drift[name] if name in drift else torch.zeros_like(self.common[name])
            state[name] = {kind: LocalShard(values, across_dp="local") for kind, values in own.items()}
            state[name] |= {kind: LocalShard(values) for kind, values in same.items()}
        return state

    @torch.no_grad()
    def load(
        self, weights: dict[str, LocalShard], state: dict[str, dict[str, LocalShard]], steps: int, iteration: int
    ) -> None:
        self._inner.load(weights, state, steps, iteration)
        for name, common in self.common.items():
            if "common" not in state.get(name, {}):
                common.copy_(weights[name].values)
        self._iteration = iteration
        self._meeting = None
        coming = range(iteration + 1, iteration + 1 + self._sync.delay)
        if state and (names := [name for meeting in coming for name in self._due(meeting)]):
            self._meeting = Meeting(self._buffer(names), [])
            for name, drift in self._meeting.buffer.views.items():
                drift.copy_(state[name]["drift"].values)

    def bytes_held(self) -> dict[str, int]:
        held = self._inner.bytes_held()
        held["optimizer"] += sum(tensor.nbytes for tensor in (*self.common.values(), *self._velocity.values()))
        held["buckets"] = self._meeting.buffer.flat.nbytes if self._meeting is not None else 0
        return held

    @contextmanager
    def common_model(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swaps the common model and the masters; a second call undoes the first."""
        for name, master in self._inner.masters.items():
            aside = master.clone()
            master.copy_(self.common[name])
            self.common[name].copy_(aside)
        self._inner.publish_masters()

    def _due(self, iteration: int) -> list[str]:
        """The fragment that meets at the end of this iteration."""
        number, others = divmod(iteration, self._sync.interval // self._sync.fragments)
        return [] if others else self._fragments[(number - 1) % self._sync.fragments]

    def _buffer(self, names: list[str]) -> GradBuffer:
        # The same buckets on both stages that hold a tied embedding, so that the sums have the same bits.
        return GradBuffer(
            {name: self._params[name] for name in names},
            bucket_bytes=self._bucket_bytes,
            dtype=self.common[names[0]].dtype,
            alone=self._tied,
        )

    @torch.no_grad()
    def _set_out(self, names: list[str]) -> None:
        """Starts to sum over dp how far each rank has drifted from the common model."""
        buffer = self._buffer(names)
        for name, drift in buffer.views.items():
            torch.sub(self.common[name], self._inner.masters[name], out=drift)
        self._meeting = Meeting(buffer, [all_reduce_async(bucket.flat, self._dp)[1] for bucket in buffer.buckets])

    @torch.no_grad()
    def _arrive(self, total: dict[str, Tensor]) -> None:
        """The outer step, as torch.optim.SGD does it, and on from there; uses the sums up."""
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
    """Layers are dealt out in turn, so that every pipeline stage has a part of each fragment; what is in no layer goes
    to the first, an embedding and its tied copy for one."""
    layer = re.search(r"\.(\d+)\.", name)
    return int(layer[1]) % fragments if layer else 0
