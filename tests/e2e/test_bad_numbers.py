"""A loss that is not finite, or far above the others: skipped, rolled back from, or the end, as the config says."""

import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.errors import TrainingError
from megatron_lite.training.checkpointing import checkpoints_of, load_run, save_run
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.replicas import refuse_replicas_apart
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.state import ENOUGH_LOSSES, TrainState
from megatron_lite.training.step import StepReport, advance, train_step
from tests.e2e.test_resume import rows, run_to_the_end, tensor_files
from tests.e2e.tiny import gather, model_with_biases, portion, tiny_config
from tests.ranks import RanksFailed

ENGINES = {
    "alone": (1, {}),
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
    """Inside, one iteration has a loss that is not finite on one rank, or data that nothing could predict on all."""

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


def train_over(folder: str, iteration: int, kind: str, changes: dict[str, Any]) -> None:
    with bad_data(iteration, kind):
        run_to_the_end(Path(folder), "gpt", **(LENGTH | changes))


def weights_and_state(folder: str, at: int, changes: dict[str, Any]) -> tuple[dict[str, torch.Tensor], TrainState]:
    """What a checkpoint holds."""
    config = tiny_config("gpt", run__dir=folder, **(LENGTH | changes))
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    load_run(run, checkpoints_of(folder), at)
    found = gather(run), run.state
    finalize_megatron()
    return found


def train_but_leave_out(folder: str, left_out: range, changes: dict[str, Any]) -> None:
    """The same run, in which nothing but the counters moves in some iterations."""

    def step(run: Run, microbatches):
        if run.state.iteration + 1 not in left_out:
            return train_step(run, microbatches)
        advance(run, microbatches, skipped=True)
        return StepReport(0.0, 0.0, 0.0, 1.0, skipped=True)

    with mock.patch("megatron_lite.training.loop.train_step", step):
        run_to_the_end(Path(folder), "gpt", **(LENGTH | changes))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rollback_goes_on_from_the_checkpoint_with_the_data_after(ranks, tmp_path, engine):
    """To the bit: weights, moments, learning rate and random streams of the checkpoint, and none of the bad data."""
    size, changes = ENGINES[engine]
    changes = changes | {"faults__on_nan": "rollback", "model__hidden_dropout": 0.1}
    ranks(size, train_over, str(tmp_path / "bad"), 7, "nan", changes)
    ranks(size, train_but_leave_out, str(tmp_path / "expected"), range(5, 8), changes)
    newest = "checkpoints/iter_0000009"
    assert tensor_files(tmp_path / "bad" / newest) == tensor_files(tmp_path / "expected" / newest)
    state, expected = (read_layout(tmp_path / name / newest).state for name in ("bad", "expected"))
    assert state == expected
    assert [row["iteration"] for row in rows(tmp_path / "bad")] == list(range(1, 10))


@pytest.mark.parametrize("engine", ["alone", "dp 2 distributed bf16", "pp 2 dp 2"])
@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_a_skipped_step_changes_nothing_but_the_place_in_the_data(ranks, tmp_path, engine, kind):
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
    ranks(size, train_over, str(tmp_path), bad, kind, changes)
    (before, _), *_ = ranks(size, weights_and_state, str(tmp_path), bad - 1, changes)
    (weights, state), *_ = ranks(size, weights_and_state, str(tmp_path), bad, changes)
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert (state.iteration, state.optimizer_steps, state.skipped, state.bad_in_a_row) == (bad, bad - 1, 1, 1)
    assert state.consumed_samples == 8 * bad
    (after, last), *_ = ranks(size, weights_and_state, str(tmp_path), bad + 1, changes)
    assert not all(torch.equal(after[name], before[name]) for name in before)
    assert (last.skipped, last.bad_in_a_row) == (1, 0)
    row = rows(tmp_path)[bad - 1]
    assert row["skipped"] and math.isfinite(row["loss"]) == (kind == "spike")


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
            "(the loss of rank 1 is not finite); there is no checkpoint to roll back to. Lower optim.lr",
        ),
    ],
)
def test_a_run_that_stops_says_why(ranks, tmp_path, kind, changes, words):
    with pytest.raises(RanksFailed) as raised:
        ranks(2, train_over, str(tmp_path), 7, kind, changes)
    assert words in str(raised.value)


