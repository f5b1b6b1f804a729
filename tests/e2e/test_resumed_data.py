"""The data of runs that stop and resume: with another batch and length, and as a branch with other data."""

import re

import numpy as np
import pytest

from megatron_lite.checkpoint.layout import dump_layout, read_layout
from megatron_lite.config.load import load_config
from megatron_lite.data.blended import Splits
from megatron_lite.errors import ConfigError, DataError, StoppedEarly
from megatron_lite.plan.data_lines import data_lines
from megatron_lite.plan.resume_lines import resume_lines
from megatron_lite.training.corpora import open_splits
from megatron_lite.training.forward_step import next_token_loss
from megatron_lite.training.pretrain import pretrain
from megatron_lite.training.run import Hooks
from megatron_lite.training.state import TrainState
from tests.helpers.corpora import write_corpus
from tests.helpers.printed import unwrapped
from tests.helpers.runs import rows
from tests.helpers.tiny import tiny_config


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A blend of two corpora, 14 and 9 samples an epoch; tokens of the first are below 200."""
    folder = tmp_path_factory.mktemp("corpora")
    a, b = write_corpus(folder / "a", [12] * 16), write_corpus(folder / "b", [7] * 7, first_token=200)
    return {"a": f"[{a}]", "b": f"[{b}]", "both": f"[0.7,{a},0.3,{b}]"}


def seen(folder, paths, evaluated=None, **changes):
    """Train to the end or to an exit; the samples of these iterations, in their order. Those of evaluations are added
    to `evaluated`."""
    trained = []

    def recording(found):
        def step(batch, model):
            found.extend(map(tuple, np.hstack((batch.tokens.numpy(), batch.labels[:, -1:].numpy())).tolist()))
            return next_token_loss(batch, model)

        return step

    fields = {"run__dir": folder, "data__paths": paths, "data__split": "[1,0,0]", "train__eval_iterations": 0}
    config = tiny_config("gpt", **{**fields, "train__global_batch_size": 1, **changes})
    hooks = Hooks(
        recording(trained),
        recording([] if evaluated is None else evaluated),
        data_lines=data_lines,
        resume_lines=resume_lines,
    )
    try:
        pretrain(config, hooks=hooks)
    except StoppedEarly:
        assert config.train.exit_iteration
    return trained


def order(paths, wanted, planned):
    """The first `wanted` samples of an order that is planned for another number."""
    config = load_config(None, [f"data.paths={paths}", "data.split=[1,0,0]", "data.seq_length=16"])
    train = open_splits(config, (wanted, 0, 0), None, "", TrainState(train_samples=planned)).train
    assert train is not None
    return [tuple(np.asarray(train[k]).tolist()) for k in range(wanted)]


def test_a_run_that_resumes_with_a_smaller_batch_and_then_beyond_its_plan_finishes(tmp_path, paths, capsys):
    """80 samples are planned, and 64 are read. Later 120 more are, beyond the epochs of the plan."""
    both = paths["both"]
    found = seen(tmp_path, both, train__iterations=10, train__global_batch_size=8, train__exit_iteration=6)
    found += seen(tmp_path, both, train__iterations=10, train__global_batch_size=4)
    assert [row["iteration"] for row in rows(tmp_path)] == list(range(1, 11))
    found += seen(tmp_path, both, train__iterations=50, train__global_batch_size=3)
    assert len(found) == rows(tmp_path)[-1]["consumed_samples"] == 48 + 16 + 120
    assert found == order(both, 184, planned=80) != order(both, 184, planned=184)
    # A sample has 16 new tokens, 70 % of the samples are from a, and an epoch of a has 192 tokens.
    epochs = [
        float(words)
        for words in re.findall(r"a: 16 .*this run reads ([\d.]+) epochs", unwrapped(capsys.readouterr().out))
    ]
    assert epochs == pytest.approx([n * 0.7 * 16 / 192 for n in (80, 64, 184)], abs=0.3)


def test_a_branch_with_other_data_starts_at_its_first_sample(tmp_path, paths, capsys):
    """Optimizer, learning rate and ramp continue. A second start of the branch continues in the new data."""
    common = {"train__global_batch_size": 4, "train__ramp_up": "[2,2,10]", "optim__decay_iterations": 20}
    seen(tmp_path / "old", paths["a"], train__iterations=8, **common)
    old = rows(tmp_path / "old")
    branch = {**common, "checkpoint__load": tmp_path / "old", "train__iterations": 20}
    capsys.readouterr()
    found = seen(tmp_path / "new", paths["both"], train__exit_iteration=13, **branch)
    consumed = old[-1]["consumed_samples"]
    assert (
        "other samples, or another order, than in that checkpoint: training reads from the first one; learning rate, "
        f"batch-size ramp and consumed samples continue at 8 steps and {consumed} samples\n"
    ) in unwrapped(capsys.readouterr().out)
    found += seen(tmp_path / "new", paths["both"], **branch)
    assert "other samples" not in capsys.readouterr().out
    assert found == order(paths["both"], 12 * 4, planned=12 * 4)
    new = rows(tmp_path / "new")
    assert [row["iteration"] for row in new] == list(range(9, 21))
    assert new[0]["consumed_samples"] == consumed + 4  # the ramp has ended
    seen(tmp_path / "old", paths["a"], **{**branch, "checkpoint__load": ""})
    assert [row["lr"] for row in new] == [row["lr"] for row in rows(tmp_path / "old")[8:]]


def test_a_branch_with_the_same_data_continues_in_it(tmp_path, paths):
    common = {"train__global_batch_size": 4}
    found = seen(tmp_path / "old", paths["a"], train__iterations=3, **common)
    found += seen(tmp_path / "new", paths["a"], train__iterations=9, checkpoint__load=tmp_path / "old", **common)
    assert found == order(paths["a"], 36, planned=12)


def test_the_remedy_for_other_data_within_a_run_works(tmp_path, paths):
    seen(tmp_path / "run", paths["a"], train__iterations=2)
    with pytest.raises(ConfigError, match="the samples or their order would change in the middle of a run") as raised:
        seen(tmp_path / "run", paths["b"], train__iterations=4)
    (load,) = re.findall(r"run.dir=ANOTHER checkpoint.load=(\S+)$", str(raised.value))
    found = seen(tmp_path / "another", paths["b"], train__iterations=4, checkpoint__load=load)
    assert found == order(paths["b"], 2, planned=2)


def test_a_checkpoint_without_the_newer_counters_continues_its_order(tmp_path, paths):
    """Earlier versions saved the planned length of the training data alone."""
    found = seen(tmp_path, paths["a"], train__iterations=9)
    (layout,) = tmp_path.glob("checkpoints/iter_*/layout.json")
    stored = read_layout(layout.parent)
    assert stored.state["train"]["train_samples"] == 9
    train = {key: value for key, value in stored.state["train"].items() if key not in ("eval_samples", "order_start")}
    layout.write_text(dump_layout(stored.model_copy(update={"state": {**stored.state, "train": train}})))
    found += seen(tmp_path, paths["a"], train__iterations=40)
    assert found == order(paths["a"], 40, planned=9)


class Short:
    def __len__(self):
        return 30

    def __getitem__(self, number):
        return (np.arange(17) + number) % 250


def test_a_custom_dataset_that_is_too_short_is_an_error_before_the_first_step(ranks, tmp_path):
    """Training would end in the middle, after hours."""
    text = ranks(2, too_short, str(tmp_path))[0]
    assert "the train dataset has 30 samples, and the run reads 32: train.iterations is 8, and the global " in text
    assert "batch is 4; lower these, or return a longer dataset" in text
    assert not (tmp_path / "metrics.jsonl").exists() or not rows(tmp_path)


def too_short(folder):
    config = tiny_config("gpt", run__dir=folder, train__iterations=8, train__micro_batch_size=2)
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": 4})})
    with pytest.raises(DataError) as raised:
        pretrain(config, datasets_provider=lambda run: Splits(Short(), None, None))
    return str(raised.value)


def test_validation_data_keeps_its_order_with_another_batch(tmp_path, paths):
    """A larger batch reads more samples. In another order, they would not have the earlier ones among them."""
    common = {"data__split": "[1,1,0]", "train__eval_iterations": 2, "train__global_batch_size": 4}
    first, second = [], []
    seen(tmp_path, paths["a"], first, train__iterations=2, **common)
    seen(tmp_path, paths["a"], second, train__iterations=3, **{**common, "train__global_batch_size": 7})
    assert len(first) == 8 and len(second) == 14 and second[:8] == first
