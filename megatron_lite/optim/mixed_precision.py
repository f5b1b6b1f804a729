"""AdamW on fp32 masters, and the interface of every optimizer.

bf16 keeps 8 bits of a weight, and an update is often smaller than the last of them, so low-precision weights are
rounded copies of fp32 masters; fp32 and fp64 weights are their own masters. A step whose gradients are not finite
changes nothing on any rank: no weight, master, moment or step count.
Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.1; AdamW: arXiv 1711.05101.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.config.schema import OptimConfig
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.local_shard import Shards, State
from megatron_lite.optim.clip import clip_coefficient, grad_sums, norm_of
from megatron_lite.optim.param_groups import MOMENTS, allocate_moments, build_adam
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.parallel.waiting import read


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step. All ranks skip or none does, and the norm is finite on all or on none.

    A norm that is not finite, in a step that was not skipped, is an error that no smaller loss scale can fix. That step
    also changed nothing, and the training loop decides what to do.
    """

    grad_norm: float  # L2 over the full model, without loss scale, before clipping; inf or nan if any gradient is
    skipped: bool  # nothing was changed: an overflow that a smaller loss scale may fix, or no gradient yet


class Optimizer(Protocol):
    """The interface that every optimizer offers to training and to checkpoints."""

    scaler: LossScaler

    @property
    def step_count(self) -> int:
        """Steps taken, without the skipped ones."""
        ...

    copies_at_save: bool
    """See DataParallel.copies_at_save."""

    def common_model(self) -> AbstractContextManager[None]:
        """A context in which the parameters are those of a checkpoint; under local SGD each rank's own ones differ."""
        return nullcontext()

    def measure(self) -> Tensor:
        """Values for `step` in fp64 on the device, the gradients' squared norm first; none where `step` measures."""
        return torch.empty(0, dtype=torch.float64)

    def step(self, lr: float, measured: Sequence[float] | None = None) -> StepOutcome:
        """One step at this rate on the gradients of the global batch, with the values of `measure` if the caller has
        read them. Collective over the world."""
        ...

    def skip(self, measured: Sequence[float] | None = None) -> StepOutcome:
        """The outcome, with the norm of the gradients, of a step that changes nothing. Arguments as of `step`."""
        raise AssertionError(f"{type(self).__name__} cannot skip a step; the config forbids faults.spike_factor")

    def weights(self) -> Shards:
        """The weights of a checkpoint, in the dtype of `train.precision`."""
        ...

    def state(self) -> State:
        """The tensors that a resumed run needs beyond the weights: moments, and fp32 masters of low-precision
        weights."""
        ...

    def load(self, weights: Shards, state: State, steps: int, iteration: int) -> None:
        """Resume from the tensors of `weights` and `state`, which were filled with those of a run that had taken this
        many steps in this many iterations. With an empty state, start from the weights at step 0."""

    def bytes_held(self) -> dict[str, int]:
        """Bytes of live tensors on this rank: parameters, gradients, optimizer, buckets."""
        ...


