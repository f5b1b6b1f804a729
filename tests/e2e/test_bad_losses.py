"""A loss that is not finite, or far above the recent ones: the run skips it, rolls back or stops, as configured."""

import math
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.errors import CheckpointError, TrainingError
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.training.checkpointing import load_run, save_run
from megatron_lite.training.forward_step import sum_over_pipeline
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.replicas import check_replicas_equal
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.start import checkpoints_of
from megatron_lite.training.state import ENOUGH_LOSSES, StepReport, TrainState
from megatron_lite.training.step import advance, train_step
from tests.helpers.checkpoints import flip_a_bit
from tests.helpers.printed import unwrapped
from tests.helpers.runs import rows, tensor_files, train_to_end
from tests.helpers.tiny import gather_weights, model_with_biases, next_microbatches, tiny_config

ENGINES = {
    "one rank": (1, {}),
    "tp 2": (2, {"parallel__tensor": 2}),
    "dp 2 distributed bf16": (2, {"optim__distributed": "true", "train__precision": "bf16"}),
    "dp 2 fsdp": (2, {"parallel__ddp": "fsdp"}),
    "dp 2 torch": (2, {"parallel__ddp": "torch"}),
    "pp 2 dp 2": (4, {"parallel__pipeline": 2}),
    "dp 2 deepspeed 2 bf16": (
        2,
        {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 2, "train__precision": "bf16"},
    ),
    "dp 2 deepspeed 3": (2, {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 3}),
}
LENGTH = {
    "train__iterations": 9,
    "train__micro_batch_size": 2,
    "checkpoint__interval": 4,
    "optim__schedule": "constant",
}


@contextmanager
def bad_data(iteration: int, kind: str):
    """In the block, one iteration has a nan loss on one rank, or (kind "spike") unpredictable labels on all ranks."""

    def step(run: Run, microbatches):
        if run.state.iteration + 1 == iteration:
            batch = microbatches[0]
            if kind == "spike":
                for batch in microbatches:
                    batch.labels.copy_((batch.labels * 7919 + 31) % run.config.model.vocab_size)
            elif run.ctx.rank == run.ctx.world.size - 1:
                batch.loss_mask[0, 0] = math.nan
        return train_step(run, microbatches)

    with mock.patch("megatron_lite.training.loop.train_step", step):
        yield


def train_with_bad_data(folder: str, iteration: int, kind: str, changes: dict[str, Any]) -> None:
    with bad_data(iteration, kind):
        train_to_end(Path(folder), "gpt", **(LENGTH | changes))


def weights_and_state(folder: str, at: int, changes: dict[str, Any]) -> tuple[dict[str, torch.Tensor], TrainState]:
    """The weights and the train state in the checkpoint of iteration `at`."""
    config = tiny_config("gpt", run__dir=folder, **(LENGTH | changes))
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    load_run(run, checkpoints_of(folder), at)
    found = gather_weights(run), run.state
    finalize_megatron()
    return found


def train_without_iterations(folder: str, left_out: range, changes: dict[str, Any]) -> None:
    """Train, but in the iterations `left_out` advance only the counters."""

    def step(run: Run, microbatches):
        if run.state.iteration + 1 not in left_out:
            return train_step(run, microbatches)
        advance(run, microbatches, 0.0, skipped=True)
        return StepReport(0.0, 0.0, 0.0, 1.0, skipped=True)

    with mock.patch("megatron_lite.training.loop.train_step", step):
        train_to_end(Path(folder), "gpt", **(LENGTH | changes))