def test_a_run_in_which_nothing_but_bad_iterations_come_stops(tmp_path):
    """For ever skipped, it would look as if it trained."""

    def step(run: Run, microbatches):
        microbatches[0].loss_mask[0, 0] = math.nan
        return train_step(run, microbatches)

    changes = LENGTH | {"faults__on_nan": "skip", "faults__patience": 3}
    with (
        mock.patch("megatron_lite.training.loop.train_step", step),
        pytest.raises(TrainingError, match=r"^iteration 4: .*, the 4th time in a row; .* faults.patience is 3\. Lower"),
    ):
        run_to_the_end(tmp_path, "gpt", **changes)


def test_what_was_done_about_a_bad_loss_is_said(tmp_path, capsys):
    changes = {"faults__on_nan": "rollback", "faults__spike_factor": 1.01, "train__iterations": ENOUGH_LOSSES + 6}
    train_over(str(tmp_path / "nan"), 7, "nan", changes)
    train_over(str(tmp_path / "spike"), ENOUGH_LOSSES + 3, "spike", changes | {"optim__lr": 2e-2})
    said = capsys.readouterr().out
    assert " ROLLING BACK from iteration 7: the loss is nan and the gradient norm nan\n" in said
    assert (
        " weights and optimizer are those of iteration 4; the data of iterations 5 to 7 is skipped, and training goes "
        "on with iteration 8\n"
    ) in said
    assert " SKIPPED iteration 13: the loss is " in said
    assert (
        "times the mean of recent ones (" in said
        and "): nothing is changed, and its data is not learned from\n" in said
    )


def test_a_spike_is_far_above_the_mean_of_recent_losses():
    """Of few losses there is no mean to speak of, and those of long ago say little."""
    faults = tiny_config("gpt", faults__spike_factor=2).faults
    state = TrainState()
    for _ in range(ENOUGH_LOSSES - 1):
        state.remember(10.0)
        assert not state.is_spike(1000.0, faults)
    state.remember(10.0)
    assert state.is_spike(20.1, faults) and not state.is_spike(19.9, faults)
    assert not state.is_spike(1000.0, tiny_config("gpt").faults)
    for _ in range(300):
        state.remember(1.0)
    assert state.loss_mean == pytest.approx(1.0, abs=0.05)
    assert TrainState.from_dict(state.to_dict()) == state


def one_damaged(rank: int, changes: dict[str, Any]) -> list[str]:
    """What every rank says after a bit of a weight has changed on one."""
    config = tiny_config("gpt", faults__check_replicas=1, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    said = []
    for _ in range(2):
        train_step(run, portion(run))
    refuse_replicas_apart(run)
    if ctx.rank == rank:
        parameter = run.params["decoder.layers.1.mlp.linear_fc1.weight"].detach().view(-1)
        bits = parameter.view(torch.int16 if parameter.element_size() == 2 else torch.int32)
        bits[5] ^= 1
    for attempt in (
        lambda: save_run(run, lambda line: None),
        lambda: train_step(run, portion(run)),
    ):
        try:
            attempt()
        except TrainingError as error:
            said.append(str(error))
    finalize_megatron()
    return said


@pytest.mark.parametrize(
    "size, rank, changes, who",
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
def test_a_replica_in_which_a_bit_has_changed_is_named_before_it_is_saved_or_learned_from(
    ranks, size, rank, changes, who
):
    """Gradients of a damaged replica would be summed into all others, and no later check would see them. Of low
    precision the next step would even mend the weight."""
    for said in ranks(size, one_damaged, rank, changes):
        saving, training = said
        for text in (saving, training):
            assert f"data-parallel replicas are not equal any more: {who}" in text
        assert "check_replicas: data" in training
