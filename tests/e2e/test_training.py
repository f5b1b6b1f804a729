"""Properties of training runs other than parity and resume."""

import gc
import json
import math
import os
import shutil
import signal
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megatron_lite import (
    ConfigError,
    ParamMeta,
    Shard,
    Splits,
    declare,
    evaluate,
    finalize_megatron,
    get_model,
    initialize_megatron,
    initialize_parameters,
    pretrain,
    setup_model_and_optimizer,
    train_step,
)
from megatron_lite.errors import TrainingError
from megatron_lite.evaluation.statistics import comparison_line
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.parallel.embedding import VocabParallelEmbedding
from megatron_lite.parallel.linear import column_parallel_linear
from megatron_lite.parallel.loss import vocab_parallel_cross_entropy
from megatron_lite.training import loop
from megatron_lite.training.faults import answer_bad_values
from megatron_lite.training.initialize import choose_device, set_determinism
from megatron_lite.training.run import Run
from megatron_lite.training.signals import StopRequest
from tests.helpers.runs import CountingDataset, counting_splits, rows
from tests.helpers.tiny import MODELS, next_microbatches, tiny_config, train_tiny


def set_up(model: str, **changes):
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng)


def test_two_deterministic_runs_are_equal_bit_for_bit(ranks):
    """A user could not repeat a run, here one with dropout."""
    changes = {"parallel__tensor": 2, "train__deterministic": "true", "model__hidden_dropout": 0.1}
    first, second = (ranks(2, train_tiny, "codegeex", **changes)[0] for _ in range(2))
    assert torch.equal(first["loss"], second["loss"])
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name


def is_torch_deterministic() -> bool:
    initialize_megatron(tiny_config("gpt", train__deterministic="true"))
    finalize_megatron()
    return torch.are_deterministic_algorithms_enabled()


def test_train_deterministic_sets_deterministic_algorithms_of_torch(ranks):
    assert ranks(1, is_torch_deterministic) == [True]


def is_engine_freed(**changes) -> bool:
    """True if the data-parallel engine is garbage-collected after a training step."""

    def train() -> weakref.ref:
        run = set_up("gpt", train__micro_batch_size=2, **changes)
        train_step(run, next_microbatches(run))
        return weakref.ref(run.ddp)

    engine = train()
    finalize_megatron()
    return engine() is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim__distributed": "true"},
        {"parallel__ddp": "torch"},
        {"parallel__ddp": "fsdp"},
        {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 1},
    ],
)
def test_a_finished_run_frees_its_engine(ranks, changes):
    """Otherwise a second run in the same process would have less memory and fewer threads.

    Stage 3 of DeepSpeed is not tested: reference cycles that the garbage collector cannot find keep it alive.
    """
    assert all(ranks(2, is_engine_freed, **changes))


def losses_of(seed: int) -> list[float]:
    run = set_up("gpt", run__seed=seed)
    losses = [train_step(run, next_microbatches(run)).loss for _ in range(2)]
    finalize_megatron()
    return losses


def test_another_seed_gives_other_losses(ranks):
    (one,), (two,) = ranks(1, losses_of, 1), ranks(1, losses_of, 2)
    assert one != two


def overfit(model: str) -> tuple[float, float]:
    run = set_up(model, train__micro_batch_size=8, train__iterations=60, optim__lr=0.01, optim__clip_grad=1.0)
    batch = next_microbatches(run)
    losses = [train_step(run, batch).loss for _ in range(60)]
    finalize_megatron()
    return losses[0], losses[-1]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_overfits_one_batch(ranks, model):
    """A model that trains correctly gets from ln 250 = 5.5 nats to almost zero."""
    ((first, last),) = ranks(1, overfit, model)
    assert first > 5
    assert last < 0.5


def evaluation_twice() -> list[float]:
    run = set_up("codegeex", model__hidden_dropout=0.1, train__eval_iterations=2, train__micro_batch_size=4)
    before = {name: state.clone() for name, state in run.rng.state_dict().items()}
    data = CountingDataset(100, run.config.data.seq_length, run.config.model.vocab_size)
    found = [evaluate(run, data, -1) for _ in range(2)]
    assert all(torch.equal(before[name], state) for name, state in run.rng.state_dict().items())
    assert run.model[0].training
    finalize_megatron()
    return found


