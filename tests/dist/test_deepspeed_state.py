"""DeepSpeed's weights and optimizer state are saved and loaded by parameter name; a run leaves no state behind."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.engines import deepspeed as deepspeed_file
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.model import build
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.embedding import VocabParallelEmbedding
from megatron_lite.parallel.linear import ColumnParallelLinear
from megatron_lite.training.forward_step import Sums, forward_of, next_token_loss
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.state import TrainState
from megatron_lite.training.step import forward_backward, train_step
from tests.helpers.engines import FOUR_STEPS, OFFLOAD_ALL, OFFLOAD_OPTIMIZER, SMALL_BUCKETS, deepspeed
from tests.helpers.tiny import gather_weights, model_with_biases, next_microbatches, tiny_config, train_tiny


def start(config: Config) -> Run:
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng, model_with_biases)


Snapshot = tuple[dict[str, LocalShard], dict[str, dict[str, LocalShard]], int, dict[str, Any]]


def take_snapshot(run: Run) -> Snapshot:
    """Copies of the weights, optimizer state, step count and train state that a checkpoint stores."""

    def copy(local: LocalShard) -> LocalShard:
        return replace(local, values=local.values.clone())

    weights = {name: copy(local) for name, local in run.optimizer.weights().items()}
    state = {
        name: {kind: copy(local) for kind, local in kinds.items()} for name, kinds in run.optimizer.state().items()
    }
    return weights, state, run.optimizer.step_count, run.state.to_dict()


def restore(run: Run, snapshot: Snapshot) -> None:
    """Load a snapshot into `run` as a checkpoint is loaded."""
    weights, state = run.optimizer.weights(), run.optimizer.state()
    fill(weights, snapshot[0])
    for name, kinds in snapshot[1].items():
        fill(state[name], kinds)
    run.state = TrainState.from_dict(snapshot[3])
    run.optimizer.load(weights, state, snapshot[2], run.state.iteration)


def fill(into: dict[str, LocalShard], saved: dict[str, LocalShard]) -> None:
    assert into.keys() == saved.keys()
    for name, local in saved.items():
        assert (into[name].start, into[name].across_dp) == (local.start, local.across_dp)
        into[name].values.copy_(local.values)


def assert_same(snapshot: Snapshot, other: Snapshot) -> None:
    """Both snapshots are bitwise equal."""
    torch.testing.assert_close([*values(snapshot)], [*values(other)], rtol=0, atol=0)
    assert snapshot[2:] == other[2:]


def values(snapshot: Snapshot) -> Iterator[Tensor]:
    yield from (local.values for local in snapshot[0].values())
    for kinds in snapshot[1].values():
        yield from (local.values for local in kinds.values())


def interrupted_run(folder: Path, changes: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Train, evaluate, take a step with an infinite gradient, restart, and make a warm start, with checks after each.

    Returns the number of elements of the model, and the bytes of its state on this rank by kind.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    config = tiny_config("codegeex", **FOUR_STEPS, **changes)
    run = start(config)
    at_start = take_snapshot(run)
    for _ in range(2):
        train_step(run, next_microbatches(run))
    after_two = take_snapshot(run)
    state_bytes = run.optimizer.bytes_held()
    numel = sum(weight.numel() for weight in gather_weights(run).values())
    loss = evaluation_loss(run)  # on the weights and samples of the next step
    third = train_step(run, next_microbatches(run))
    assert third.loss == pytest.approx(loss, rel=1e-6)
    check_that_a_step_with_an_infinite_gradient_changes_nothing(run)
    fourth = train_step(run, next_microbatches(run))
    end = take_snapshot(run)
    assert end[2] == 4
    del run
    deepspeed_file.release()

    again = start(config)
    assert_same(take_snapshot(again), at_start)
    restore(again, after_two)
    assert_same(take_snapshot(again), after_two)
    assert [train_step(again, next_microbatches(again)) for _ in range(2)] == [third, fourth]
    assert_same(take_snapshot(again), end)
    start_from_weights(again, after_two)
    assert train_step(again, next_microbatches(again)).loss == third.loss
    del again
    finalize_megatron()
    assert not list(folder.iterdir()), "DeepSpeed compiled an extension"
    from deepspeed.utils import groups

    assert groups.mpu is None, "deepspeed.utils.groups keeps process groups alive"
    return numel, state_bytes


def evaluation_loss(run: Run) -> float:
    """Mean loss of the next micro-batches, computed as in `evaluate`: by the model itself, without gradients."""
    batches = next_microbatches(run)
    run.model[0].eval()
    with torch.no_grad():
        sums = Sums((), run.ctx.device)
        forward = forward_of(run, batches, run.model.__getitem__, next_token_loss, sums)
        for number in range(len(batches)):
            forward(0, number, None)
    run.model[0].train()
    loss, targets = all_reduce(sums.total(), run.ctx.dp).tolist()
    return loss / targets


def check_that_a_step_with_an_infinite_gradient_changes_nothing(run: Run) -> None:
    """One rank's gradient is infinite; no rank may change weights or optimizer state."""
    before, batches = take_snapshot(run), next_microbatches(run)
    optimizer: Any = run.optimizer
    forward_backward(run, batches, math.inf if run.ctx.dp.is_last else 1.0)
    outcome = optimizer.step(1e-3)
    assert not math.isfinite(outcome.grad_norm) and not outcome.skipped
    assert_same(take_snapshot(run), before)


