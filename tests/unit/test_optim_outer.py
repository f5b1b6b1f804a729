"""optim/outer.py on one rank, which meets nobody and still takes outer steps."""

import pytest
import torch
from torch import Tensor

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import OptimConfig, SyncConfig
from megatron_lite.config.sizes import state_bytes
from megatron_lite.ddp.local import LocalDDP
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer
from megatron_lite.optim.outer import OuterOptimizer, fragment_of
from megatron_lite.optim.scaler import DynamicLossScaler, LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.announce import sync_line
from tests.helpers.toy import TABLE, ToyModel

CTX = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=10)
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5)
DILOCO = SyncConfig(mode="diloco", interval=4)
NUMBERED = {name: f"layers.{number}.{name}" for number, name in enumerate(TABLE)}


class Training:
    """The toy model whose parameters are a layer each, and its optimizers."""

    def __init__(self, sync: SyncConfig, dtype: torch.dtype = torch.float32, scaler: LossScaler | None = None):
        self.model = ToyModel(CTX, dtype)
        self.params = {NUMBERED[name]: parameter for name, parameter in self.model.named().items()}
        table = {NUMBERED[name]: meta for name, meta in TABLE.items()}
        grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.ddp = LocalDDP([self.model], self.params, table, CTX.dp, bucket_mb=25.0, grad_dtype=grad_dtype)
        self.inner = MixedPrecisionOptimizer(table, self.ddp, scaler or LossScaler(), OPTIM, CTX)
        self.optimizer = OuterOptimizer(self.inner, self.params, table, sync, CTX.dp, bucket_mb=25.0)
        self.iteration = 0

    def step(self, *, spoiled: bool = False) -> None:
        self.ddp.zero_grad()
        self.ddp.begin_backward(0, is_last=True)
        self.ddp.module(0)([self.iteration], strength=0.1 * self.optimizer.scaler.scale).backward()
        self.ddp.finish_grad_sync()
        if spoiled:
            self.ddp.main_grads["layers.0.embedding.weight"][0, 0] = torch.inf
        assert self.optimizer.step(1e-2).skipped == spoiled
        self.iteration += 1

    def take_over(self, other: "Training", *, state_too: bool = True) -> None:
        """What a checkpoint does: the other's weights and state are copied into this one's tensors."""
        weights, state = self.optimizer.weights(), self.optimizer.state() if state_too else {}
        for name, held in other.optimizer.weights().items():
            weights[name].values.copy_(held.values)
        saved = other.optimizer.state()
        for name, kinds in state.items():
            assert kinds.keys() == saved[name].keys()
            for kind, held in kinds.items():
                held.values.copy_(saved[name][kind].values)
        self.iteration = other.iteration if state_too else 0
        self.optimizer.load(weights, state, other.optimizer.step_count if state_too else 0, self.iteration)

    def everything(self) -> dict[str, Tensor]:
        """A copy of all that a step may change."""
        found = {f"{name} weight": held.values for name, held in self.optimizer.weights().items()}
        for name, kinds in self.optimizer.state().items():
            found |= {f"{name} {kind}": held.values for kind, held in kinds.items()}
        found |= {f"{name} parameter": parameter.detach() for name, parameter in self.params.items()}
        return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_every_fragment_meets_once_in_an_interval_and_the_last_at_its_end():
    sync = SyncConfig(mode="diloco", interval=6, fragments=3)
    training = Training(sync)
    meetings: dict[int, list[str]] = {}
    for iteration in range(1, 13):
        before = {name: common.clone() for name, common in training.optimizer.common.items()}
        training.step()
        moved = [name for name, common in training.optimizer.common.items() if not torch.equal(common, before[name])]
        if moved:
            meetings[iteration] = moved
    dealt = [[name for name in training.params if fragment_of(name, 3) == number] for number in range(3)]
    assert all(dealt)
    assert meetings == dict(zip([2, 4, 6, 8, 10, 12], dealt * 2, strict=True))


def test_layers_are_dealt_out_and_the_rest_goes_to_the_first_fragment():
    """The two copies of a tied embedding, on two stages, must meet at once."""
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(12)]
    assert [fragment_of(name, 4) for name in names] == [0, 1, 2, 3] * 3
    rest = ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.bias"]
    assert [fragment_of(name, 4) for name in rest] == [0, 0, 0]


def test_a_skipped_step_is_an_iteration_too():
    """Ranks would else meet at different iterations than a resumed run, whose count starts from iterations."""
    scaler = DynamicLossScaler(1024.0, min_scale=1.0, growth_interval=100, hysteresis=1)
    training = Training(SyncConfig(mode="local_sgd", interval=2), scaler=scaler)
    start = {name: common.clone() for name, common in training.optimizer.common.items()}
    training.step()
    training.step(spoiled=True)
    for name, common in training.optimizer.common.items():
        assert torch.equal(common, training.params[name]) and not torch.equal(common, start[name])
    assert training.optimizer.step_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stop", [4, 6, 7])  # at a meeting's end, between, and with one under way