def test_two_evaluations_are_equal_and_do_not_change_random_streams(ranks):
    """Evaluation has no dropout and always reads the same samples."""
    ((first, second),) = ranks(1, evaluation_twice)
    assert first == second
    ((split_first, _), _) = ranks(2, evaluation_twice)  # two data-parallel ranks read the same samples together
    assert split_first == pytest.approx(first, rel=1e-5)


def error_of_a_nan_weight() -> str:
    """Check that a step with a nan weight changes no parameter; returns its error."""
    run = set_up("gpt")
    with torch.no_grad():
        run.params["decoder.final_layernorm.weight"].fill_(math.nan)
    before = {name: tensor.detach().clone() for name, tensor in run.params.items()}
    report = train_step(run, next_microbatches(run))
    assert math.isnan(report.loss)
    for name, tensor in run.params.items():
        assert torch.equal(tensor.isnan(), before[name].isnan()), name  # the step was not applied
    finalize_megatron()
    with pytest.raises(TrainingError) as raised:
        answer_bad_values(run, report, print)
    return str(raised.value)


def test_a_nan_loss_stops_training(ranks):
    (message,) = ranks(1, error_of_a_nan_weight)
    assert message.startswith("iteration 1: the loss is nan and the gradient norm nan; training stops")


def overflowing_steps() -> list[tuple[bool, float, float]]:
    """(skipped, loss scale, learning rate) of three steps that overflow."""
    run = set_up("gpt", train__precision="fp16", optim__initial_loss_scale=2.0**40, optim__hysteresis=1)
    reports = [train_step(run, next_microbatches(run)) for _ in range(3)]
    assert run.state.skipped == 3
    assert run.state.optimizer_steps == 0
    assert run.state.consumed_samples == 24
    finalize_megatron()
    return [(report.skipped, report.loss_scale, report.lr) for report in reports]


def test_a_skipped_step_consumes_data_but_is_not_an_optimizer_step(ranks):
    (found,) = ranks(1, overflowing_steps)
    assert found == [(True, 2.0**40, 0.0), (True, 2.0**39, 0.0), (True, 2.0**38, 0.0)]


@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        ("bf16", "local"),
        ("fp16", "torch"),
        pytest.param("fp16", "local", marks=pytest.mark.soak),
        pytest.param("bf16", "torch", marks=pytest.mark.soak),
    ],
)
def test_losses_in_bf16_and_fp16_follow_fp32(ranks, precision, engine):
    """These dtypes have about three digits, so losses must agree to 1 %."""
    exact = ranks(1, train_tiny, "codegeex", train__micro_batch_size=8)[0]["loss"]
    scale = {"optim__initial_loss_scale": 128.0}
    changes = {"train__precision": precision, "parallel__ddp": engine, "train__micro_batch_size": 2, **scale}
    for got in ranks(4, train_tiny, "codegeex", parallel__tensor=2, **changes):
        assert ((got["loss"] - exact).abs() / exact).max() < 0.01


def no_vocabulary(folder: str) -> None:
    config = tiny_config("gpt", run__dir=folder, model__vocab_size=0)
    pretrain(config, datasets_provider=counting_splits)


def no_training_split(folder: str) -> None:
    def provider(run):
        return counting_splits(run)._replace(train=None)

    pretrain(tiny_config("gpt", run__dir=folder), datasets_provider=provider)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (no_vocabulary, "data.tokenizer and model.vocab_size are both missing"),
        (no_training_split, "data.split.0. is 0, so there is no training data"),
    ],
)
def test_the_error_of_a_run_without_vocabulary_or_data_names_the_key(ranks, tmp_path, mistake, words):
    with pytest.raises(AssertionError, match=words):
        ranks(1, mistake, str(tmp_path / "run"))


def test_device_cuda_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"run\.device is cuda, but torch sees no GPU"):
        choose_device("cuda", 0)