def start_from_weights(run: Run, saved: Snapshot) -> None:
    """Make a warm start and check that masters equal the loaded weights."""
    weights = run.optimizer.weights()
    fill(weights, saved[0])
    for kinds in run.optimizer.state().values():
        for moment in ("exp_avg", "exp_avg_sq"):
            kinds[moment].values.zero_()
    run.optimizer.load(weights, {}, 0, 0)
    assert run.optimizer.step_count == 0
    run.state = TrainState.from_dict(saved[3])
    full_weights = gather_weights(run)
    for name, kinds in run.optimizer.state().items():
        if "master" in kinds:
            master = kinds["master"]
            assert torch.equal(master.values, full_weights[name].flatten()[master.start : master.end].float()), name


@pytest.mark.parametrize(
    ("changes", "bytes_per_element"),
    [  # on each of two ranks: parameters, and optimizer
        (deepspeed(0), (4, 8)),
        (deepspeed(1), (4, 6)),
        (deepspeed(3, **SMALL_BUCKETS), (2, 6)),
        (deepspeed(1, train__precision="bf16"), (2, 6)),
        (deepspeed(2, train__precision="bf16", **OFFLOAD_OPTIMIZER), (2, 6)),
        # All parameters of this model are small enough for DeepSpeed to keep them gathered, besides the rank's shard.
        (deepspeed(3, train__precision="bf16", **OFFLOAD_ALL), (3, 6)),
    ],
    ids=[
        "fp32 stage 0",
        "fp32 stage 1",
        "fp32 stage 3 small buckets",
        "bf16 stage 1",
        "bf16 stage 2 offload optimizer",
        "bf16 stage 3 offload all",
    ],
)
def test_a_run_survives_evaluation_overflow_and_restart_to_the_bit(ranks, tmp_path, changes, bytes_per_element):
    """A moment that is not loaded, or a gradient left over, would change the following steps. A group or a counter left
    by the first run would change the second run of the process."""
    for numel, state_bytes in ranks(2, interrupted_run, tmp_path, changes):
        assert state_bytes["parameters"] == pytest.approx(bytes_per_element[0] * numel, rel=0.01)
        offloaded = " (in host memory)" if "deepspeed__offload_optimizer" in changes else ""
        assert state_bytes[f"optimizer{offloaded}"] == pytest.approx(bytes_per_element[1] * numel, rel=0.01)
        if changes["deepspeed__zero_stage"] == 3:  # other stages allocate buckets and gradients in each backward
            bucket = 4 * 2**20 * changes.get("parallel__bucket_mb", 25.0) / 4
            assert state_bytes["buckets"] == pytest.approx(bucket, abs=8)
            assert state_bytes["gradients"] == pytest.approx(
                (4 if "deepspeed__offload_param" in changes else 2) * numel, rel=0.01
            )


def test_stage_3_builds_at_most_one_unsharded_parameter_at_a_time(ranks):
    """Otherwise a model that only fits on all ranks together could not be built."""
    ranks(2, check_that_parameters_are_sharded_while_building)


def check_that_parameters_are_sharded_while_building() -> None:
    config = tiny_config("codegeex", **FOUR_STEPS, **deepspeed(3))
    ctx, rng = initialize_megatron(config)
    filled: list[Tensor] = []
    real = build.fill

    def fill_and_check(parameter: Tensor, meta: Any, **options: Any) -> None:
        assert not any(earlier.numel() for earlier in filled)
        filled.append(parameter)
        real(parameter, meta, **options)

    def provider(*args: Any, **options: Any) -> list:
        with mock.patch.object(build, "fill", fill_and_check):
            return build.get_model(*args, **options)

    run = setup_model_and_optimizer(config, ctx, rng, provider)
    assert len(filled) == len(run.params)
    finalize_megatron()


def test_layers_built_on_the_cpu_are_sharded_after_initialization(ranks):
    """Sharded earlier, a parameter would be initialized with the size of its shard, and the values would be lost."""
    ranks(2, check_shards_of_layers_built_on_the_cpu)


def check_shards_of_layers_built_on_the_cpu() -> None:
    config = tiny_config("gpt", **FOUR_STEPS, **deepspeed(3))
    ctx, _ = initialize_megatron(config)
    where = {"init_std": 0.1, "dtype": torch.float32, "device": ctx.device}

    def make_model() -> nn.Module:
        embedding = VocabParallelEmbedding(8, 6, tp=ctx.tp, **where)
        linear = ColumnParallelLinear(6, 5, tp=ctx.tp, bias=True, **where)
        model = nn.ModuleDict({"embedding": embedding, "linear": linear})
        build.initialize_parameters([model], ctx, seed=3)
        return model

    full = dict(make_model().named_parameters())
    with deepspeed_file.DeepSpeed(config, ctx).while_building():
        sharded = dict(make_model().named_parameters())
    assert full.keys() == sharded.keys()
    for name, weight in full.items():
        shards = [torch.empty_like(sharded[name].ds_tensor) for _ in range(2)]  # type: ignore[attr-defined]
        dist.all_gather(shards, sharded[name].ds_tensor.data)  # type: ignore[attr-defined]
        assert torch.equal(torch.cat(shards)[: weight.numel()], weight.flatten()), name
    finalize_megatron()


