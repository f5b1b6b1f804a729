"""Loss scaling: keep fp16 gradients inside fp16's range, where anything under 6e-8 is zero.

The loss is multiplied by `scale` before backward, and the gradients are divided by it after. The scale doubles after
`growth_interval` clean steps in a row and halves when gradients overflow. `hysteresis` tolerates the first overflows;
then each one halves the scale until a full clean interval has passed. This is Megatron-LM's rule.
Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2; Megatron-LM, grad_scaler.py.
"""

from megatron_lite.config.schema import OptimConfig


class LossScaler:
    """A constant scale of one: bf16, fp32 and fp64 reach far below and above any gradient.

    All ranks have the same scale, because all call `update` after every step with the same overflow.
    """

    scale = 1.0
    can_shrink = False  # whether a smaller scale can still help against an overflow

    def update(self, overflow: bool) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


class DynamicLossScaler(LossScaler):
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
        return LossScaler()
    return DynamicLossScaler(
        optim.initial_loss_scale,
        min_scale=optim.min_loss_scale,
        growth_interval=optim.loss_scale_window,
        hysteresis=optim.hysteresis,
    )