# torch's engine has the optimizer of the local one, and both stages of DeepSpeed load in one way.
RARE = {"dp 2 torch", "dp 2 deepspeed 3"}


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=pytest.mark.soak if engine in RARE else ()) for engine in ENGINES]
)
def test_a_rollback_resumes_from_the_checkpoint_with_the_data_after(ranks, tmp_path, engine):
    """Weights, moments, learning rate and random streams are bit for bit those of the checkpoint."""
    size, changes = ENGINES[engine]
    changes = changes | {"faults__on_nan": "rollback", "model__hidden_dropout": 0.1}
    ranks(size, train_with_bad_data, str(tmp_path / "bad"), 7, "nan", changes)
    ranks(size, train_without_iterations, str(tmp_path / "expected"), range(5, 8), changes)
    newest = "checkpoints/iter_0000009"
    assert tensor_files(tmp_path / "bad" / newest) == tensor_files(tmp_path / "expected" / newest)
    state, expected = (read_layout(tmp_path / name / newest).state for name in ("bad", "expected"))
    assert (expected["train"]["rolled_back_to"], expected["train"]["rollbacks"]) == (0, 0)
    expected["train"] |= {"rolled_back_to": 4, "rollbacks": 1}
    assert state == expected
    assert [row["iteration"] for row in rows(tmp_path / "bad")] == list(range(1, 10))


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("nan", "one rank"),
        ("spike", "dp 2 distributed bf16"),
        ("nan", "pp 2 dp 2"),
        pytest.param("spike", "one rank", marks=pytest.mark.soak),
        pytest.param("nan", "dp 2 distributed bf16", marks=pytest.mark.soak),
        pytest.param("spike", "pp 2 dp 2", marks=pytest.mark.soak),
    ],
)
def test_a_skipped_step_changes_only_the_data_position(ranks, tmp_path, engine, kind):
    size, changes = ENGINES[engine]
    bad = ENOUGH_LOSSES + 3
    changes = changes | {
        "train__iterations": bad + 1,
        "checkpoint__interval": 1,
        "optim__lr": 2e-2,
        "faults__on_nan": "skip",
        "faults__on_spike": "skip",
        "faults__spike_factor": 1.01,
    }
    ranks(size, train_with_bad_data, str(tmp_path), bad, kind, changes)
    (before, _), *_ = ranks(size, weights_and_state, str(tmp_path), bad - 1, changes)
    (weights, state), *_ = ranks(size, weights_and_state, str(tmp_path), bad, changes)
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert (state.iteration, state.optimizer_steps, state.skipped, state.bad_in_a_row) == (bad, bad - 1, 1, 1)
    assert (state.consumed_samples, state.losses) == (8 * bad, bad - 1)
    (after, last), *_ = ranks(size, weights_and_state, str(tmp_path), bad + 1, changes)
    assert not all(torch.equal(after[name], before[name]) for name in before)
    assert (last.skipped, last.bad_in_a_row) == (1, 0)
    row = rows(tmp_path)[bad - 1]
    assert row["skipped"] and math.isfinite(row["loss"]) == (kind == "spike")
    assert row["grad_norm"] != 0.0


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        (
            "nan",
            {"faults__on_nan": "stop"},
            "iteration 7: the loss is nan and the gradient norm nan (the loss of rank 1 is not finite); training stops."
            " Lower optim.lr, lengthen optim.warmup_iterations or look at the data of this iteration; the newest "
            "checkpoint is from before it",
        ),
        (
            "nan",
            {"faults__on_nan": "rollback", "checkpoint__interval": 0},
            "(the loss of rank 1 is not finite); no checkpoint exists to roll back to; training stops. Lower optim.lr",
        ),
    ],
)
def test_the_error_of_a_bad_loss_names_its_reason_and_the_remedy(ranks, tmp_path, kind, changes, words):
    with pytest.raises(RanksFailed) as raised:
        ranks(2, train_with_bad_data, str(tmp_path), 7, kind, changes)
    assert words in str(raised.value)


def test_a_run_with_only_bad_iterations_stops(tmp_path):
    """If it skipped all of them, it would seem to train."""

    def step(run: Run, microbatches):
        microbatches[0].loss_mask[0, 0] = math.nan
        return train_step(run, microbatches)

    changes = LENGTH | {"faults__on_nan": "skip", "faults__patience": 3}
    with (
        mock.patch("megatron_lite.training.loop.train_step", step),
        pytest.raises(
            TrainingError,
            match=r"^iteration 4: .*; 4 bad iterations in a row exceed faults.patience \(3\); training stops",
        ),
    ):
        train_to_end(tmp_path, "gpt", **changes)


FP16 = {"train__precision": "fp16", "optim__min_loss_scale": 1, "optim__hysteresis": 1}


@pytest.mark.parametrize(
    "is_bad, precision, words",
    [
        (lambda iteration: iteration > 4, {}, "iteration 8: .*; 4 bad iterations in a row exceed faults.patience"),
        # Each rollback restores the scale of the checkpoint, which then falls to the minimum again.
        (
            lambda iteration: iteration > 4,
            FP16 | {"optim__initial_loss_scale": 4},
            "iteration 1.: .*; 4 bad iterations in a row exceed faults.patience",
        ),
        (
            lambda iteration: iteration > 4 and iteration % 2 == 0,
            {},
            "iteration 12: .*; 3 rollbacks to iteration 4 reach faults.patience; training stops. ",
        ),
    ],
)
def test_a_run_that_rolls_back_too_often_stops(tmp_path, is_bad, precision, words):
    """If it skipped all these iterations, it would seem to train."""

    def step(run: Run, microbatches):
        if is_bad(run.state.iteration + 1):
            microbatches[0].loss_mask[0, 0] = math.nan
        return train_step(run, microbatches)

    changes = {"train__iterations": 60, "faults__on_nan": "rollback", "faults__patience": 3, **precision}
    train_to_end(tmp_path, "gpt", **changes | {"train__iterations": 4})
    with (
        mock.patch("megatron_lite.training.loop.train_step", step),
        pytest.raises(TrainingError, match=f"^{words}.*Lower optim.lr"),
    ):
        train_to_end(tmp_path, "gpt", **changes, checkpoint__interval=1000)