def test_a_resumed_run_is_the_same_to_the_bit(stop, dtype):
    sync = SyncConfig(mode="diloco", interval=8, fragments=2, delay=2)
    whole, resumed = Training(sync, dtype), Training(sync, dtype)
    for _ in range(stop):
        whole.step()
    resumed.take_over(whole)
    assert_same(resumed.everything(), whole.everything())
    for _ in range(9):
        whole.step()
        resumed.step()
    assert_same(resumed.everything(), whole.everything())


@pytest.mark.parametrize("sync", [DILOCO, SyncConfig(mode="local_sgd", interval=4)])
def test_what_is_saved_of_each_rank_and_what_once(sync):
    """What all ranks share is written once; local SGD has no momentum, and fp32 weights are the common model."""
    for dtype, low in ((torch.float32, False), (torch.bfloat16, True)):
        kinds = Training(sync, dtype).optimizer.state()["layers.0.embedding.weight"]
        own = {"exp_avg", "exp_avg_sq", "master"}
        same = {"common"} if low else set()
        same |= {"outer_momentum"} if sync is DILOCO else set()
        assert {kind for kind, held in kinds.items() if held.across_dp == "local"} == own
        assert {kind for kind, held in kinds.items() if held.across_dp == "replicated"} == same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_alone_start_the_common_model_and_the_rank_alike(dtype):
    trained, fresh = Training(DILOCO, dtype), Training(DILOCO, dtype)
    for _ in range(5):
        trained.step()
    fresh.take_over(trained, state_too=False)
    for name, held in trained.optimizer.weights().items():
        assert torch.equal(fresh.params[name], held.values)
        assert torch.equal(fresh.optimizer.common[name], held.values.to(fresh.optimizer.common[name].dtype))
        assert torch.equal(fresh.inner.masters[name], fresh.optimizer.common[name])
    assert not torch.equal(trained.params[name], fresh.params[name]), "a step after the meeting is the rank's own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_common_model_is_in_the_parameters_only_inside(dtype):
    training = Training(DILOCO, dtype)
    for _ in range(5):
        training.step()
    before = training.everything()
    with pytest.raises(KeyError), training.optimizer.common_model():
        for name, parameter in training.params.items():
            assert torch.equal(parameter, before[f"{name} weight"])
            assert not torch.equal(parameter, before[f"{name} parameter"])
        raise KeyError
    assert_same(training.everything(), before)
    with training.inner.common_model():
        assert_same(training.everything(), before)


def test_bytes_are_those_of_the_common_model_its_momentum_and_what_is_under_way():
    training = Training(SyncConfig(mode="diloco", interval=4, delay=1))
    count = sum(parameter.numel() for parameter in training.params.values())
    inner = training.inner.bytes_held()
    found = training.optimizer.bytes_held()
    expected = state_bytes(load_config(None, ["sync.mode=diloco"]), dp=1)
    assert found["optimizer"] == expected["optimizer"] * count + 4 * len(TABLE)  # Adam's counters
    assert found == inner | {"optimizer": inner["optimizer"] + 8 * count, "buckets": 0}
    for _ in range(3):
        training.step()
    assert 4 * count <= training.optimizer.bytes_held()["buckets"] < 4 * count + 1600  # each filled up to 256 bytes
    training.step()
    assert training.optimizer.bytes_held() == found


@pytest.mark.parametrize(
    ("sync", "line"),
    [
        (
            ["mode=diloco", "interval=8", "fragments=2", "delay=1"],
            "diloco, an outer step every 8 iterations in 2 fragments, in flight for 1 iteration; a rank's steps reach "
            "the other ranks at most 9 iterations later; 0.8 MB a step over data-parallel ranks instead of 6.0",
        ),
        (
            ["mode=local_sgd", "interval=1"],
            "local_sgd, an outer step every 1 iteration; a rank's steps reach the other ranks at most 1 iteration "
            "later; 6.0 MB a step over data-parallel ranks instead of 6.0",
        ),
        (
            ["mode=delayed", "delay=2"],
            "gradients are applied 2 iterations late, and their sums may take as long; no weight changes in the first "
            "2 iterations, and the gradients of the last 2 iterations are not used",
        ),
    ],
)
def test_a_run_says_how_late_its_ranks_learn_of_each_other(sync, line):
    """A ring of 4 ranks sends 2 * 3/4 of 4 bytes for each of a million parameters."""
    config = load_config(None, [f"sync.{setting}" for setting in sync])
    assert sync_line(config, dp=4, parameters=10**6) == line
