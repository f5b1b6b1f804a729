"""optim/mixed_precision.py in one process: steps, skipped steps, and state that is saved and restored."""

import math

import pytest
import torch
from torch import Tensor

from megatron_lite.config.schema import OptimConfig
from megatron_lite.ddp.local import LocalDDP
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer, StepOutcome
from megatron_lite.optim.scaler import DynamicLossScaler, LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from tests.helpers.toy import TABLE, ToyModel

CTX = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=10)
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Training:
    """The toy model, its engine and its optimizer."""

    def __init__(self, dtype: torch.dtype, optim: OptimConfig = OPTIM, scaler: LossScaler | None = None):
        self.model = ToyModel(CTX, dtype)
        self.params = self.model.named()
        grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.ddp = LocalDDP([self.model], self.params, TABLE, CTX.dp, bucket_mb=25.0, grad_dtype=grad_dtype)
        self.scaler = scaler or LossScaler()
        self.optimizer = MixedPrecisionOptimizer(TABLE, self.ddp, self.scaler, optim, CTX)

    def step(self, number: int, lr: float = 1e-2, spoil: float | None = None) -> StepOutcome:
        self.ddp.zero_grad()
        self.ddp.begin_backward(0, is_last=True)
        self.ddp.module(0)([number, number + 1], strength=0.1 * self.scaler.scale).backward()
        self.ddp.finish_grad_sync()
        if spoil is not None:
            self.ddp.main_grads["norm.weight"][2] = spoil
        return self.optimizer.step(lr)

    def load_from(self, other: "Training") -> None:
        """Copy the weights and state of `other` into this one's tensors, as a checkpoint does."""
        weights, state = self.optimizer.weights(), self.optimizer.state()
        for name, shard in other.optimizer.weights().items():
            weights[name].values.copy_(shard.values)
            for kind, saved in other.optimizer.state()[name].items():
                state[name][kind].values.copy_(saved.values)
        self.optimizer.load(weights, state, other.optimizer.step_count, other.optimizer.step_count)

    def everything(self) -> dict[str, Tensor]:
        """A copy of all that a step may change, apart from the scaler."""
        state = {
            f"{name} {kind}": shard.values
            for name, kinds in self.optimizer.state().items()
            for kind, shard in kinds.items()
        }
        state |= {f"{name} parameter": parameter.detach() for name, parameter in self.params.items()}
        state["steps"] = torch.tensor(self.optimizer.step_count)
        return {name: tensor.clone() for name, tensor in state.items()}


def dynamic(initial: float = 1024.0) -> DynamicLossScaler:
    return DynamicLossScaler(initial, min_scale=1.0, growth_interval=2, hysteresis=1)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_torch_adamw_with_clipping(dtype):
    """The reference is the unfused AdamW with torch's clip; they differ by rounding, a few last places in a step."""
    training, plain = Training(dtype), ToyModel(CTX, dtype)
    decayed = [p for name, p in plain.named().items() if TABLE[name].decay]
    others = [p for name, p in plain.named().items() if not TABLE[name].decay]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], fused=False, foreach=False
    )
    for number, lr in enumerate([0.0, 1e-2, 5e-3, 2e-2]):
        outcome = training.step(number, lr)
        adam.zero_grad()
        plain([number, number + 1], strength=0.1).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert norm > 0.5, "this step would not be clipped"
        assert outcome == StepOutcome(pytest.approx(norm.item(), rel=1e-6), skipped=False)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    for name, parameter in plain.named().items():
        torch.testing.assert_close(training.params[name], parameter, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_rounded_copies_of_masters(dtype):
    """Updates far below the last bit of a weight would be lost without a master; here ten of them move it."""
    training = Training(dtype, OPTIM.model_copy(update={"weight_decay": 0.0}))
    start = training.everything()
    for _ in range(10):
        training.step(0, lr=1e-6)
    end = training.everything()
    for name in TABLE:
        assert end[f"{name} master"].dtype == torch.float32
        assert torch.equal(end[f"{name} parameter"], end[f"{name} master"].to(dtype))
        moved = (end[f"{name} master"] - start[f"{name} master"]).abs()
        assert (moved > 5e-6).all() and (moved < 1.1e-5).all()


def test_a_loss_scale_changes_no_bit_of_a_step():
    """The scale is a power of two, and the norm and clipping use the unscaled gradient."""
    scaled, plain = Training(torch.float32, scaler=dynamic(2.0**13)), Training(torch.float32)
    for number in range(3):
        assert scaled.step(number) == plain.step(number)
    assert_same(scaled.everything(), plain.everything())


@pytest.mark.parametrize("spoil", [math.inf, math.nan])
def test_an_overflow_skips_the_step_and_halves_the_scale(spoil):
    """An applied inf or nan would destroy every weight."""
    training = Training(torch.float16, scaler=dynamic())
    training.step(0)
    before = training.everything()
    outcome = training.step(1, spoil=spoil)
    assert outcome.skipped and not math.isfinite(outcome.grad_norm)
    assert training.scaler.scale == 512
    assert_same(training.everything(), before)
    assert not training.step(1).skipped and training.optimizer.step_count == 2


@pytest.mark.parametrize("scaler", [None, DynamicLossScaler(1.0, min_scale=1.0, growth_interval=9, hysteresis=1)])
def test_a_bad_gradient_that_no_smaller_loss_scale_can_fix_is_reported_and_not_applied(scaler):
    """Training could skip such steps forever; an applied gradient would destroy every weight."""
    training = Training(torch.float32, scaler=scaler)
    training.step(0)
    before = training.everything()
    outcome = training.step(1, spoil=math.nan)
    assert math.isnan(outcome.grad_norm) and not outcome.skipped
    assert_same(training.everything(), before)


@pytest.mark.parametrize(
    ("precision", "after_skip"), [("fp32", False), ("bf16", False), ("fp64", False), ("fp16", False), ("fp16", True)]
)
def test_a_restored_optimizer_continues_bit_for_bit(precision, after_skip):
    """A lost moment, master or step count would change the run after every resume."""
    dtype = PRECISIONS[precision]
    first, restored = (Training(dtype, scaler=dynamic() if precision == "fp16" else None) for _ in range(2))
    for number in range(3):
        first.step(number)
    if after_skip:
        assert first.step(3, spoil=math.inf).skipped
    restored.load_from(first)
    restored.scaler.load_state_dict(first.scaler.state_dict())
    for number in range(4, 7):
        assert restored.step(number) == first.step(number)
    assert_same(restored.everything(), first.everything())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_engine_keeps_gradients_after_a_step(dtype):
    """Any other reference would keep the gradients in memory during the next forward."""
    training = Training(dtype)
    training.step(0)
    assert all(parameter.grad is None for parameter in training.params.values())
    for kinds in training.optimizer.state().values():
        assert all(shard.values.grad is None for shard in kinds.values())


def test_state_before_the_first_step_can_be_saved_and_restored():
    """torch's AdamW allocates its state in the first step only."""
    first, restored = Training(torch.bfloat16), Training(torch.bfloat16)
    restored.load_from(first)
    assert first.optimizer.step_count == 0
    assert first.step(0) == restored.step(0)
    assert_same(restored.everything(), first.everything())


def test_a_norm_above_the_range_of_fp32_is_reported_without_an_error():
    """Each gradient fits into fp32, and the factor of clipping does not."""
    training = Training(torch.float32)
    training.step(0)
    training.ddp.main_grads["norm.weight"][1:3] = 3e38
    outcome = training.optimizer.step(1e-2)
    assert 4.2e38 < outcome.grad_norm < 4.3e38
    assert all(values.isfinite().all() for values in training.everything().values())