def infinite_loss_at(iteration: int):
    """Patch the loss of one iteration to be infinite, with finite gradients."""

    def step(run: Run, microbatches):
        def masked_sum(losses, mask):
            return (losses * mask.t()).sum() + (math.inf if run.state.iteration + 1 == iteration else 0)

        with mock.patch("megatron_lite.training.forward_step.masked_sum", masked_sum):
            return train_step(run, microbatches)

    return mock.patch("megatron_lite.training.loop.train_step", step)


def test_a_bad_loss_with_finite_gradients_changes_no_weight(tmp_path, capsys):
    with infinite_loss_at(3):
        train_to_end(tmp_path, "gpt", train__iterations=3, checkpoint__interval=1, faults__on_nan="skip")
    assert "SKIPPED iteration 3: the loss is inf and the gradient norm " in capsys.readouterr().out
    before, after = (tensor_files(tmp_path / f"checkpoints/iter_000000{iteration}") for iteration in (2, 3))
    assert before == after
    assert read_layout(tmp_path / "checkpoints/iter_0000003").state["train"]["optimizer_steps"] == 2


def test_an_overflow_counts_as_bad_only_at_the_minimum_loss_scale(tmp_path):
    """These gradients overflow at any larger scale."""

    def step(run: Run, microbatches):
        def finalize_grads(ddp, table, ctx):
            if run.optimizer.scaler.scale > 1:
                next(iter(ddp.main_grads.values()))[0] = math.inf

        with mock.patch("megatron_lite.training.step.finalize_grads", finalize_grads):
            return train_step(run, microbatches)

    with mock.patch("megatron_lite.training.loop.train_step", step):
        train_to_end(tmp_path, "gpt", train__iterations=4, **FP16, optim__initial_loss_scale=4)
    assert [row["skipped"] for row in rows(tmp_path)] == [True, True, False, False]


def train_with_two_losses(folder: str) -> tuple[list[float], list[str]]:
    """Train with a wrong loss on one tensor-parallel rank in one iteration, as from broken memory."""

    def step(run: Run, microbatches):
        def damaged_sum(run, forward_step, sums):
            total = sum_over_pipeline(run, forward_step, sums)
            total[0] *= 3 if run.ctx.rank and run.state.iteration == 12 else 1
            return total

        with mock.patch("megatron_lite.training.step.sum_over_pipeline", damaged_sum):
            report = train_step(run, microbatches)
        reports.append(report)
        return report

    reports: list[StepReport] = []
    with mock.patch("megatron_lite.training.loop.train_step", step):
        train_to_end(Path(folder), "gpt", train__iterations=14, parallel__tensor=2, faults__spike_factor=1.9)
    return [report.loss for report in reports], [report.bad for report in reports]


def test_all_ranks_skip_the_step_of_a_bad_loss_on_one_rank(ranks, tmp_path):
    """If one rank stepped while another skipped, their halves of the model would differ without an error."""
    first, second = ranks(2, train_with_two_losses, str(tmp_path))
    assert first == second
    assert first[1] == [""] * 12 + ["spike", ""]


def test_a_rollback_waits_for_the_checkpoint_that_is_being_saved(tmp_path, capsys):
    def slow_save(*args, **options):
        time.sleep(0.3)
        return save(*args, **options)

    save = store.save
    changes = {"faults__on_nan": "rollback", "checkpoint__async_save": "true", "checkpoint__interval": 3}
    with mock.patch.object(store, "save", slow_save):
        train_with_bad_data(str(tmp_path), 7, "nan", changes)
    assert "weights and optimizer are those of iteration 6; the data of iterations 7 to 7" in capsys.readouterr().out


def test_a_rollback_renames_a_damaged_checkpoint(tmp_path, capsys):
    """Otherwise every start would try to load it."""

    def step(run: Run, microbatches):
        if run.state.iteration + 1 == 7:
            flip_a_bit(tmp_path / "checkpoints/iter_0000006")
            microbatches[0].loss_mask[0, 0] = math.nan
        return train_step(run, microbatches)

    changes = {"faults__on_nan": "rollback", "checkpoint__fallback": "true", "checkpoint__interval": 3}
    with mock.patch("megatron_lite.training.loop.train_step", step):
        train_to_end(tmp_path, "gpt", train__iterations=8, **changes)
    out = capsys.readouterr().out
    assert "DAMAGED checkpoint" in out and "weights and optimizer are those of iteration 3; the data of" in out
    assert not (tmp_path / "checkpoints/iter_0000006").exists()


