"""Context parallelism in complete runs: masked ranks, evaluation, packed documents, dropout, custom models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.data.loader import Batch
from megatron_lite.errors import TrainingError
from megatron_lite.model.build import get_model
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import local_batches, train_step
from tests.helpers.command import make_corpus, run_here, tiny_yaml
from tests.helpers.rank_commands import run_on
from tests.helpers.tiny import model_with_biases, next_microbatches, tiny_config


def steps_with_few_targets(**changes: Any) -> list[tuple[float, float]]:
    """Losses and gradient norms of two steps on a sequence whose first two tokens have targets, then on none."""
    config = tiny_config("gpt", train__global_batch_size=1, train__micro_batch_size=1, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    tokens = torch.arange(17)[None] * 5 % 250
    reports = []
    for count in (2, 0):
        mask = (torch.arange(16) < count).float()[None]
        reports.append(train_step(run, local_batches([Batch(tokens[:, :-1], tokens[:, 1:], mask)], ctx.cp)))
    finalize_megatron()
    return [(report.loss, report.grad_norm) for report in reports]


@pytest.mark.parametrize("mode", ["ring", "all_gather", "ulysses"])
def test_ranks_without_a_target_token_change_nothing(ranks, mode):
    """A mean over each rank's own tokens would be nan here, or the loss of half of the sequence."""
    truth = steps_with_few_targets(train__precision="fp64")
    assert truth[0][0] > 0 and truth[1] == (0.0, 0.0)
    changes = {"parallel__context": 2, "parallel__context_mode": mode, "train__precision": "fp64"}
    for found in ranks(2, steps_with_few_targets, **changes):
        assert found[0] == pytest.approx(truth[0], rel=1e-10)
        assert found[1] == (0.0, 0.0)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("validation_loss", row.get("test_loss"))) for row in rows]


def test_a_run_moves_from_one_process_to_a_ring_and_back(ranks, tmp_path):
    """From the command line, on packed documents, with evaluations: the losses of one process."""
    data = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    train = {"iterations": 8, "eval_interval": 2, "eval_iterations": 1}
    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    config = tiny_yaml(tmp_path, make_corpus(tmp_path), train=train, data=data, model=quiet)
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    command = ("pretrain", "--config", str(config))
    assert run_here(*command, f"run.dir={alone}", cwd=tmp_path).returncode == 0
    legs = [
        (1, "train.exit_iteration=2"),
        (2, "train.exit_iteration=4", "parallel.context=2"),
        (2, "train.exit_iteration=6", "parallel.context=2", "parallel.context_mode=ulysses", "optim.distributed=true"),
        (1,),
    ]
    for size, *changes in legs:
        done = run_on(ranks, size, *command, f"run.dir={moved}", *changes, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"context {size}," in done.stdout
    assert losses(moved) == pytest.approx(losses(alone), rel=1e-5)


def losses_with_dropout(**changes: Any) -> list[float]:
    config = tiny_config("gpt", train__micro_batch_size=2, model__hidden_dropout=0.2, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    found = [train_step(run, next_microbatches(run)).loss for _ in range(3)]
    finalize_megatron()
    return found


def test_dropout_works_under_context_parallelism(ranks):
    """Each rank drops units of its own tokens. With ulysses attention drops probabilities too; the ring excludes it."""
    dropped = {"parallel__context": 2, "parallel__context_mode": "ulysses", "model__attention_dropout": 0.3}
    ring = {"parallel__context": 2}
    found = []
    for changes in (dropped, ring):
        first, again = ranks(2, losses_with_dropout, **changes), ranks(2, losses_with_dropout, **changes)
        assert first == again and first[0] == first[1]
        found.append(first[0])
    assert found[0] != found[1]


class Narrow(torch.nn.Module):
    """A chunk without the argument `position_ids`."""

    def __init__(self, chunk: torch.nn.Module):
        super().__init__()
        self.chunk = chunk

    def forward(self, tokens, labels=None, hidden=None):
        return self.chunk(tokens, labels, hidden)


def build_narrow(*args: Any, **options: Any) -> list:
    return [Narrow(chunk) for chunk in get_model(*args, **options)]


def setup_of_a_narrow_model() -> str:
    config = tiny_config("gpt", parallel__context=2)
    ctx, rng = initialize_megatron(config)
    try:
        setup_model_and_optimizer(config, ctx, rng, build_narrow)
    except TrainingError as error:
        return str(error)
    finally:
        finalize_megatron()
    return ""


def test_a_custom_model_needs_position_ids_under_context_parallelism(ranks):
    """It would take a rank's second chunk for the continuation of its first."""
    message = "the forward of Narrow has no argument position_ids, which it gets with data.reset_position_ids, "
    assert ranks(2, setup_of_a_narrow_model)[1].startswith(message)
