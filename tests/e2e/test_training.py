"""Properties of whole runs besides parity and resume."""

import math

import pytest
import torch

from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.initialize import choose_device, finalize_megatron, initialize_megatron
from megatron_lite.training.loop import refuse_bad_numbers
from megatron_lite.training.pretrain import pretrain
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.e2e.test_resume import Counting, counting_splits
from tests.e2e.tiny import MODELS, portion, tiny_config, train_tiny


def run_of(model: str, **changes):
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng)


def test_deterministic_runs_give_the_same_bits(ranks):
    """Repeatability: two runs of one command, with dropout, are equal to the bit."""
    changes = {"parallel__tensor": 2, "train__deterministic": "true", "model__hidden_dropout": 0.1}
    first, second = (ranks(2, train_tiny, "codegeex", **changes)[0] for _ in range(2))
    assert torch.equal(first["loss"], second["loss"])
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name


def determinism_set() -> bool:
    initialize_megatron(tiny_config("gpt", train__deterministic="true"))
    finalize_megatron()
    return torch.are_deterministic_algorithms_enabled()


def test_deterministic_asks_torch_for_it(ranks):
    assert ranks(1, determinism_set) == [True]


def losses_of(seed: int) -> list[float]:
    run = run_of("gpt", run__seed=seed)
    losses = [train_step(run, portion(run)).loss for _ in range(2)]
    finalize_megatron()
    return losses


def test_another_seed_is_another_model(ranks):
    (one,), (two,) = ranks(1, losses_of, 1), ranks(1, losses_of, 2)
    assert one != two


def overfit(model: str) -> tuple[float, float]:
    run = run_of(model, train__micro_batch_size=8, train__iterations=60, optim__lr=0.01, optim__clip_grad=1.0)
    batch = portion(run)
    losses = [train_step(run, batch).loss for _ in range(60)]
    finalize_megatron()
    return losses[0], losses[-1]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_a_batch_by_heart(ranks, model):
    """What trains must be able to overfit: from ln 250 = 5.5 nats to almost nothing."""
    ((first, last),) = ranks(1, overfit, model)
    assert first > 5
    assert last < 0.5


def evaluation_twice() -> list[float]:
    run = run_of("codegeex", model__hidden_dropout=0.1, train__eval_iterations=2, train__micro_batch_size=4)
    before = {name: state.clone() for name, state in run.rng.state_dict().items()}
    data = Counting(100, run.config.data.seq_length, run.config.model.vocab_size)
    found = [evaluate(run, data, -1) for _ in range(2)]
    assert all(torch.equal(before[name], state) for name, state in run.rng.state_dict().items())
    assert run.model[0].training
    finalize_megatron()
    return found


def test_evaluation_repeats_itself_and_disturbs_nothing(ranks):
    """Dropout is off, the same samples are read, and the random streams of training stay where they were."""
    ((first, second),) = ranks(1, evaluation_twice)
    assert first == second
    ((split_first, _), _) = ranks(2, evaluation_twice)  # two data-parallel ranks read the same samples together
    assert split_first == pytest.approx(first, rel=1e-5)


def poisoned() -> str:
    run = run_of("gpt")
    with torch.no_grad():
        run.params["decoder.final_layernorm.weight"].fill_(math.nan)
    before = {name: tensor.detach().clone() for name, tensor in run.params.items()}
    report = train_step(run, portion(run))
    assert math.isnan(report.loss)
    for name, tensor in run.params.items():
        assert torch.equal(tensor.isnan(), before[name].isnan()), name  # the step was not applied
    finalize_megatron()
    with pytest.raises(TrainingError) as raised:
        refuse_bad_numbers(run, report)
    return str(raised.value)


def test_a_loss_that_is_no_number_stops_training(ranks):
    (message,) = ranks(1, poisoned)
    assert message.startswith("iteration 1: the loss is nan and the gradient norm nan; the step was not applied")


def skipping() -> list[tuple[bool, float, float]]:
    run = run_of("gpt", train__precision="fp16", optim__initial_loss_scale=2.0**40, optim__hysteresis=1)
    reports = [train_step(run, portion(run)) for _ in range(3)]
    assert run.state.skipped == 3
    assert run.state.optimizer_steps == 0
    assert run.state.consumed_samples == 24
    finalize_megatron()
    return [(report.skipped, report.loss_scale, report.lr) for report in reports]


def test_a_skipped_step_consumes_data_but_is_no_step(ranks):
    (found,) = ranks(1, skipping)
    assert found == [(True, 2.0**40, 0.0), (True, 2.0**39, 0.0), (True, 2.0**38, 0.0)]


@pytest.mark.parametrize("engine", ["local", "torch"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_fp32(ranks, precision, engine):
    """A layout in bf16 or fp16 trains the model that fp32 trains, to the 3 digits or so that the format has."""
    exact = ranks(1, train_tiny, "codegeex", train__micro_batch_size=8)[0]["loss"]
    scale = {"optim__initial_loss_scale": 128.0}
    changes = {"train__precision": precision, "parallel__ddp": engine, "train__micro_batch_size": 2, **scale}
    for got in ranks(4, train_tiny, "codegeex", parallel__tensor=2, **changes):
        assert ((got["loss"] - exact).abs() / exact).max() < 0.01


def no_vocabulary() -> None:
    config = tiny_config("gpt", model__vocab_size=0)
    pretrain(config, datasets_provider=counting_splits)


def no_training_split() -> None:
    def provider(run):
        return counting_splits(run)._replace(train=None)

    pretrain(tiny_config("gpt"), datasets_provider=provider)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (no_vocabulary, "model.vocab_size is not given and there is no data.tokenizer"),
        (no_training_split, "data.split gives the training part nothing"),
    ],
)
def test_a_run_without_its_needs_says_so(ranks, tmp_path, monkeypatch, mistake, words):
    with pytest.raises(AssertionError, match=words):
        ranks(1, mistake)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"run\.device is cuda, but torch sees no GPU"):
        choose_device("cuda", 0)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="this machine has 1 GPU for at least 2 processes; start at most 1"):
        choose_device("auto", 1)
