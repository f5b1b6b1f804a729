"""What DeepSpeed holds comes and goes by parameter name, and nothing of a run outlives it."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.model import build
from megatron_lite.optim import deepspeed as deepspeed_file
from megatron_lite.parallel.embedding import VocabParallelEmbedding
from megatron_lite.parallel.linear import ColumnParallelLinear
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.state import TrainState
from megatron_lite.training.step import forward_backward, forward_of, sum_over_pipeline, train_step
from tests.helpers.engines import FOUR_STEPS, OFFLOAD_ALL, OFFLOAD_OPTIMIZER, SMALL_BUCKETS, deepspeed
from tests.helpers.tiny import gather, model_with_biases, portion, tiny_config, train_tiny


def start(config: Config) -> Run:
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng, model_with_biases)


Kept = tuple[dict[str, LocalShard], dict[str, dict[str, LocalShard]], int, dict[str, Any]]


def kept(run: Run) -> Kept:
    """Copies of what a checkpoint would hold."""

    def copy(held: LocalShard) -> LocalShard:
        return LocalShard(held.values.clone(), held.start, held.across_dp)

    weights = {name: copy(held) for name, held in run.optimizer.weights().items()}
    state = {name: {kind: copy(held) for kind, held in kinds.items()} for name, kinds in run.optimizer.state().items()}
    return weights, state, run.optimizer.step_count, run.state.to_dict()


def put_back(run: Run, kept: Kept) -> None:
    weights, state = run.optimizer.weights(), run.optimizer.state()
    fill(weights, kept[0])
    for name, kinds in kept[1].items():
        fill(state[name], kinds)
    run.state = TrainState.from_dict(kept[3])
    run.optimizer.load(weights, state, kept[2], run.state.iteration)


def fill(into: dict[str, LocalShard], saved: dict[str, LocalShard]) -> None:
    assert into.keys() == saved.keys()
    for name, held in saved.items():
        assert (into[name].start, into[name].across_dp) == (held.start, held.across_dp)
        into[name].values.copy_(held.values)


def assert_same(kept: Kept, other: Kept) -> None:
    """To the bit."""
    torch.testing.assert_close([*values(kept)], [*values(other)], rtol=0, atol=0)
    assert kept[2:] == other[2:]


def values(kept: Kept) -> Iterator[Tensor]:
    yield from (held.values for held in kept[0].values())
    for kinds in kept[1].values():
        yield from (held.values for held in kinds.values())


def life(folder: Path, changes: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """A run, interrupted by all that may happen to one; returns the elements of the model, and the bytes held."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    config = tiny_config("codegeex", **FOUR_STEPS, **changes)
    run = start(config)
    at_start = kept(run)
    for _ in range(2):
        train_step(run, portion(run))
    after_two = kept(run)
    held = run.optimizer.bytes_held()
    numel = sum(weight.numel() for weight in gather(run).values())
    loss = evaluated(run)  # on the weights and samples of the next step
    third = train_step(run, portion(run))
    assert third.loss == pytest.approx(loss, rel=1e-6)
    refuse_a_gradient_that_is_not_finite(run)
    fourth = train_step(run, portion(run))
    end = kept(run)
    assert end[2] == 4
    del run
    deepspeed_file.release()

    again = start(config)
    assert_same(kept(again), at_start)
    put_back(again, after_two)
    assert_same(kept(again), after_two)
    assert [train_step(again, portion(again)) for _ in range(2)] == [third, fourth]
    assert_same(kept(again), end)
    start_from_weights(again, after_two)
    assert train_step(again, portion(again)).loss == third.loss
    del again
    finalize_megatron()
    assert not list(folder.iterdir()), "something was compiled"
    from deepspeed.utils import groups

    assert groups.mpu is None, "it would keep process groups alive"
    return numel, held


def evaluated(run: Run) -> float:
    """Mean loss of the next portion, as `evaluate` takes it: through the model itself, without gradients."""
    batches = portion(run)
    run.model[0].eval()
    with torch.no_grad():
        forward = forward_of(run, batches, run.model.__getitem__)
        sums = torch.stack(
            [
                sum_over_pipeline(run, [forward(0, number, None) for number in range(len(batches))])[0],
                torch.stack([batch.loss_mask.sum() for batch in batches]).sum().double(),
            ]
        )
    run.model[0].train()
    dist.all_reduce(sums, group=run.ctx.dp.pg)
    return (sums[0] / sums[1]).item()


def refuse_a_gradient_that_is_not_finite(run: Run) -> None:
    """One rank's loss overflows: no rank changes anything."""
    before, batches = kept(run), portion(run)
    optimizer: Any = run.optimizer
    forward_backward(run, batches, math.inf if run.ctx.dp.is_last else 1.0)
    outcome = optimizer.step(1e-3)
    assert not math.isfinite(outcome.grad_norm) and not outcome.skipped
    assert_same(kept(run), before)


