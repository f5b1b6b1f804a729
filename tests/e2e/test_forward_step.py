"""Custom forward steps: another loss with scalars, the same in every layout and in all logs."""

import json
from functools import cache
from typing import Any

import pytest
import torch

from megatron_lite.data.blended import Splits
from megatron_lite.launch.pretrain import pretrain
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Hooks, Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers import forward_steps
from tests.helpers.command import make_corpus, run_here, tiny_yaml
from tests.helpers.runs import CountingDataset, counting_splits
from tests.helpers.tensorboard_files import tensorboard_events
from tests.helpers.tiny import gather_weights, model_with_biases, next_microbatches, tiny_config

STEPS = 3


def train(name: str, **changes: Any) -> dict[str, Any]:
    """Train with a forward step of `forward_steps`; return its values of each step and the final weights."""
    sizes = {
        "model__num_layers": 4,
        "train__iterations": STEPS,
        "train__micro_batch_size": 2,
        "train__precision": "fp64",
    }
    config = tiny_config("gpt", **sizes | changes)
    ctx, rng = initialize_megatron(config)
    hooks = Hooks(forward_step=getattr(forward_steps, name))
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases, hooks)
    reports = [train_step(run, next_microbatches(run)) for _ in range(STEPS)]
    run.ddp.wait_for_params()
    weights = gather_weights(run)
    finalize_megatron()
    values = [[report.grad_norm, *(value for _, value in sorted(report.losses.items()))] for report in reports]
    return {"names": sorted(reports[0].losses), "values": torch.tensor(values).double(), "weights": weights}


@cache
def one_process(name: str) -> dict[str, Any]:
    return train(name)


LAYOUTS = {
    "micro-batches of 8": (1, {"train__micro_batch_size": 8}),
    "tp 2 sequence": (2, {"parallel__tensor": 2, "parallel__sequence": "true"}),
    "dp 2": (2, {}),
    "dp 2 torch": (2, {"parallel__ddp": "torch"}),
    "dp 2 fsdp": (2, {"parallel__ddp": "fsdp"}),
    "dp 2 distributed": (2, {"optim__distributed": "true"}),
    "pp 2": (2, {"parallel__pipeline": 2}),
    "pp 2 zb-h1": (2, {"parallel__pipeline": 2, "parallel__schedule": "zb-h1"}),
    "tp 2 pp 2 interleaved": (
        4,
        {
            "parallel__tensor": 2,
            "parallel__pipeline": 2,
            "parallel__schedule": "interleaved",
            "parallel__virtual_pipeline": 2,
        },
    ),
    "dp 2 pp 2": (4, {"parallel__pipeline": 2}),
}
FEW = ("micro-batches of 8", "dp 2 fsdp", "dp 2 pp 2")
TOKENS_ONLY = {"cp 2": (2, {"parallel__context": 2}), "dp 2 cp 2": (4, {"parallel__context": 2})}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("z_loss", at) for at in (*LAYOUTS, *TOKENS_ONLY)),
        # Its other number of targets passes through the code of micro-batches, of data parallelism and of stages.
        *(pytest.param("preference_loss", at, marks=() if at in FEW else pytest.mark.soak) for at in LAYOUTS),
    ],
)
def test_a_custom_loss_and_its_scalars_are_those_of_one_process(ranks, name, layout):
    """A loss divided by each rank's targets, or gradients that were, would depend on the layout."""
    count, changes = (LAYOUTS | TOKENS_ONLY)[layout]
    expected = one_process(name)
    for got in ranks(count, train, name, **changes):
        assert got["names"] == expected["names"]
        torch.testing.assert_close(got["values"], expected["values"], rtol=1e-10, atol=1e-12)
        for key, weight in expected["weights"].items():
            scale = weight.abs().max().item()
            torch.testing.assert_close(got["weights"][key], weight, rtol=0, atol=1e-10 * scale + 1e-13)


def splits(run: Run) -> Splits:
    data = CountingDataset(1_000_000, run.config.data.seq_length, run.config.model.vocab_size)
    return Splits(train=counting_splits(run).train, valid=data, test=None)


