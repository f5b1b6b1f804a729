"""AdamW on fp32 masters: what turns summed gradients into new weights, or leaves everything alone.

bf16 keeps 8 bits of a weight, and an update is often smaller than the last of them, so low-precision weights are
rounded copies of fp32 masters; fp32 and fp64 weights are their own masters. A step whose gradients are not finite
changes nothing, on any rank: no weight, master, moment or step count.
Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.1; AdamW: arXiv 1711.05101.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import OptimConfig
from megatron_lite.ddp.wrap import DataParallel
from megatron_lite.errors import CheckpointError
from megatron_lite.optim.clip import clip_coefficient, global_grad_norm
from megatron_lite.optim.param_groups import decay_groups
from megatron_lite.optim.scaler import LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepOutcome:
    """What a step did. All ranks skip or none does, and the norm is finite on all or on none.

    A norm that is not finite in a step that was not skipped: something is wrong that no loss scale mends.
    Then, too, nothing was changed; what follows is for the training loop to decide.
    """

    grad_norm: float  # L2 over the whole model, without loss scale, before clipping; inf or nan if any gradient is
    skipped: bool  # an overflow that a smaller loss scale may mend; nothing was changed


class MixedPrecisionOptimizer:
    """AdamW over this rank's parameters, with the masters, moments and gradients in the dtype of `main_grads`.

    One fused call for each group, tensor by tensor: about as fast as a single flat tensor would be, and every
    piece of state keeps its parameter's name and shape. The gradients are scaled in a pass of their own, which costs
    what folding the factor into the fused kernel does and is exact in fp64, where that factor would be rounded.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        table: ParamTable,
        ddp: DataParallel,
        scaler: LossScaler,
        optim: OptimConfig,
        ctx: ParallelContext,
    ):
        self.scaler = scaler
        self._params = params
        self._table = table
        self._ddp = ddp
        self._clip_grad = optim.clip_grad
        self._ctx = ctx
        self._masters: dict[str, Tensor] = {
            name: parameter.detach().float() if _is_low_precision(parameter) else parameter
            for name, parameter in params.items()
        }
        self._low = [name for name, parameter in params.items() if _is_low_precision(parameter)]
        self._adam = torch.optim.AdamW(
            decay_groups(self._masters, table, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )
        for master in self._masters.values():
            # What AdamW would make in its first step, so that there is a state to save before it.
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                **{moment: torch.zeros_like(master) for moment in MOMENTS},
            }

    def step(self, lr: float) -> StepOutcome:
        """One AdamW step at this rate on `ddp.main_grads`, which hold scaled sums and are used up.

        Collective over the world: see `global_grad_norm`.
        """
        grads = self._ddp.main_grads
        scale = self.scaler.scale
        grad_norm = global_grad_norm(grads, self._table, self._ctx) / scale
        overflow = not math.isfinite(grad_norm)
        skipped = overflow and self.scaler.can_shrink
        self.scaler.update(overflow)
        if not overflow:
            self._apply(grads, lr, clip_coefficient(grad_norm, self._clip_grad) / scale)
        return StepOutcome(grad_norm, skipped)

    @torch.no_grad()
    def _apply(self, grads: dict[str, Tensor], lr: float, factor: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(list(grads.values()), factor)  # pyright: ignore[reportPrivateImportUsage]
        for name, master in self._masters.items():
            master.grad = grads[name]
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        for master in self._masters.values():
            master.grad = None  # it would keep the memory of gradients that the engine drops
        self._copy_masters_to_params()

    def _copy_masters_to_params(self) -> None:
        if self._low:
            params = [self._params[name].detach() for name in self._low]
            masters = [self._masters[name] for name in self._low]
            torch._foreach_copy_(params, masters)  # pyright: ignore[reportPrivateImportUsage]

    @property
    def step_count(self) -> int:
        """Steps taken, without the skipped ones."""
        return int(next(iter(self._adam.state.values()))["step"].item())

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """By parameter name, what a resumed run needs beyond the parameter: moments, and the master if it has one.

        The tensors themselves, not copies: shapes of this rank, dtype of the masters.
        """
        state = {}
        for name, master in self._masters.items():
            state[name] = {moment: self._adam.state[master][moment] for moment in MOMENTS}
            if name in self._low:
                state[name]["master"] = master
        return state

    def load_state_tensors(self, state: dict[str, dict[str, Tensor]], step_count: int) -> None:
        """The inverse of `state_tensors` and `step_count`; low-precision parameters become their masters, rounded."""
        for name, own in self.state_tensors().items():
            for kind, tensor in own.items():
                _copy_exactly(tensor, state.get(name, {}).get(kind), f"optimizer state {kind} of {name}")
        for values in self._adam.state.values():
            values["step"].fill_(step_count)
        self._copy_masters_to_params()


def _is_low_precision(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16)


def _copy_exactly(target: Tensor, saved: Tensor | None, what: str) -> None:
    wanted = f"{list(target.shape)} {target.dtype}"
    if saved is None:
        raise CheckpointError(
            f"the checkpoint has no {what}; this run needs {wanted}. Was it saved under the same train.precision?"
        )
    if saved.shape != target.shape or saved.dtype != target.dtype:
        raise CheckpointError(
            f"{what} is {list(saved.shape)} {saved.dtype} in the checkpoint, this run needs {wanted}. "
            "Load it with the layout and train.precision that it was saved with"
        )
    target.copy_(saved)