def start_from_weights(run: Run, saved: Kept) -> None:
    """A warm start: masters are the weights, whatever they were."""
    weights = run.optimizer.weights()
    fill(weights, saved[0])
    for kinds in run.optimizer.state().values():
        for moment in ("exp_avg", "exp_avg_sq"):
            kinds[moment].values.zero_()
    run.optimizer.load(weights, {}, 0, 0)
    assert run.optimizer.step_count == 0
    run.state = TrainState.from_dict(saved[3])
    whole = gather(run)
    for name, kinds in run.optimizer.state().items():
        if "master" in kinds:
            master = kinds["master"]
            assert torch.equal(master.values, whole[name].flatten()[master.start : master.end].float()), name


@pytest.mark.parametrize(
    ("changes", "bytes_of"),
    [  # bytes an element, on each of two ranks: parameters, and optimizer
        (deepspeed(0), (4, 8)),
        (deepspeed(1), (4, 6)),
        (deepspeed(3, **SMALL_BUCKETS), (2, 6)),
        (deepspeed(1, train__precision="bf16"), (2, 6)),
        (deepspeed(2, train__precision="bf16", **OFFLOAD_OPTIMIZER), (2, 6)),
        # All parameters of this model are small enough to stay whole, beside the rank's share, once they were gathered.
        (deepspeed(3, train__precision="bf16", **OFFLOAD_ALL), (3, 6)),
    ],
    ids=["fp32 0", "fp32 1", "fp32 3 tight", "bf16 1", "bf16 2 offload", "bf16 3 offload all"],
)
def test_a_run_survives_evaluation_overflow_and_restart_to_the_bit(ranks, tmp_path, changes, bytes_of):
    """A moment that is not loaded, or a gradient that stays behind, would show in the steps that follow; and a group or
    a counter of the first run in the second one of the process."""
    for numel, held in ranks(2, life, tmp_path, changes):
        assert held["parameters"] == pytest.approx(bytes_of[0] * numel, rel=0.01)
        offloaded = " (in host memory)" if "deepspeed__offload_optimizer" in changes else ""
        assert held[f"optimizer{offloaded}"] == pytest.approx(bytes_of[1] * numel, rel=0.01)
        if changes["deepspeed__zero_stage"] == 3:  # others make them anew in each backward
            bucket = 4 * 2**20 * changes.get("parallel__bucket_mb", 25.0) / 4
            assert held["buckets"] == pytest.approx(bucket, abs=8)
            assert held["gradients"] == pytest.approx(
                (4 if "deepspeed__offload_param" in changes else 2) * numel, rel=0.01
            )


def test_stage_3_never_has_two_whole_parameters(ranks):
    """Otherwise a model that only fits on all ranks together could not be built."""
    ranks(2, build_shared_out)


def build_shared_out() -> None:
    config = tiny_config("codegeex", **FOUR_STEPS, **deepspeed(3))
    ctx, rng = initialize_megatron(config)
    filled: list[Tensor] = []
    real = build.fill

    def fill_and_look(parameter: Tensor, meta: Any, **options: Any) -> None:
        assert not any(earlier.numel() for earlier in filled)
        filled.append(parameter)
        real(parameter, meta, **options)

    def provider(*args: Any, **options: Any) -> list:
        with mock.patch.object(build, "fill", fill_and_look):
            return build.get_model(*args, **options)

    run = setup_model_and_optimizer(config, ctx, rng, provider)
    assert len(filled) == len(run.params)
    finalize_megatron()


def test_layers_made_outside_the_meta_device_are_cut_when_they_have_their_values(ranks):
    """Before, there is only memory, and `initialize_parameters` would make parameters as small as a share of one."""
    ranks(2, build_on_the_cpu)


def build_on_the_cpu() -> None:
    config = tiny_config("gpt", **FOUR_STEPS, **deepspeed(3))
    ctx, _ = initialize_megatron(config)
    where = {"init_std": 0.1, "dtype": torch.float32, "device": ctx.device}

    def made() -> nn.Module:
        embedding = VocabParallelEmbedding(8, 6, tp=ctx.tp, **where)
        linear = ColumnParallelLinear(6, 5, tp=ctx.tp, bias=True, **where)
        model = nn.ModuleDict({"embedding": embedding, "linear": linear})
        build.initialize_parameters([model], ctx, seed=3)
        return model

    whole = dict(made().named_parameters())
    with deepspeed_file.DeepSpeed(config, ctx).while_building():
        shared_out = dict(made().named_parameters())
    assert whole.keys() == shared_out.keys()
    for name, weight in whole.items():
        pieces = [torch.empty_like(shared_out[name].ds_tensor) for _ in range(2)]  # type: ignore[attr-defined]
        dist.all_gather(pieces, shared_out[name].ds_tensor.data)  # type: ignore[attr-defined]
        assert torch.equal(torch.cat(pieces)[: weight.numel()], weight.flatten()), name
    finalize_megatron()