def test_more_ranks_than_gpus_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="this machine has 1 GPU for at least 2 processes; start at most 1"):
        choose_device("auto", 1)


class CustomModel(nn.Module):
    """A custom model: a split layer of this package, a plain layer with a ParamMeta, and a forward without layout."""

    def __init__(self, config, ctx, dtype, describe: bool = True):
        super().__init__()
        h, v = config.model.hidden_size, config.model.padded_vocab
        factory = {"dtype": dtype, "device": ctx.device}
        self.tp = ctx.tp
        self.embedding = VocabParallelEmbedding(v, h, tp=ctx.tp, init_std=0.2, **factory)
        self.mix = nn.Linear(h, h, **factory)
        if describe:
            declare(self.mix.weight, ParamMeta(shape=(h, h), shard=Shard(), init="normal", std=0.2))
            declare(self.mix.bias, ParamMeta(shape=(h,), shard=Shard(), init="zeros", decay=False))

    def forward(self, tokens, labels):
        x = torch.tanh(self.mix(self.embedding(tokens.t())))
        logits = column_parallel_linear(x, self.embedding.weight, None, self.tp)
        return vocab_parallel_cross_entropy(logits, labels.t(), self.tp)


def custom_provider(config, ctx, rng, dtype, fill: bool = True, **options):
    model = CustomModel(config, ctx, dtype, **options)
    if fill:
        initialize_parameters([model], ctx, config.run.seed)
    return [model]


def train_custom(fill: bool = True, **changes) -> tuple[list[float], dict]:
    config = tiny_config("gpt", train__micro_batch_size=2, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, partial(custom_provider, fill=fill))
    losses = [train_step(run, next_microbatches(run)).loss for _ in range(5)]
    weights = {name: parameter.detach().clone() for name, parameter in run.params.items()}
    finalize_megatron()
    return losses, weights


def test_a_custom_model_has_the_same_losses_on_any_layout(ranks):
    ((expected, _),) = ranks(1, train_custom)
    for losses, _ in ranks(4, train_custom, parallel__tensor=2):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_replicas_of_a_custom_model_start_with_equal_weights(ranks):
    """Only gradients are summed, so replicas with different initial weights would stay different."""
    (_, first), (_, second) = ranks(2, train_custom, fill=False)
    assert torch.equal(first["mix.weight"], second["mix.weight"])
    assert torch.equal(first["mix.bias"], second["mix.bias"])


def without_description() -> None:
    config = tiny_config("gpt")
    ctx, rng = initialize_megatron(config)
    setup_model_and_optimizer(config, ctx, rng, partial(custom_provider, fill=False, describe=False))


def with_a_buffer() -> None:
    def provider(*args, **options):
        model = get_model(*args, **options)
        model[0].register_buffer("steps", torch.zeros(1))
        return model

    config = tiny_config("gpt")
    ctx, rng = initialize_megatron(config)
    setup_model_and_optimizer(config, ctx, rng, provider)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (without_description, r"parameter mix\.weight, shape \[32, 32\], has no description; create it as"),
        (
            with_a_buffer,
            "checkpoints do not save the model's buffers steps; make them parameters, or persistent=False",
        ),
    ],
)
def test_a_model_that_cannot_be_saved_or_resharded_is_an_error(ranks, mistake, words):
    with pytest.raises(AssertionError, match=words):
        ranks(1, mistake)


def train_with_another_output(returned: str) -> None:
    config = tiny_config("gpt")
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, custom_provider)
    make = {"mean": lambda losses: losses.mean(), "transposed": lambda losses: losses.t(), "pair": lambda x: (x, None)}
    run.model[0].register_forward_hook(lambda module, inputs, losses: make[returned](losses))
    train_step(run, next_microbatches(run))


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ("mean", r"a tensor of shape \[\] and .*"),
        ("transposed", r"a tensor of shape \[1, 16\] and .*"),
        ("pair", "a tuple of 2"),
    ],
)
def test_a_model_that_does_not_return_the_loss_of_every_token_is_an_error(ranks, returned, got):
    """The mean over a micro-batch would train, but weight each token by the number of others in its micro-batch."""
    with pytest.raises(
        RanksFailed, match=rf"the model.s last stage returned {got}; it must return the loss of every token"
    ):
        ranks(1, train_with_another_output, returned)