def train_with_all_logs(folder: str) -> list[tuple[int, list[str]]]:
    """Train on a pipeline, with TensorBoard; returns what the callback got on this rank."""
    config = tiny_config(
        "gpt",
        run__dir=folder,
        train__iterations=4,
        train__eval_interval=2,
        train__eval_iterations=1,
        log__interval=2,
        log__tensorboard="true",
        parallel__pipeline=2,
    )
    seen: list[tuple[int, list[str]]] = []
    pretrain(
        config,
        datasets_provider=splits,
        forward_step=forward_steps.z_loss,
        learning_rate=lambda optim, steps, total: optim.lr / (1 + steps),
        after_step=lambda run, report: seen.append((run.state.iteration, sorted(report.losses))),
    )
    return seen


def test_scalars_are_in_all_three_logs(ranks, tmp_path, capfd):
    """A second loss that is only in the sum would hide there."""
    names = ["accuracy of even", "lm loss", "loss", "z loss"]
    seen = ranks(2, train_with_all_logs, str(tmp_path))
    assert seen == [[(number, names) for number in range(1, 5)]] * 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    for row in steps:
        assert row["loss"] == pytest.approx(row["lm loss"] + forward_steps.Z_WEIGHT * row["z loss"], rel=1e-6)
        assert 0 <= row["accuracy of even"] <= 1
    assert [row["lr"] for row in steps] == pytest.approx([5e-3, 5e-3 / 2, 5e-3 / 3, 5e-3 / 4])
    evaluations = [row for row in rows if "validation_loss" in row]
    assert [row["iteration"] for row in evaluations] == [2, 4]
    assert {"validation_lm loss", "validation_z loss", "validation_ppl"} <= set(evaluations[0])
    events = tensorboard_events(tmp_path / "tensorboard")
    assert {*names, "z loss validation", "lm loss validation ppl"} <= set(events.Tags()["scalars"])
    assert [event.value for event in events.Scalars("z loss")] == pytest.approx([row["z loss"] for row in steps])


def test_the_options_of_the_command_line_train_with_a_scripts_functions(tmp_path):
    """The console names the total `loss` and each scalar; a resume without the option says so."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    config = tiny_yaml(
        tmp_path, make_corpus(tmp_path), train={"iterations": 2, "eval_iterations": 0}, data={"paths": []}
    )
    command = ("pretrain", "--config", str(config), "--data", "mine.py:counting")
    done = run_here(*command, "--forward-step", "mine.py:scaled", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("iteration 2/2 "))
    assert "  loss " in line and "  half " in line and " lm " not in line
    resumed = run_here(*command, "train.iterations=3", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "forward step: the built-in one; the checkpoint was trained with mine.py:scaled" in resumed.stdout
    wrong = run_here(*command, "run.dir=other", "--forward-step", "mine.py:wrong", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "the forward step returned a tensor of shape [] and torch.float32; it must return (sum of" in wrong.stderr
    missing = run_here(*command, "run.dir=third", "--forward-step", "mine.py:nothing", cwd=tmp_path)
    assert missing.returncode == 2 and "--forward-step is mine.py:nothing: module" in missing.stderr


SCRIPT = """
import numpy as np
from megatron_lite import Splits

class Counting:
    def __init__(self, length): self.length = length
    def __len__(self): return 100_000
    def __getitem__(self, number): return (number + np.arange(self.length + 1)) % 200

def counting(run):
    return Splits(train=Counting(run.config.data.seq_length), valid=None, test=None)

def scaled(batch, model):
    losses = model(batch.tokens, batch.labels) * batch.loss_mask.t()
    return 2 * losses.sum(), batch.loss_mask.sum(), {"half": losses.sum()}

def wrong(batch, model):
    return model(batch.tokens, batch.labels).sum()
"""


@pytest.mark.parametrize(
    "changes",
    [{"parallel__ddp": "deepspeed"}, {"sync__mode": "delayed", "sync__delay": 1}],
    ids=["deepspeed", "delayed"],
)
def test_engines_that_cannot_divide_gradients_reject_other_targets(ranks, tmp_path, monkeypatch, changes):
    """Otherwise the step would be that of a loss divided by tokens."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(
        Exception, match=r"returned 4 targets, and the loss mask of the batch has \d+; ddp .* needs them"
    ):
        ranks(2, train, "preference_loss", train__precision="fp32", **changes)
