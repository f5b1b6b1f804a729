"""The results of a forward step, and messages about wrong ones."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.data.loader import Batch
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import solo
from megatron_lite.training.forward_step import StageModel, Sums, forward_of, means_of, sum_over_pipeline

CPU = torch.device("cpu")
LOSS = torch.tensor(6.0)


def test_a_scalar_is_divided_by_the_targets_or_by_its_own_count():
    sums = Sums(None, CPU)
    sums.add((LOSS, 2, {"a": 1.0, "b": (torch.tensor(3.0), 4)}))
    sums.add((LOSS, torch.tensor(4.0), {"b": (5.0, torch.tensor(12)), "a": torch.tensor([2.0])}))
    assert sums.names is not None
    means = means_of(sums.total().tolist(), sums.names)
    assert (means.loss, means.targets, means.scalars) == (2.0, 6.0, {"a": 0.5, "b": 0.5})


def test_a_step_without_targets_has_a_loss_of_zero_and_no_value_of_its_scalars():
    """A division by zero would stop a run at a batch that is masked as a whole."""
    means = means_of([0.0] * 4, ("a",))
    assert means.loss == 0.0 and math.isnan(means.scalars["a"])


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (LOSS, r"returned a tensor of shape \[\] and torch.float32; it must return \(sum of the losses, number of"),
        ((LOSS, 2), r"returned a tuple of 2; it must return \(sum"),
        ((6.0, 2, {}), "returned 6.0 as its loss; it must return .*, the first as a tensor of one value"),
        ((torch.ones(2), 2, {}), r"returned a tensor of shape \[2\] and torch.float32 as its loss"),
        ((torch.tensor(3), 2, {}), r"returned a tensor of shape \[\] and torch.int64 as its loss"),
        ((LOSS, "2", {}), "returned '2' as number of targets; it must return"),
        ((LOSS, torch.ones(3), {}), r"returned a tensor of shape \[3\] and torch.float32 as number of targets"),
        ((LOSS, 2, None), "returned a NoneType as its scalars"),
        ((LOSS, 2, {3: 1.0}), "named a scalar 3; use a text that names no other value in the logs"),
        ((LOSS, 2, {"seconds": 1.0}), "named a scalar 'seconds'; use a text that names no other"),
        ((LOSS, 2, {"z": torch.ones(2)}), r"returned a tensor of shape \[2\] .* for the scalar 'z'; return a sum over"),
        ((LOSS, 2, {"z": (1.0, 2.0, 3.0)}), r"returned a tuple of 3 for the scalar 'z'; .* or \(sum, count\)"),
        ((LOSS, 2, {"z": True}), "returned True for the scalar 'z'"),
    ],
)
def test_wrong_results_are_described(results, message):
    with pytest.raises(TrainingError, match=f"the forward step {message}"):
        Sums(None, CPU).add(results)


def test_scalars_have_the_same_names_in_every_micro_batch():
    """Sums of different names would be added to each other."""
    sums = Sums(None, CPU)
    sums.add((LOSS, 2, {"a": 1.0}))
    with pytest.raises(TrainingError, match=r"returned the scalars \['b'\], and before \['a'\]; return the same names"):
        sums.add((LOSS, 2, {"b": 1.0}))


def test_a_negative_number_of_targets_is_an_error():
    with pytest.raises(TrainingError, match="the forward step returned -3 targets in all; return their number"):
        means_of([1.0, -3.0], ())


class Stage(nn.Module):
    """Returns its inputs' number, so that a test sees what it got."""

    def forward(self, tokens, labels, hidden=None, **options):
        return torch.tensor(float(hidden is not None) + 2 * len(options))


def run_of(last_stage: int = 0) -> Any:
    pp = SimpleNamespace(rank=0, size=last_stage + 1)
    ctx = SimpleNamespace(pp=pp, world=solo("world"))
    return SimpleNamespace(config=Config(), ctx=ctx, engine=SimpleNamespace(last_stage=last_stage), scalar_names={})


BATCH = Batch(*(torch.ones(1, 2, dtype=torch.long) for _ in range(3)), position_ids=torch.zeros(1, 2, dtype=torch.long))


def test_a_forward_step_ends_at_the_model_on_a_stage_without_a_loss():
    """The rest of the step would compute a loss of hidden states."""

    def step(batch, model):
        try:
            model(batch.tokens)
        except Exception:
            raise AssertionError("caught") from None
        raise AssertionError("reached")

    output = forward_of(run_of(1), [BATCH], lambda chunk: Stage(), step, Sums(None, CPU))(0, 0, None)
    assert output == 2.0  # position_ids are passed on


def test_a_forward_step_without_a_call_of_the_model_is_an_error():
    forward = forward_of(run_of(1), [BATCH], lambda chunk: Stage(), lambda batch, model: (LOSS, 1, {}), Sums(None, CPU))
    with pytest.raises(TrainingError, match=r"returned without a call of the model; call model\(batch.tokens, ...\)"):
        forward(0, 0, None)


def test_a_second_call_of_the_model_is_an_error():
    """Under a pipeline only one of them would have a hidden state."""
    model = StageModel(Stage(), None, {}, is_last=True, config=Config(), ctx=None)  # type: ignore[arg-type]
    model(BATCH.tokens)
    with pytest.raises(TrainingError, match="called the model twice; put both inputs into the rows of one micro-batch"):
        model(BATCH.tokens)


def test_a_decoder_with_token_types_needs_them_in_a_batch_or_a_call():
    """Every token would silently have type 0, as in a corpus."""
    config = Config(model=ModelConfig(num_tokentypes=2))

    def model(**options: Any) -> StageModel:
        return StageModel(Stage(), None, options, is_last=True, config=config, ctx=None)  # type: ignore[arg-type]

    with pytest.raises(
        TrainingError, match="num_tokentypes is 2, and a batch has no `token_types`; give it in samples"
    ):
        model()(BATCH.tokens)
    model(token_types=BATCH.tokens)(BATCH.tokens)
    model()(BATCH.tokens, token_types=BATCH.tokens)


def test_ranks_with_other_scalars_are_an_error(monkeypatch):
    names = [("a", "b"), None, ("b", "a"), ("c",)]
    monkeypatch.setattr("megatron_lite.training.forward_step.all_gather_objects", lambda own, world: names)
    with pytest.raises(TrainingError, match=r"\['a', 'b'\] as scalars on one rank, and on others \['c'\]; return the"):
        sum_over_pipeline(run_of(), lambda batch, model: (LOSS, 1, {}), Sums(None, CPU))