def test_ranks_that_draw_weights_of_their_own_start_alike(ranks):
    """A model of one's own may: what tp and dp replicate is then the first rank's."""
    for name, weights in ranks(4, draw_apart)[0].items():
        assert all(torch.equal(weight, weights[0]) for weight in weights), name


def draw_apart() -> dict[str, list[Tensor]]:
    """By name, the weights that all four ranks start with; of what tp cuts, those of its first rank."""
    config = tiny_config("gpt", parallel__tensor=2, **FOUR_STEPS, **deepspeed(3))
    ctx, rng = initialize_megatron(config)
    torch.manual_seed(ctx.rank)

    def provider(*args: Any, **options: Any) -> list:
        with mock.patch.object(build, "fill", lambda parameter, meta, **options: parameter.data.normal_()):
            return build.get_model(*args, **options)

    weights = gather(setup_model_and_optimizer(config, ctx, rng, provider))
    of_ranks: list[dict[str, Tensor]] = [{} for _ in range(4)]
    dist.all_gather_object(of_ranks, weights)
    finalize_megatron()
    return {name: [weights[name] for weights in of_ranks] for name in weights}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_unused_in_the_last_micro_batch_is_named(ranks, stage):
    """Stage 1 would leave its gradient as this rank's own."""
    with pytest.raises(RanksFailed) as raised:
        ranks(2, leave_out_a_bias, stage)
    text = str(raised.value)
    assert "1 of 28 parameters got no gradient in the last micro-batch, such as decoder.final_layernorm.bias" in text
    assert "use every parameter in every micro-batch, or parallel.ddp=local" in text


def leave_out_a_bias(stage: int) -> None:
    run = start(tiny_config("gpt", train__micro_batch_size=2, **deepspeed(stage)))
    norm, calls = run.model[0].decoder.final_layernorm, []

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        return nn.functional.layer_norm(x, norm.shape, norm.weight, norm.bias if len(calls) == 1 else None, norm.eps)

    norm.forward = forward
    train_step(run, portion(run))


@pytest.mark.parametrize(
    "changes", [deepspeed(2), deepspeed(2, **OFFLOAD_OPTIMIZER), deepspeed(3)], ids=["2", "2 offload", "3"]
)
def test_the_loss_scale_of_fp16_falls_and_grows_as_under_local_ddp(ranks, changes):
    """DeepSpeed refuses fp16 on the CPU, for no reason that matters here, so it is told that it can."""
    fp16 = {"train__precision": "fp16", "optim__hysteresis": 1, "optim__loss_scale_window": 2}
    fp16 |= {"optim__initial_loss_scale": 2.0**22, "train__iterations": 8, "train__micro_batch_size": 2}
    truth = ranks(2, reports, fp16)[0]
    assert 2 < [skipped for *_, skipped in truth].count(True) < 6
    for got in ranks(2, reports, fp16 | changes):
        assert [row[2:] for row in got] == [row[2:] for row in truth]
        for (loss, grad_norm, *_, skipped), (true_loss, true_norm, *_) in zip(got, truth, strict=True):
            assert loss == pytest.approx(true_loss, rel=1e-3)
            assert math.isinf(grad_norm) if skipped else grad_norm == pytest.approx(true_norm, rel=1e-2)


def reports(changes: dict[str, Any]) -> list[tuple[float, float, float, bool]]:
    import deepspeed

    config = tiny_config("gpt", **changes, run__device="auto")
    accelerator = deepspeed.get_accelerator()
    with (
        mock.patch.object(deepspeed_file, "check_support"),
        mock.patch.object(accelerator, "is_fp16_supported", lambda: True),
    ):
        run = start(config)
        steps = [train_step(run, portion(run)) for _ in range(config.train.iterations)]
    finalize_megatron()
    return [(step.loss, step.grad_norm, step.loss_scale, step.skipped) for step in steps]


def test_a_run_of_one_needs_no_process_group(ranks):
    """DeepSpeed wants one; it gets one that talks to nobody, and that leaves with the run."""
    truth, got = ranks(1, alone)[0]
    torch.testing.assert_close(got["loss"], truth["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(got["grad_norm"], truth["grad_norm"], rtol=1e-5, atol=0)


def alone() -> tuple[dict[str, Any], dict[str, Any]]:
    dist.destroy_process_group()
    results = train_tiny("gpt", **FOUR_STEPS), train_tiny("gpt", **FOUR_STEPS, **deepspeed(3))
    assert not dist.is_initialized()
    return results