def test_a_rollback_keeps_the_data_position_of_a_longer_run(tmp_path):
    """The checkpoint is from a run with fewer iterations, and so with fewer samples."""
    train_to_end(tmp_path, "gpt", train__iterations=4)
    changes = {"faults__on_nan": "rollback", "train__iterations": 9, "checkpoint__interval": 1000}
    train_with_bad_data(str(tmp_path), 7, "nan", changes)
    state = read_layout(tmp_path / "checkpoints/iter_0000009").state["train"]
    assert (state["iteration"], state["consumed_samples"], state["rollbacks"]) == (9, 9 * 8, 1)


def test_rollbacks_and_skipped_steps_are_printed(tmp_path, capsys):
    changes = {"faults__on_nan": "rollback", "faults__spike_factor": 1.01, "train__iterations": ENOUGH_LOSSES + 6}
    train_with_bad_data(str(tmp_path / "nan"), 7, "nan", changes)
    train_with_bad_data(str(tmp_path / "spike"), ENOUGH_LOSSES + 3, "spike", changes | {"optim__lr": 2e-2})
    out = unwrapped(capsys.readouterr().out)
    assert "ROLLING BACK from iteration 7: the loss is nan and the gradient norm nan\n" in out
    assert "the data of iterations 5 to 7 is skipped, and training continues at iteration 8\n" in out
    assert "SKIPPED iteration 13: the loss is " in out
    assert "times the mean of recent ones (" in out and "): no weight changes\n" in out


def test_a_spike_is_far_above_the_mean_of_recent_losses():
    """The mean of a few losses is no reliable reference, and old losses must lose their influence."""
    faults = tiny_config("gpt", faults__spike_factor=2).faults
    state = TrainState()
    for _ in range(ENOUGH_LOSSES - 1):
        state.remember(10.0)
        assert not state.is_spike(1000.0, faults)
    state.remember(10.0)
    assert state.is_spike(20.1, faults) and not state.is_spike(19.9, faults)
    assert not state.is_spike(math.inf, faults)  # faults.on_nan handles infinite losses
    assert not state.is_spike(1000.0, tiny_config("gpt").faults)
    for _ in range(300):
        state.remember(1.0)
    assert state.loss_mean == pytest.approx(1.0, abs=0.05)
    assert TrainState.from_dict(state.to_dict()) == state
    assert TrainState.from_dict({"iteration": 3}).iteration == 3  # from a version with fewer counters
    with pytest.raises(CheckpointError, match=r"unknown counters \(epochs\) of a newer"):
        TrainState.from_dict({"iteration": 3, "epochs": 1})


def errors_after_a_bit_flip(folder: str, rank: int, changes: dict[str, Any]) -> list[str]:
    """This rank's errors of a save and of a step, after one bit of a weight has changed on `rank`."""
    config = tiny_config("gpt", run__dir=folder, faults__check_replicas=1, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    errors = []
    for _ in range(2):
        train_step(run, next_microbatches(run))
    check_replicas_equal(run)
    if ctx.rank == rank:
        parameter = run.params["decoder.layers.1.mlp.linear_fc1.weight"].detach().view(-1)
        bits = parameter.view(torch.int16 if parameter.element_size() == 2 else torch.int32)
        bits[5] ^= 1
    for attempt in (
        lambda: save_run(run, lambda line: None),
        lambda: train_step(run, next_microbatches(run)),
    ):
        try:
            attempt()
        except TrainingError as error:
            errors.append(str(error))
    finalize_megatron()
    return errors


@pytest.mark.parametrize(
    "size, rank, changes, words",
    [
        (4, 2, {}, "rank 2 differs from the other replicas in decoder.layers.1.mlp.linear_fc1.weight"),
        (
            4,
            3,
            {"parallel__tensor": 2},
            "ranks 1, 3 differ in decoder.layers.1.mlp.linear_fc1.weight, and none has a maj",
        ),
        (
            3,
            0,
            {"optim__distributed": "true", "train__precision": "bf16", "train__global_batch_size": 9},
            "rank 0 differs from the other replicas in decoder.layers.1.mlp.linear_fc1.weight",
        ),
        (4, 2, {"parallel__pipeline": 2, "train__precision": "bf16"}, "ranks 2, 3 differ in decoder.layers.1.mlp"),
    ],
)
def test_a_bit_flip_in_a_replica_is_an_error_before_a_save_or_a_step(ranks, tmp_path, size, rank, changes, words):
    """Gradients of a damaged replica would enter all others, where no later check could find them.

    In low precision, the next step would overwrite the damaged weight.
    """
    for saving, training in ranks(size, errors_after_a_bit_flip, str(tmp_path), rank, changes):
        for text in (saving, training):
            assert f"data-parallel replicas differ: {words}" in text
        assert "check_replicas: data" in training