def train_in(folder: str, **changes) -> None:
    """Train in `folder`, from its newest checkpoint if it has one."""
    config = tiny_config("gpt", run__dir=folder, train__micro_batch_size=1, checkpoint__interval=1, **changes)
    pretrain(config, datasets_provider=counting_splits)


def test_a_run_resumes_under_another_data_parallel_size_with_the_same_losses(ranks, tmp_path):
    """The next samples and the optimizer state must not depend on the number of replicas."""
    ranks(1, train_in, str(tmp_path / "one_rank"), train__iterations=4)
    ranks(2, train_in, str(tmp_path / "moved"), train__iterations=2, optim__decay_iterations=4)
    ranks(1, train_in, str(tmp_path / "moved"), train__iterations=4)
    expected, found = ([row["loss"] for row in rows(tmp_path / name)] for name in ("one_rank", "moved"))
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-5)


class RecordedDataset(CountingDataset):
    """Notes which samples are read."""

    def __init__(self, *arguments: int):
        super().__init__(*arguments)
        self.numbers: list[int] = []

    def __getitem__(self, number: int):
        self.numbers.append(number)
        return super().__getitem__(number)


def samples_of_growing_batches(folder: str) -> list[int]:
    """The samples of two iterations, and of two more after a resume, in the order in which they were read."""
    data = RecordedDataset(1000, 16, 250)
    for iterations in (2, 4):
        changes = {"train__iterations": iterations, "optim__decay_iterations": 4, "train__ramp_up": "[2,2,6]"}
        config = tiny_config("gpt", run__dir=folder, train__micro_batch_size=2, checkpoint__interval=2, **changes)
        pretrain(config, datasets_provider=lambda run: Splits(train=data, valid=None, test=None))
    return data.numbers


def test_growing_batches_read_every_sample_once(ranks, tmp_path):
    """A place that is computed from the number of iterations would repeat samples; so would a resume from there."""
    (numbers,) = ranks(1, samples_of_growing_batches, str(tmp_path))
    consumed = rows(tmp_path)[-1]["consumed_samples"]
    assert consumed > 4 * 2  # the batch has grown
    assert list(dict.fromkeys(numbers))[:consumed] == list(range(consumed))


@pytest.fixture(scope="module")
def two_iterations(ranks, tmp_path_factory) -> Path:
    """The folder of a finished run. Tests only read it."""
    folder = tmp_path_factory.mktemp("two_iterations")
    ranks(1, train_in, str(folder), train__iterations=2)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run__seed": 5}, r"run\.seed \(checkpoint: 1234, config: 5\)"),
        ({"data__seq_length": 8}, r"data\.seq_length \(checkpoint: 16, config: 8\)"),
        (
            {"data__split": "[1,1,0]"},
            r"data\.split \(checkpoint: \[969\.0, 30\.0, 1\.0\], config: \[1\.0, 1\.0, 0\.0\]\)",
        ),
        ({"data__paths": "[elsewhere/b]"}, r"data\.paths \(checkpoint: \[\], config: \['b'\]\)"),
    ],
)
def test_a_config_change_that_reorders_the_samples_is_an_error(ranks, tmp_path, two_iterations, change, words):
    shutil.copytree(two_iterations, tmp_path / "run")
    with pytest.raises(AssertionError, match=rf"{words}: the samples or their order would change"):
        ranks(1, train_in, str(tmp_path / "run"), train__iterations=3, **change)


def test_a_killed_evaluation_runs_at_the_next_start(ranks, tmp_path):
    ranks(1, evaluated_run, str(tmp_path))
    metrics = tmp_path / "metrics.jsonl"
    complete = metrics.read_text()
    assert "validation_loss" in complete
    metrics.write_text("".join(line for line in complete.splitlines(True) if "validation_loss" not in line))
    for _ in range(2):  # the second start finds the evaluation in metrics.jsonl
        ranks(1, evaluated_run, str(tmp_path))
        assert metrics.read_text().splitlines()[-1] == complete.splitlines()[-1]
        assert len(metrics.read_text().splitlines()) == len(complete.splitlines())


