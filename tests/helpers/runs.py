"""Training runs of tiny models in a folder, and the results that a run wrote there."""

import json
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from megatron_lite.data.blended import Splits
from megatron_lite.observers.stragglers import Stragglers
from megatron_lite.observers.watchdog import watchdog
from megatron_lite.training.pretrain import pretrain
from megatron_lite.training.run import Hooks, Run
from tests.helpers.tiny import sample, tiny_config


class CountingDataset:
    """The counting task of tiny.py as a dataset of `length` samples."""

    def __init__(self, length: int, seq_length: int, vocab_size: int):
        self.length, self.seq_length, self.vocab_size = length, seq_length, vocab_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> np.ndarray:
        return sample(number, self.seq_length, self.vocab_size)[0].numpy()


def counting_splits(run: Run) -> Splits:
    """A training split that no test exhausts, without validation and test data."""
    data = CountingDataset(1_000_000, run.config.data.seq_length, run.config.model.vocab_size)
    return Splits(train=data, valid=None, test=None)


def train_to_end(folder: Path, model: str, *, hint=None, **changes) -> None:
    """Train `model` in `folder` until its last iteration; a run that has checkpoints there resumes."""
    config = tiny_config(model, run__dir=str(folder), **changes)
    pretrain(config, datasets_provider=counting_splits, hooks=Hooks(observers=(watchdog, Stragglers)), hint=hint)


def rows(folder: Path) -> list[dict]:
    """The metrics of each iteration of a run, without timings and without evaluations."""
    columns = ("iteration", "consumed_samples", "loss", "lr", "grad_norm", "loss_scale", "skipped")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: row[key] for key in columns} for row in map(json.loads, lines) if "loss" in row]


def tensor_files(folder: Path) -> dict[str, bytes]:
    """The content of every safetensors file under `folder`, by relative path. Random generators are in one entry each:
    their files depend on the machines."""
    found = {}
    for path in folder.rglob("*.safetensors"):
        if path.name.startswith("rng_host_"):
            found |= {f"rng {key}": state.numpy().tobytes() for key, state in load_file(path).items()}
        else:
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found