class MixedPrecisionOptimizer(Optimizer):
    """AdamW over the parameters or ranges that this rank owns; masters and moments have the dtype of `main_grads`.

    A fused call for each group updates tensor by tensor. It is about as fast as on a single flat tensor, and the state
    keeps the name and shape of its parameter. The same kernel clips and removes the loss scale. In fp64 a separate pass
    does both, because the kernel's factor is fp32.

    Where the ranks of dp own different ranges, this is the distributed optimizer (ZeRO-1).
    """

    def __init__(
        self, table: ParamTable, ddp: DataParallel, scaler: LossScaler, optim: OptimConfig, ctx: ParallelContext
    ):
        self.scaler = scaler
        self.masters = {  # weights of low precision in fp32, others themselves
            name: shard.values.to(torch.promote_types(shard.values.dtype, torch.float32))
            for name, shard in ddp.owned.items()
        }
        self._steps = 0
        self.copies_at_save = ddp.copies_at_save
        self._table = table
        self._ddp = ddp
        self._clip_grad = optim.clip_grad
        self._ctx = ctx
        self._adam = build_adam(self.masters, table, optim)
        allocate_moments(self._adam, self.masters.values())

    def measure(self) -> Tensor:
        """The values of `grad_sums`; none before the first gradients. Collective over the world."""
        if not self._ddp.has_grads:
            return torch.empty(0, dtype=torch.float64, device=self._ctx.device)
        options = {"starts": {name: shard.start for name, shard in self._ddp.owned.items()}}
        return grad_sums(self._ddp.main_grads, self._table, self._ctx, num_copies=self._ddp.num_copies, **options)

    def step(self, lr: float, measured: Sequence[float] | None = None) -> StepOutcome:
        """One AdamW step at this rate on `ddp.main_grads`, which hold scaled sums and are modified.

        The first steps of delayed gradients have none and change nothing.
        Collective over the world: see `grad_sums`.
        """
        if not self._ddp.has_grads:
            return StepOutcome(0.0, skipped=True)
        scale = self.scaler.scale
        grad_norm = self._grad_norm(measured)
        overflow = not math.isfinite(grad_norm)
        skipped = overflow and self.scaler.can_shrink
        self.scaler.update(overflow)
        if not overflow:
            self._apply(self._ddp.main_grads, lr, clip_coefficient(grad_norm, self._clip_grad) / scale)
        return StepOutcome(grad_norm, skipped)

    def skip(self, measured: Sequence[float] | None = None) -> StepOutcome:
        return StepOutcome(self._grad_norm(measured), skipped=True)

    def _grad_norm(self, measured: Sequence[float] | None) -> float:
        """The norm of the gradients without their loss scale."""
        sums = read(self.measure(), "the gradient norm", self._ctx.world) if measured is None else measured
        return norm_of(sums) / self.scaler.scale if sums else 0.0

    @torch.no_grad()
    def _apply(self, grads: dict[str, Tensor], lr: float, factor: float) -> None:
        divisor = None
        if factor != 1.0 and self._ddp.weight_dtype == torch.float64:
            torch._foreach_mul_(list(grads.values()), factor)  # pyright: ignore[reportPrivateImportUsage]
        elif factor != 1.0:
            largest = torch.finfo(torch.float32).max  # the norm is fp64
            divisor = torch.full((), min(1 / factor, largest), dtype=torch.float32, device=self._ctx.device)
        # The fused kernel divides gradients by this attribute, which GradScaler also sets.
        self._adam.grad_scale = divisor  # type: ignore[attr-defined]
        for name, master in self.masters.items():
            master.grad = grads[name]
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        for master in self.masters.values():
            master.grad = None  # it would keep the memory of gradients that the engine drops
        self._steps += 1
        self.publish_masters()

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Round the masters into the parameters; where they are sharded, start to gather them."""
        owned = self._ddp.owned
        low = [name for name, master in self.masters.items() if master is not owned[name].values]
        if low:
            values, masters = [owned[name].values for name in low], [self.masters[name] for name in low]
            torch._foreach_copy_(values, masters)  # pyright: ignore[reportPrivateImportUsage]
        self._ddp.gather_params()

    @property
    def step_count(self) -> int:
        return self._steps

    def weights(self) -> Shards:
        return self._ddp.weights()

    def state(self) -> State:
        """Live tensors of the shapes that this rank owns, in the dtype of the masters."""
        state: State = {}
        low = self._ddp.weight_dtype.itemsize < torch.float32.itemsize
        pending = self._ddp.pending_grads()
        for name, master in self.masters.items():
            kinds = {moment: self._adam.state[master][moment] for moment in MOMENTS}
            if low:
                kinds["master"] = master
            for age, grads in enumerate(pending):
                kinds[f"held_back_{age}"] = grads[name]  # the name in checkpoints
            state[name] = {kind: replace(self._ddp.owned[name], values=tensor) for kind, tensor in kinds.items()}
        return state

    @torch.no_grad()
    def load(self, weights: Shards, state: State, steps: int, iteration: int) -> None:
        for name, master in self.masters.items():
            if "master" not in state.get(name, {}):
                offset = self._ddp.owned[name].start - weights[name].start
                values = weights[name].values.reshape(-1)[offset : offset + master.numel()]
                master.copy_(values.view_as(master))
        for values in self._adam.state.values():
            values["step"].fill_(steps)
        self._steps = steps
        self._ddp.resume_pending_grads(iteration)
        self.publish_masters()

    def bytes_held(self) -> dict[str, int]:
        moments = [tensor for values in self._adam.state.values() for tensor in values.values()]
        return count_bytes(
            {
                "parameters": self._ddp.weight_memory(),
                "gradients": self._ddp.grad_memory(),
                "optimizer": [*self.masters.values(), *moments],
            }
        )


def count_bytes(tensors: dict[str, list[Tensor]]) -> dict[str, int]:
    """Bytes of the memory behind each list of tensors; memory in several lists counts once, for the first."""
    seen: set[int] = set()
    counts = dict.fromkeys(tensors, 0)
    for key, listed in tensors.items():
        for storage in (tensor.untyped_storage() for tensor in listed):
            if storage._cdata not in seen:  # on the meta device all addresses are 0
                seen.add(storage._cdata)
                counts[key] += storage.nbytes()
    return counts
