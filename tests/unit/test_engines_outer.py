"""engines/outer.py on one data-parallel rank, which takes outer steps without other ranks."""

import pytest
import torch
from torch import Tensor

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import OptimConfig, SyncConfig
from megatron_lite.ddp.local import LocalDDP
from megatron_lite.engines.outer import OuterOptimizer, fragment_of
from megatron_lite.optim.mixed_precision import MixedPrecisionOptimizer
from megatron_lite.optim.scaler import DynamicLossScaler, LossScaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.plan.layout_lines import sync_line
from megatron_lite.plan.sizes import state_bytes
from tests.helpers.toy import TABLE, ToyModel

CTX = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=10)
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5)
DILOCO = SyncConfig(mode="diloco", interval=4)
NUMBERED = {name: f"layers.{number}.{name}" for number, name in enumerate(TABLE)}


class Training:
    """The toy model, with each parameter named as a layer, and its optimizers."""

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

    def load_from(self, other: "Training", *, with_state: bool = True) -> None:
        """Copy weights, and with `with_state` state, of `other` into this one's tensors, as a checkpoint does."""
        weights, state = self.optimizer.weights(), self.optimizer.state() if with_state else {}
        for name, shard in other.optimizer.weights().items():
            weights[name].values.copy_(shard.values)
        saved = other.optimizer.state()
        for name, kinds in state.items():
            assert kinds.keys() == saved[name].keys()
            for kind, shard in kinds.items():
                shard.values.copy_(saved[name][kind].values)
        self.iteration = other.iteration if with_state else 0
        self.optimizer.load(weights, state, other.optimizer.step_count if with_state else 0, self.iteration)

    def everything(self) -> dict[str, Tensor]:
        """A copy of all that a step may change."""
        found = {f"{name} weight": shard.values for name, shard in self.optimizer.weights().items()}
        for name, kinds in self.optimizer.state().items():
            found |= {f"{name} {kind}": shard.values for kind, shard in kinds.items()}
        found |= {f"{name} parameter": parameter.detach() for name, parameter in self.params.items()}
        return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_every_fragment_synchronizes_once_in_an_interval_and_the_last_at_its_end():
    """A fragment that did not synchronize would drift apart on all ranks."""
    sync = SyncConfig(mode="diloco", interval=6, fragments=3)
    training = Training(sync)
    synchronized: dict[int, list[str]] = {}
    for iteration in range(1, 13):
        before = {name: common.clone() for name, common in training.optimizer.common.items()}
        training.step()
        moved = [name for name, common in training.optimizer.common.items() if not torch.equal(common, before[name])]
        if moved:
            synchronized[iteration] = moved
    fragments = [[name for name in training.params if fragment_of(name, 3) == number] for number in range(3)]
    assert all(fragments)
    assert synchronized == dict(zip([2, 4, 6, 8, 10, 12], fragments * 2, strict=True))


def test_layers_go_to_fragments_in_turn_and_other_parameters_to_the_first():
    """The two copies of a tied embedding, on two stages, must synchronize in the same iteration."""
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(12)]
    assert [fragment_of(name, 4) for name in names] == [0, 1, 2, 3] * 3
    rest = ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.bias"]
    assert [fragment_of(name, 4) for name in rest] == [0, 0, 0]


def test_a_skipped_step_counts_as_an_iteration():
    """A resumed run counts iterations. Without skipped ones, it would synchronize at other iterations."""
    scaler = DynamicLossScaler(1024.0, min_scale=1.0, growth_interval=100, hysteresis=1)
    training = Training(SyncConfig(mode="local_sgd", interval=2), scaler=scaler)
    start = {name: common.clone() for name, common in training.optimizer.common.items()}
    training.step()
    training.step(spoiled=True)
    for name, common in training.optimizer.common.items():
        assert torch.equal(common, training.params[name]) and not torch.equal(common, start[name])
    assert training.optimizer.step_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stop", [4, 6, 7])  # after an outer step, between two, and with one in flight
def test_a_resumed_run_is_equal_bit_for_bit(stop, dtype):
    """Lost momentum or drift in flight would change the common model."""
    sync = SyncConfig(mode="diloco", interval=8, fragments=2, delay=2)
    unstopped, resumed = Training(sync, dtype), Training(sync, dtype)
    for _ in range(stop):
        unstopped.step()
    resumed.load_from(unstopped)
    assert_same(resumed.everything(), unstopped.everything())
    for _ in range(9):
        unstopped.step()
        resumed.step()
    assert_same(resumed.everything(), unstopped.everything())


@pytest.mark.parametrize("sync", [DILOCO, SyncConfig(mode="local_sgd", interval=4)])
def test_inner_state_is_saved_for_each_rank_and_outer_state_once(sync):
    """State that is equal on all ranks is written once. Local SGD has no momentum; fp32 weights need no copy."""
    for dtype, low in ((torch.float32, False), (torch.bfloat16, True)):
        kinds = Training(sync, dtype).optimizer.state()["layers.0.embedding.weight"]
        local = {"exp_avg", "exp_avg_sq", "master"}
        replicated = {"common"} if low else set()
        replicated |= {"outer_momentum"} if sync is DILOCO else set()
        assert {kind for kind, shard in kinds.items() if shard.across_dp == "local"} == local
        assert {kind for kind, shard in kinds.items() if shard.across_dp == "replicated"} == replicated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_weights_alone_sets_the_common_model_and_the_masters(dtype):
    """The first outer step would otherwise pull the weights back to the random start."""
    trained, fresh = Training(DILOCO, dtype), Training(DILOCO, dtype)
    for _ in range(5):
        trained.step()
    fresh.load_from(trained, with_state=False)
    for name, shard in trained.optimizer.weights().items():
        assert torch.equal(fresh.params[name], shard.values)
        assert torch.equal(fresh.optimizer.common[name], shard.values.to(fresh.optimizer.common[name].dtype))
        assert torch.equal(fresh.inner.masters[name], fresh.optimizer.common[name])
    assert not torch.equal(trained.params[name], fresh.params[name]), (
        "the local step after the outer step must not be loaded"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parameters_are_the_common_model_only_inside_its_context(dtype):
    """Evaluation uses the common model; training must continue with the local weights, also after an error."""
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


def test_bytes_count_the_common_model_its_momentum_and_the_drift_in_flight():
    """The memory line of a run would be too small."""
    training = Training(SyncConfig(mode="diloco", interval=4, delay=1))
    count = sum(parameter.numel() for parameter in training.params.values())
    inner = training.inner.bytes_held()
    found = training.optimizer.bytes_held()
    expected = state_bytes(load_config(None, ["sync.mode=diloco"]), dp=1)
    assert found["optimizer"] == expected["optimizer"] * count + 4 * len(TABLE)  # Adam's counters
    assert found == inner | {"optimizer": inner["optimizer"] + 8 * count, "buckets": 0}
    for _ in range(3):
        training.step()
    assert 4 * count <= training.optimizer.bytes_held()["buckets"] < 4 * count + 1600  # each padded to 256 bytes
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
def test_a_run_prints_the_age_of_other_ranks_steps_and_the_bytes_of_a_step(sync, line):
    """A ring of 4 ranks sends 2 * 3/4 of 4 bytes for each of a million parameters."""
    config = load_config(None, [f"sync.{setting}" for setting in sync])
    assert sync_line(config, dp=4, parameters=10**6) == line
