"""Loss scaling: keep fp16 gradients inside fp16's range, where anything under 6e-8 is zero.

The loss is multiplied by `scale` before backward and the gradients divided by it after. The scale doubles after
`growth_interval` clean steps in a row and halves when gradients overflow. `hysteresis` forgives the first
overflows, but once they are used up every further one halves the scale, until a whole clean interval has passed:
Megatron-LM's rule, which falls fast when a run is in trouble.
Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2; Megatron-LM, grad_scaler.py.
"""

from typing import Protocol

from megatron_lite.config.schema import OptimConfig


class LossScaler(Protocol):
    """All ranks hold the same scale because all call `update` with the same, agreed, overflow."""

    scale: float

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale can still help against an overflow."""
        ...

    def update(self, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class ConstantScaler:
    """A scale of one: bf16, fp32 and fp64 reach far below and above any gradient."""

    scale = 1.0
    can_shrink = False

    def update(self, overflow: bool) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


class DynamicLossScaler:
    """The largest scale, by powers of two, under which gradients do not overflow."""

    def __init__(self, initial_scale: float, *, min_scale: float, growth_interval: int, hysteresis: int):
        self.scale = initial_scale
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.clean_steps = 0
        self.overflows_left = hysteresis

    @property
    def can_shrink(self) -> bool:
        return self.scale > self.min_scale

    def update(self, overflow: bool) -> None:
        """After every step, skipped or not."""
        if overflow:
            self.clean_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale / 2, self.min_scale)
        else:
            self.clean_steps += 1
            if self.clean_steps == self.growth_interval:
                self.clean_steps = 0
                self.overflows_left = self.hysteresis
                self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "clean_steps": self.clean_steps, "overflows_left": self.overflows_left}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self.clean_steps = int(state["clean_steps"])
        self.overflows_left = int(state["overflows_left"])


def build_scaler(optim: OptimConfig, precision: str) -> LossScaler:
    """The scaler of `train.precision`."""
    if precision != "fp16":
        return ConstantScaler()
    return DynamicLossScaler(
        optim.initial_loss_scale,
        min_scale=optim.min_loss_scale,
        growth_interval=optim.loss_scale_window,
        hysteresis=optim.hysteresis,
    )
