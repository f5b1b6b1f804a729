"""A run that was stopped and started again is the run that was never stopped, to the bit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.blended import Splits
from megatron_lite.training.pretrain import pretrain
from megatron_lite.training.run import Run
from tests.e2e.tiny import sample, tiny_config
from tests.ranks import RanksFailed


class Counting:
    """The counting task of tiny.py as a dataset."""

    def __init__(self, length: int, seq_length: int, vocab_size: int):
        self.length, self.seq_length, self.vocab_size = length, seq_length, vocab_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> np.ndarray:
        return sample(number, self.seq_length, self.vocab_size)[0].numpy()


def counting_splits(run: Run) -> Splits:
    return Splits(train=Counting(1000, run.config.data.seq_length, run.config.model.vocab_size), valid=None, test=None)


def run_to_the_end(folder: Path, model: str, **changes) -> None:
    """pretrain, from wherever the run in `folder` stands."""
    pretrain(tiny_config(model, run__dir=str(folder), **changes), datasets_provider=counting_splits)


def rows(folder: Path) -> list[dict]:
    """What a run computed in each iteration, without how long it took, and without evaluations."""
    kept = ("iteration", "consumed_samples", "loss", "lr", "grad_norm", "loss_scale", "skipped")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: row[key] for key in kept} for row in map(json.loads, lines) if "loss" in row]


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


VIRTUAL = {
    "parallel__pipeline": 2,
    "parallel__schedule": "interleaved",
    "parallel__virtual_pipeline": 2,
    "model__num_layers": 4,
}
OVERFLOWING = {"optim__initial_loss_scale": 2.0**34}
CASES = {
    "fp32 tp 2": (2, {"train__precision": "fp32", "parallel__tensor": 2}),
    "bf16 tp 2": (2, {"train__precision": "bf16", "parallel__tensor": 2}),
    "fp16 tp 2, after skipped steps": (
        2,
        # Far too large a scale: the first steps overflow, before and after the halves meet.
        {"train__precision": "fp16", "parallel__tensor": 2, "optim__initial_loss_scale": 2.0**34},
    ),
    "fp32 dp 2": (2, {"train__precision": "fp32"}),
    "bf16 dp 2 torch": (2, {"train__precision": "bf16", "parallel__ddp": "torch"}),
    "fp16 dp 2, after skipped steps": (2, {"train__precision": "fp16", "optim__initial_loss_scale": 2.0**34}),
    "fp32 tp 2 dp 2": (4, {"train__precision": "fp32", "parallel__tensor": 2}),
    "bf16 alone": (1, {"train__precision": "bf16"}),
    "fp32 pp 2": (2, {"parallel__pipeline": 2}),
    "bf16 pp 2 x v 2": (2, VIRTUAL | {"train__precision": "bf16"}),
    "fp16 pp 2 tp 2, after skipped steps": (
        4,
        {"train__precision": "fp16", "parallel__pipeline": 2, "parallel__tensor": 2} | OVERFLOWING,
    ),
    "fp32 pp 2 dp 2 zb-h1": (4, {"parallel__pipeline": 2, "parallel__schedule": "zb-h1"}),
    "fp32 pp 2 dp 2 torch": (4, {"parallel__pipeline": 2, "parallel__ddp": "torch"}),
}


@pytest.mark.parametrize("case", CASES)
def test_ten_and_ten_iterations_are_twenty(ranks, tmp_path, case):
    """Weights, masters, moments, scaler, random streams, learning rate and data position all have to come back."""
    size, changes = CASES[case]
    changes = changes | {
        "train__iterations": 20,
        "train__micro_batch_size": 2,
        "checkpoint__interval": 10,
        "model__hidden_dropout": 0.1,  # so that random streams matter
        "model__attention_dropout": 0.1,
        "train__ramp_up": "[4,4,30]",  # the batch grows while the run is stopped
    }
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    ranks(size, run_to_the_end, whole, "codegeex", **changes)
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "checkpoints" / "iter_0000020")
    (halves / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    ranks(size, run_to_the_end, halves, "codegeex", **changes)

    truth = rows(whole)
    assert [row["iteration"] for row in truth] == list(range(1, 21))
    if "fp16" in case:
        assert any(row["skipped"] for row in truth[:10])
    assert rows(halves) == truth
    newest = "checkpoints/iter_0000020"
    stored = tensor_files(whole / newest)
    assert any("optimizer" in name for name in stored)
    assert any("rng" in name for name in stored)
    assert tensor_files(halves / newest) == stored


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel__pipeline_layout": "[3,1]"}, "parallel.pipeline_layout (even there, [3, 1] here)"),
        (VIRTUAL, "parallel.virtual_pipeline (1 there, 2 here)"),
    ],
)
def test_a_checkpoint_with_other_layers_in_a_stage_is_refused_by_its_key(ranks, tmp_path, changes, words):
    same = {"parallel__pipeline": 2, "model__num_layers": 4, "train__iterations": 2, "train__micro_batch_size": 2}
    ranks(2, run_to_the_end, tmp_path, "gpt", **same)
    ranks(2, run_to_the_end, tmp_path, "gpt", **same, parallel__pipeline_layout="[2,2]")  # the same in other words
    with pytest.raises(RanksFailed) as raised:
        ranks(2, run_to_the_end, tmp_path, "gpt", **(same | changes))
    assert f"other layers were in pipeline stage 0. Set {words} as it was; loading into another layout" in str(
        raised.value
    )
