"""AdamW on fp32 masters: what turns summed gradients into new weights, or leaves everything alone.

bf16 keeps 8 bits of a weight, and an update is often smaller than the last of them, so low-precision weights are
rounded copies of fp32 masters; fp32 and fp64 weights are their own masters. A step whose gradients are not finite
changes nothing, on any rank: no weight, master, moment or step count.
Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.1; AdamW: arXiv 1711.05101.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.config.schema import OptimConfig
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.optim.clip import clip_coefficient, global_grad_norm
from megatron_lite.optim.param_groups import MOMENTS, allocate_moments, build_adam
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable


@dataclass(frozen=True)
class StepOutcome:
    """What a step did. All ranks skip or none does, and the norm is finite on all or on none.

    A norm that is not finite in a step that was not skipped: something is wrong that no loss scale mends.
    Then, too, nothing was changed; what follows is for the training loop to decide.
    """

    grad_norm: float  # L2 over the whole model, without loss scale, before clipping; inf or nan if any gradient is
    skipped: bool  # nothing was changed: an overflow that a smaller loss scale may mend, or no gradient yet


class Optimizer(Protocol):
    """What training asks of an optimizer, and a checkpoint of its state."""

    scaler: LossScaler

    @property
    def copies_at_save(self) -> bool:
        """See DataParallel.copies_at_save."""
        ...

    def common_model(self) -> AbstractContextManager[None]:
        """Inside, the parameters are those of a checkpoint; they differ from this rank's own under local SGD."""
        ...

    def step(self, lr: float) -> StepOutcome:
        """One step at this rate on the gradients of the global batch. Collective over the world."""
        ...

    def skip(self) -> StepOutcome:
        """In place of a step: changes nothing, and gives the norm of the gradients. Collective over the world."""
        ...

    @property
    def step_count(self) -> int:
        """Steps taken, without the skipped ones."""
        ...

    def weights(self) -> dict[str, LocalShard]:
        """By parameter name, the weights as a checkpoint holds them, in the dtype of `train.precision`."""
        ...

    def state(self) -> dict[str, dict[str, LocalShard]]:
        """By parameter name and kind, what a resumed run needs beyond the weights: moments, and fp32 masters where
        the precision is lower."""
        ...

    def load(
        self, weights: dict[str, LocalShard], state: dict[str, dict[str, LocalShard]], steps: int, iteration: int
    ) -> None:
        """Goes on from what `weights` and `state` handed out, after their tensors were filled with those of a run that
        had taken this many steps in this many iterations. An empty state: from weights alone, at step 0."""
        ...

    def bytes_held(self) -> dict[str, int]:
        """Bytes of live tensors on this rank: parameters, gradients, optimizer, buckets."""
        ...


class MixedPrecisionOptimizer:
    """AdamW over what this rank owns of the parameters, with masters and moments in the dtype of `main_grads`.

    One fused call for each group, tensor by tensor: about as fast as a single flat tensor would be, and every
    piece of state keeps its parameter's name and shape. The gradients are scaled in a pass of their own, which costs
    what folding the factor into the fused kernel does and is exact in fp64, where that factor would be rounded.

    Where the ranks of dp own different runs of the parameters, this is the distributed optimizer (ZeRO-1): the same
    arithmetic on fewer numbers.
    """

    def __init__(
        self, table: ParamTable, ddp: DataParallel, scaler: LossScaler, optim: OptimConfig, ctx: ParallelContext
    ):
        self.scaler = scaler
        self.masters = {name: _master_of(held.values) for name, held in ddp.owned.items()}
        self.step_count = 0
        self._table = table
        self._ddp = ddp
        self._clip_grad = optim.clip_grad
        self._ctx = ctx
        self._adam = build_adam(self.masters, table, optim)
        allocate_moments(self._adam, self.masters.values())

    @property
    def copies_at_save(self) -> bool:
        return self._ddp.copies_at_save

    def common_model(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, lr: float) -> StepOutcome:
        """One AdamW step at this rate on `ddp.main_grads`, which hold scaled sums and are used up.

        Nothing happens as long as there are none, in the first steps of delayed gradients.
        Collective over the world: see `global_grad_norm`.
        """
        if not self._ddp.has_grads:
            return StepOutcome(0.0, skipped=True)
        grads = self._ddp.main_grads
        scale = self.scaler.scale
        grad_norm = self._grad_norm()
        overflow = not math.isfinite(grad_norm)
        skipped = overflow and self.scaler.can_shrink
        self.scaler.update(overflow)
        if not overflow:
            self._apply(grads, lr, clip_coefficient(grad_norm, self._clip_grad) / scale)
        return StepOutcome(grad_norm, skipped)

    def skip(self) -> StepOutcome:
        return StepOutcome(self._grad_norm(), skipped=True)

    def _grad_norm(self) -> float:
        """Of the gradients without their loss scale."""
        grads, is_sharded = self._ddp.main_grads, self._ddp.is_sharded
        return global_grad_norm(grads, self._table, self._ctx, shared_out=is_sharded) / self.scaler.scale

    @torch.no_grad()
    def _apply(self, grads: dict[str, Tensor], lr: float, factor: float) -> None:
        if factor != 1.0 and grads:
            torch._foreach_mul_(list(grads.values()), factor)  # pyright: ignore[reportPrivateImportUsage]
        for name, master in self.masters.items():
            master.grad = grads[name]
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        for master in self.masters.values():
            master.grad = None  # it would keep the memory of gradients that the engine drops
        self.step_count += 1
        self.publish_masters()

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Makes the parameters what the masters are, rounded; where they are shared out, starts to gather them."""
        owned = self._ddp.owned
        low = [name for name, master in self.masters.items() if master is not owned[name].values]
        if low:
            values, masters = [owned[name].values for name in low], [self.masters[name] for name in low]
            torch._foreach_copy_(values, masters)  # pyright: ignore[reportPrivateImportUsage]
        self._ddp.gather_params()

    def weights(self) -> dict[str, LocalShard]:
        return self._ddp.weights()

    def state(self) -> dict[str, dict[str, LocalShard]]:
        """The tensors themselves, not copies: of the shapes that this rank owns, in the dtype of the masters."""
        state: dict[str, dict[str, LocalShard]] = {}
        low = self._ddp.weight_dtype in (torch.bfloat16, torch.float16)
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
    def load(
        self, weights: dict[str, LocalShard], state: dict[str, dict[str, LocalShard]], steps: int, iteration: int
    ) -> None:
        for name, master in self.masters.items():
            owned = self._ddp.owned[name]
            if "master" not in state.get(name, {}):
                offset = owned.start - weights[name].start
                run = weights[name].values.reshape(-1)[offset : offset + master.numel()]
                master.copy_(run.view_as(master))
        for values in self._adam.state.values():
            values["step"].fill_(steps)
        self.step_count = steps
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
    """Bytes of the memory behind each list of tensors; memory that several share counts once, for the first."""
    seen: set[int] = set()
    counts = dict.fromkeys(tensors, 0)
    for what, held in tensors.items():
        for storage in (tensor.untyped_storage() for tensor in held):
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                counts[what] += storage.nbytes()
    return counts


def _master_of(weights: Tensor) -> Tensor:
    """Weights of low precision in fp32, others themselves."""
    return weights.float() if weights.dtype in (torch.bfloat16, torch.float16) else weights