def evaluated_run(folder: str) -> None:
    def provider(run):
        train = counting_splits(run).train
        return Splits(train=train, valid=train, test=None)

    config = tiny_config("gpt", run__dir=folder, train__iterations=2, train__eval_iterations=1)
    pretrain(config, datasets_provider=provider)


def signal_rank_1() -> str:
    """Send stop signals to rank 1; returns the reason that all ranks agree on."""
    config = tiny_config("gpt")
    ctx, _ = initialize_megatron(config)
    with StopRequest() as stop:
        assert stop.agreed(ctx) == ""
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)  # a second signal has no effect
        found = stop.agreed(ctx)
    finalize_megatron()
    return found


def test_a_signal_to_one_rank_stops_all_ranks(ranks):
    assert ranks(2, signal_rank_1) == ["after receiving SIGTERM"] * 2


def evaluate_with_eod(masked: bool) -> tuple[float, str]:
    """The validation loss of data with many end-of-document tokens, and the line that compares it; `masked` sets
    data.eod_mask_loss."""
    run = set_up("gpt", train__eval_iterations=1, train__micro_batch_size=4, data__eod_mask_loss=str(masked).lower(),
                 model__vocab_size=257, data__tokenizer="bytes")  # fmt: skip
    data = CountingDataset(20, run.config.data.seq_length, 8)  # ids below 8, so that id 3 is frequent
    loss = evaluate(run, data, 3)
    line = comparison_line(run, loss, data, 3)
    finalize_megatron()
    return loss, line


def test_evaluation_and_the_entropy_beside_it_respect_eod_mask_loss(ranks):
    """The entropy of other tokens than those of the loss would make a model look better or worse than it is."""
    ((loss, line),), ((other_loss, other_line),) = (ranks(1, evaluate_with_eod, masked) for masked in (True, False))
    assert loss != other_loss
    data = CountingDataset(20, 16, 8)
    samples = [data[number] for number in range(8)]  # a global batch
    for text, targets in (
        (line, np.concatenate([sample[1:][sample[:-1] != 3] for sample in samples])),
        (other_line, np.concatenate([sample[1:] for sample in samples])),
    ):
        shares = np.bincount(targets) / len(targets)
        entropy = -sum(share * math.log(share) for share in shares if share)
        assert f"unigram entropy {entropy:.3f}, " in text


def short_splits(run: Run) -> Splits:
    return Splits(CountingDataset(1_000, run.config.data.seq_length // 2, run.config.model.vocab_size), None, None)


def test_tokens_per_second_counts_the_tokens_that_the_model_reads(tmp_path):
    """Custom samples can be shorter than data.seq_length; tokens that no sample has would make a run look faster."""
    config = tiny_config("gpt", run__dir=str(tmp_path), train__iterations=2)
    pretrain(config, datasets_provider=short_splits)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(config.train.global_batch(1) * 8)


def test_garbage_is_collected_at_fixed_iterations_only(tmp_path, monkeypatch):
    """The pauses of automatic collections would come at another time on each rank, and all others would wait."""
    seen: list[int | bool] = []
    # Of what runs inside the loop: generations that were collected, and whether automatic collection is on.
    monkeypatch.setattr(loop, "COLLECTION_INTERVAL", 2)
    monkeypatch.setattr(loop.gc, "collect", lambda generation=2: seen.append(generation))
    config = tiny_config("gpt", run__dir=str(tmp_path), train__iterations=5)
    pretrain(config, datasets_provider=counting_splits, after_step=lambda run, report: seen.append(gc.isenabled()))
    assert gc.isenabled()
    first, last = seen.index(False), len(seen) - 1 - seen[::-1].index(False)
    assert seen[first : last + 1] == [False, False, 1, False, False, 1, False]


def test_determinism_costs_no_pass_over_new_memory_and_products_sum_in_fp32():
    set_determinism(False)
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False
