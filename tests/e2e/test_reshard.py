"""A run that is taken to another layout goes on as the run that stayed, and nothing is lost on the way."""

import itertools
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.layout import dump_layout, read_layout
from tests.helpers.checkpoints import tensors_of_newest
from tests.helpers.tiny import visit

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
OTHERS = {"dp 2": (2, {}), "tp 2 dp 2": (4, {"parallel__tensor": 2})}
MODELS = {"codegeex": "gpt with a top-query block, tied", "llama": "grouped queries, gate and up, untied"}


class Moves:
    """Runs in layouts of LAYOUTS, one for each call."""

    def __init__(self, ranks, folder: Path, model: str, **changes):
        self._ranks, self._folder, self._model, self._changes = ranks, folder, model, changes
        self._count = itertools.count()

    def __call__(self, layout: str, source: Path | str, steps: int = 0) -> tuple[Path, torch.Tensor]:
        size, changes = (LAYOUTS | OTHERS)[layout]
        folder = self._folder / f"{next(self._count)}"
        arguments = (self._model, str(folder), str(source), steps, {**changes, **self._changes})
        reports = self._ranks(size, visit, *arguments)
        return folder, torch.tensor(reports[0], dtype=torch.float64)


def assert_round_trip(moves: Moves, there: str, here: str, checkpoint: Path) -> None:
    """A checkpoint that was saved in `there`, loaded and saved in `here`, and again in `there`: the same bytes."""
    away, _ = moves(here, checkpoint)
    back, _ = moves(there, away)
    assert tensors_of_newest(back) == tensors_of_newest(checkpoint)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_moves_at_every_save_is_the_run_that_stayed(ranks, tmp_path, model):
    """Weights, moments and data position: a slice from the wrong place, or a moment lost, would change the losses."""
    layouts = list(LAYOUTS)[:: 1 if model == "codegeex" else 3]
    moves, steps = Moves(ranks, tmp_path, model), 2
    _, stayed = moves("one", "", steps * (len(layouts) + 1))
    checkpoint, reports = moves("one", "", steps)
    here, moved = "one", [reports]
    for number, there in enumerate(layouts[1:] + layouts[:1]):
        if number % 3 == 1:  # make soak goes every way and back
            assert_round_trip(moves, here, there, checkpoint)
        checkpoint, reports = moves(there, checkpoint, steps)
        moved.append(reports)
        here = there
    torch.testing.assert_close(torch.cat(moved), stayed, rtol=1e-5, atol=0)


@pytest.mark.soak
@pytest.mark.parametrize("there", LAYOUTS)
def test_every_move_from_a_layout_to_any_other(ranks, tmp_path, there):
    """At iteration 10, with the moments of ten steps; and back again without a changed byte."""
    moves = Moves(ranks, tmp_path, "codegeex")
    _, stayed = moves("one", "", 13)
    checkpoint, before = moves(there, "", 10)
    torch.testing.assert_close(before, stayed[:10], rtol=1e-5, atol=0)
    for here in LAYOUTS:
        _, after = moves(here, checkpoint, 3)
        torch.testing.assert_close(after, stayed[10:], rtol=1e-5, atol=0)
        assert_round_trip(moves, there, here, checkpoint)


@pytest.mark.parametrize("mode", ["local_sgd", "diloco"])
def test_ranks_with_weights_of_their_own_keep_them_when_tensor_parallelism_changes(ranks, tmp_path, mode):
    """Between two meetings every data-parallel rank is somewhere else."""
    own = {"sync__mode": mode, "sync__interval": 4}
    moves = Moves(ranks, tmp_path, "codegeex", **own)
    _, stayed = moves("dp 2", "", 10)
    checkpoint, before = moves("dp 2", "", 5)
    checkpoint, between = moves("tp 2 dp 2", checkpoint, 2)
    _, after = moves("dp 2", checkpoint, 3)
    torch.testing.assert_close(torch.cat([before, between, after]), stayed, rtol=1e-5, atol=0)


def test_masters_of_16_bit_weights_move_too(ranks, tmp_path):
    """bf16 weights would look right without them, and lose every small update."""
    moves = Moves(ranks, tmp_path, "codegeex", train__precision="bf16")
    there, here = "tp 2 dp 2 distributed", "dp 4 fsdp"
    checkpoint, _ = moves(there, "", 2)
    assert any(b"master/" in content for content in tensors_of_newest(checkpoint).values())
    assert_round_trip(moves, there, here, checkpoint)
    assert_round_trip(moves, here, "dp 2 deepspeed 3", moves(here, checkpoint)[0])


def test_the_start_says_what_was_moved(ranks, tmp_path, capsys):
    """With dropout a moved run is another run: new streams, which the user must know."""
    folder, _ = Moves(ranks, tmp_path, "codegeex")("tp 2 dp 2 distributed", "", 1)
    visit("codegeex", str(tmp_path / "one"), str(folder), 0, {})
    size = sum(map(len, tensors_of_newest(folder).values()))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" moved")]
    before = " moved from tp=2 cp=1 dp=2 pp=1, ddp local with a distributed optimizer to tp=1 cp=1 dp=1 pp=1, ddp local"
    assert line.startswith(f"{before}: rank 0 has read ")
    assert line.endswith(" MB; random streams restart from run.seed, iteration and rank")
    assert float(line.split("read ")[1].split(" ")[0]) == pytest.approx(size / 1e6, rel=0.2)
    visit("codegeex", str(tmp_path / "again"), str(tmp_path / "one"), 0, {})
    assert "moved" not in capsys.readouterr().out
    (streams,) = (tmp_path / "one" / "checkpoints").glob("iter_*/layout.json")
    layout = read_layout(streams.parent)
    files = {name: info for name, info in layout.files.items() if "rng" not in name}
    streams.write_text(dump_layout(layout.model_copy(update={"files": files})))  # as `convert` leaves them out
    visit("codegeex", str(tmp_path / "third"), str(tmp_path / "one"), 0, {})
    assert "\n random streams restart from run.seed, iteration and rank\n" in capsys.readouterr().out
