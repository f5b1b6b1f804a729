"""A run that is taken to another layout goes on as the run that stayed, and nothing is lost on the way."""

import itertools
import os
from pathlib import Path

import pytest
import torch

from megatron_lite.ddp import deepspeed as deepspeed_file
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.e2e.tiny import model_with_biases, portion, tiny_config

DEEPSPEED = {"parallel__ddp": "deepspeed"}
# name -> ranks, and what differs from one process; in an order that changes much from one to the next
LAYOUTS = {
    "one": (1, {}),
    "tp 4, sequence parallel": (4, {"parallel__tensor": 4, "parallel__sequence": "true"}),
    "dp 3 distributed": (3, {"optim__distributed": "true"}),
    "pp 4": (4, {"parallel__pipeline": 4}),
    "dp 4 fsdp": (4, {"parallel__ddp": "fsdp"}),
    "pp 2 x 2 chunks, tp 2": (
        4,
        {
            "parallel__pipeline": 2,
            "parallel__virtual_pipeline": 2,
            "parallel__schedule": "interleaved",
            "parallel__tensor": 2,
        },
    ),
    "dp 2 deepspeed 3": (2, {**DEEPSPEED, "deepspeed__zero_stage": 3}),
    "pp 2 dp 2 distributed": (4, {"parallel__pipeline": 2, "optim__distributed": "true"}),
    "tp 2 dp 2 deepspeed 2": (4, {**DEEPSPEED, "deepspeed__zero_stage": 2, "parallel__tensor": 2}),
    "tp 2": (2, {"parallel__tensor": 2}),
    "tp 2 dp 2 fsdp": (4, {"parallel__tensor": 2, "parallel__ddp": "fsdp"}),
    "pp 2, layers 3 and 1": (2, {"parallel__pipeline": 2, "parallel__pipeline_layout": "[3, 1]"}),
    "dp 2 deepspeed 1": (2, {**DEEPSPEED, "deepspeed__zero_stage": 1}),
    "tp 2 dp 2 distributed": (4, {"parallel__tensor": 2, "optim__distributed": "true"}),
    "dp 4 torch": (4, {"parallel__ddp": "torch"}),
}
MODELS = {"codegeex": "gpt with a top-query block, tied", "llama": "grouped queries, gate and up, untied"}
COMMON = {"train__global_batch_size": 12, "model__num_layers": 4, "train__iterations": 100}


def visit(model: str, folder: str, source: str, steps: int, changes: dict) -> list[tuple[float, float]]:
    """A run in `folder` that goes on from `source`, takes some steps and saves; their losses and norms."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder + "-extensions"
    config = tiny_config(model, run__dir=folder, checkpoint__load=source, **COMMON, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    reports = [train_step(run, portion(run)) for _ in range(steps)]
    run.ddp.wait_for_params()
    save_run(run, lambda line: None)
    del run
    deepspeed_file.release()
    finalize_megatron()
    return [(report.loss, report.grad_norm) for report in reports]


def tensors(folder: Path) -> dict[str, bytes]:
    """Every tensor file of a checkpoint but the random streams."""
    (newest,) = folder.glob("checkpoints/iter_*")
    return {str(path.relative_to(newest)): path.read_bytes() for path in newest.glob("*/[mo]*.safetensors")}


class Moves:
    """Runs in layouts of LAYOUTS, one for each call."""

    def __init__(self, ranks, folder: Path, model: str, **changes):
        self._ranks, self._folder, self._model, self._changes = ranks, folder, model, changes
        self._count = itertools.count()

    def __call__(self, layout: str, source: Path | str, steps: int = 0) -> tuple[Path, torch.Tensor]:
        size, changes = LAYOUTS[layout]
        folder = self._folder / f"{next(self._count)}"
        arguments = (self._model, str(folder), str(source), steps, {**changes, **self._changes})
        reports = self._ranks(size, visit, *arguments)
        return folder, torch.tensor(reports[0], dtype=torch.float64)


def assert_round_trip(moves: Moves, there: str, here: str, checkpoint: Path) -> None:
    """A checkpoint that was saved in `there`, loaded and saved in `here`, and again in `there`: the same bytes."""
    away, _ = moves(here, checkpoint)
    back, _ = moves(there, away)
    assert tensors(back) == tensors(checkpoint)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_moves_at_every_save_is_the_run_that_stayed(ranks, tmp_path, model):
    """Weights, moments and data position: a slice from the wrong place, or a moment lost, would change the losses."""
    layouts = list(LAYOUTS)[:: 1 if model == "codegeex" else 2]
    moves, steps = Moves(ranks, tmp_path, model), 2
    _, stayed = moves("one", "", steps * (len(layouts) + 1))
    checkpoint, reports = moves("one", "", steps)
    here, moved = "one", [reports]
    for there in layouts[1:] + layouts[:1]:
        if here != "one":
            assert_round_trip(moves, here, there, checkpoint)
        checkpoint, reports = moves(there, checkpoint, steps)
        moved.append(reports)
        here = there
    torch.testing.assert_close(torch.cat(moved), stayed, rtol=1e-5, atol=0)