def test_replicated_weights_are_equal_when_ranks_draw_different_ones(ranks):
    """A custom model may draw different values on each rank; all replicas over tp and dp must start from rank 0's."""
    for name, weights in ranks(4, initial_weights_of_all_ranks)[0].items():
        assert all(torch.equal(weight, weights[0]) for weight in weights), name


def initial_weights_of_all_ranks() -> dict[str, list[Tensor]]:
    """The gathered initial weights of all four ranks by name."""
    config = tiny_config("gpt", parallel__tensor=2, **FOUR_STEPS, **deepspeed(3))
    ctx, rng = initialize_megatron(config)
    torch.manual_seed(ctx.rank)

    def provider(*args: Any, **options: Any) -> list:
        with mock.patch.object(build, "fill", lambda parameter, meta, **options: parameter.data.normal_()):
            return build.get_model(*args, **options)

    weights = gather_weights(setup_model_and_optimizer(config, ctx, rng, provider))
    by_rank: list[dict[str, Tensor]] = [{} for _ in range(4)]
    dist.all_gather_object(by_rank, weights)
    finalize_megatron()
    return {name: [weights[name] for weights in by_rank] for name in weights}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_unused_in_the_last_micro_batch_raises_an_error(ranks, stage):
    """Stage 1 would not sum its gradient over ranks."""
    with pytest.raises(RanksFailed) as raised:
        ranks(2, train_with_an_unused_bias, stage)
    text = str(raised.value)
    assert "1 of 28 parameters got no gradient in the last micro-batch, such as decoder.final_layernorm.bias" in text
    assert "use every parameter in every micro-batch, or parallel.ddp=local" in text


def train_with_an_unused_bias(stage: int) -> None:
    run = start(tiny_config("gpt", train__micro_batch_size=2, **deepspeed(stage)))
    norm, calls = run.model[0].decoder.final_layernorm, []

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        return nn.functional.layer_norm(x, norm.shape, norm.weight, norm.bias if len(calls) == 1 else None, norm.eps)

    norm.forward = forward
    train_step(run, next_microbatches(run))


@pytest.mark.parametrize(
    "changes",
    [deepspeed(2), deepspeed(2, **OFFLOAD_OPTIMIZER), deepspeed(3)],
    ids=["stage 2", "stage 2 offload", "stage 3"],
)
def test_the_fp16_loss_scale_equals_that_of_local_ddp(ranks, changes):
    """A missed overflow on one rank would give another scale. The test disables the error for fp16 on a CPU."""
    fp16 = {"train__precision": "fp16", "optim__hysteresis": 1, "optim__loss_scale_window": 2}
    fp16 |= {"optim__initial_loss_scale": 2.0**22, "train__iterations": 8, "train__micro_batch_size": 2}
    expected = ranks(2, fp16_reports, fp16)[0]
    assert 2 < [skipped for *_, skipped in expected].count(True) < 6
    for got in ranks(2, fp16_reports, fp16 | changes):
        assert [row[2:] for row in got] == [row[2:] for row in expected]
        for (loss, grad_norm, *_, skipped), (true_loss, true_norm, *_) in zip(got, expected, strict=True):
            assert loss == pytest.approx(true_loss, rel=1e-3)
            assert math.isinf(grad_norm) if skipped else grad_norm == pytest.approx(true_norm, rel=1e-2)


def fp16_reports(changes: dict[str, Any]) -> list[tuple[float, float, float, bool]]:
    import deepspeed

    config = tiny_config("gpt", **changes, run__device="auto")
    accelerator = deepspeed.get_accelerator()
    with (
        mock.patch.object(deepspeed_file, "check_support"),
        mock.patch.object(accelerator, "is_fp16_supported", lambda: True),
    ):
        run = start(config)
        steps = [train_step(run, next_microbatches(run)) for _ in range(config.train.iterations)]
    finalize_megatron()
    return [(step.loss, step.grad_norm, step.loss_scale, step.skipped) for step in steps]


def test_a_run_in_one_process_needs_no_process_group(ranks):
    """DeepSpeed needs a process group; the engine makes one of a single rank and destroys it after the run."""
    expected, got = ranks(1, train_without_process_group)[0]
    torch.testing.assert_close(got["loss"], expected["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(got["grad_norm"], expected["grad_norm"], rtol=1e-5, atol=0)


def train_without_process_group() -> tuple[dict[str, Any], dict[str, Any]]:
    dist.destroy_process_group()
    results = train_tiny("gpt", **FOUR_STEPS), train_tiny("gpt", **FOUR_STEPS, **deepspeed(3))
    assert not dist.is_initialized()
    return results
