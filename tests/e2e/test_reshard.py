"""A run that is resharded into other layouts continues as if its layout had not changed."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.layout import dump_layout, read_layout
from tests.helpers.checkpoints import newest_tensor_files
from tests.helpers.printed import unwrapped
from tests.helpers.tiny import ENCODERS, resume_and_save

DEEPSPEED = {"parallel__ddp": "deepspeed"}
# name -> number of ranks and config changes; neighbours differ much, because a run moves through them in this order
# Large micro-batches save collectives, which are slow when more ranks than cores take part.
LAYOUTS = {
    "one rank": (1, {}),
    "tp 4, sequence parallel": (
        4,
        {"parallel__tensor": 4, "parallel__sequence": "true", "train__micro_batch_size": 6},
    ),
    "dp 3 distributed": (3, {"optim__distributed": "true", "train__micro_batch_size": 4}),
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
    "cp 2 dp 2 distributed": (4, {"parallel__context": 2, "optim__distributed": "true"}),
    "cp 4 fsdp": (4, {"parallel__context": 4, "parallel__context_mode": "all_gather", "parallel__ddp": "fsdp"}),
    "dp 4 fsdp, 2 copies": (4, {"parallel__ddp": "fsdp", "parallel__fsdp_shard": 2}),
    "dp 4 distributed, 2 copies": (4, {"optim__distributed": "true", "optim__distributed_shard": 2}),
}
OTHERS = {"dp 2": (2, {}), "tp 2 dp 2": (4, {"parallel__tensor": 2})}
# model -> the layouts that it moves through in `make soak`
MODELS = {
    "codegeex": list(LAYOUTS),
    "llama": list(LAYOUTS)[::3],
    **dict.fromkeys(ENCODERS, [name for name in LAYOUTS if "cp" not in name and "layers" not in name][::2]),
}
# model -> the layouts that it moves through in `make test`: each layout with one model
FEWER = {
    "codegeex": [
        *("one rank", "dp 3 distributed", "pp 2 x 2 chunks, tp 2", "dp 2 deepspeed 3", "pp 2, layers 3 and 1"),
        *("tp 2 dp 2 deepspeed 2", "tp 2 dp 2 fsdp", "dp 2 deepspeed 1", "tp 2 dp 2 distributed", "cp 4 fsdp"),
    ],
    "llama": [
        *("one rank", "tp 2", "dp 4 fsdp", "dp 4 fsdp, 2 copies"),
        *("cp 2 dp 2 distributed", "dp 4 distributed, 2 copies"),
    ],
    "bert": ["one rank", "pp 4", "dp 4 torch"],
    "t5": ["one rank", "tp 4, sequence parallel", "pp 2 dp 2 distributed"],
}
WALKS = [
    *(pytest.param(model, layouts, id=model, marks=pytest.mark.soak) for model, layouts in MODELS.items()),
    *(pytest.param(model, layouts, id=f"{model}, fewer layouts") for model, layouts in FEWER.items()),
]


class Mover:
    """Resumes a run in the layout of each call, in a new folder."""

    def __init__(self, ranks, folder: Path, model: str, **changes):
        self._ranks, self._folder, self._model, self._changes = ranks, folder, model, changes
        self._count = itertools.count()

    def __call__(self, layout: str, source: Path | str, steps: int = 0) -> tuple[Path, torch.Tensor]:
        size, changes = (LAYOUTS | OTHERS)[layout]
        folder = self._folder / f"{next(self._count)}"
        arguments = (
            self._model,
            str(folder),
            str(source),
            steps,
            {"train__micro_batch_size": 3, **changes, **self._changes},
        )
        reports = self._ranks(size, resume_and_save, *arguments)
        return folder, torch.tensor(reports[0], dtype=torch.float64)


def assert_round_trip(move: Mover, source: str, target: str, checkpoint: Path) -> None:
    """Assert that a checkpoint in layout `source` has the same bytes after a save in `target` and one in `source`."""
    away, _ = move(target, checkpoint)
    back, _ = move(source, away)
    assert newest_tensor_files(back) == newest_tensor_files(checkpoint)


def test_copies_of_a_key_value_group_move_between_layouts(ranks, tmp_path):
    """With one group, every tensor-parallel rank saves a copy. A load takes each element from one of them."""
    move = Mover(ranks, tmp_path, "llama", model__num_query_groups=1)
    layouts = ["tp 4, sequence parallel", "one rank", "tp 2 dp 2 distributed", "tp 2 dp 2 fsdp", "tp 2"]
    _, expected = move("one rank", "", 2 * len(layouts) + 2)
    checkpoint, reports = move("tp 2", "", 2)
    found, source = [reports], "tp 2"
    for target in layouts:
        assert_round_trip(move, source, target, checkpoint)
        checkpoint, reports = move(target, checkpoint, 2)
        found.append(reports)
        source = target
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("model", "layouts"), WALKS)
def test_a_run_with_a_new_layout_at_every_save_has_the_losses_of_one_layout(ranks, tmp_path, model, layouts):
    """A wrong slice of a weight, a lost moment or another data position would change the losses."""
    move, steps = Mover(ranks, tmp_path, model), 2
    _, expected = move("one rank", "", steps * (len(layouts) + 1))
    checkpoint, reports = move("one rank", "", steps)
    source, found = "one rank", [reports]
    for number, target in enumerate(layouts[1:] + layouts[:1]):
        if number % 3 == 1:  # `make soak` tests the round trip of every pair
            assert_round_trip(move, source, target, checkpoint)
        checkpoint, reports = move(target, checkpoint, steps)
        found.append(reports)
        source = target
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=0)


@pytest.mark.soak
@pytest.mark.parametrize("source", LAYOUTS)
def test_a_run_resumes_from_any_layout_in_any_other(ranks, tmp_path, source):
    """The change comes at iteration 10, with the moments of ten steps. The way back must not change a byte."""
    move = Mover(ranks, tmp_path, "codegeex")
    _, expected = move("one rank", "", 13)
    checkpoint, before = move(source, "", 10)
    torch.testing.assert_close(before, expected[:10], rtol=1e-5, atol=0)
    for target in LAYOUTS:
        _, after = move(target, checkpoint, 3)
        torch.testing.assert_close(after, expected[10:], rtol=1e-5, atol=0)
        assert_round_trip(move, source, target, checkpoint)


@pytest.mark.parametrize("mode", ["local_sgd", "diloco"])
def test_differing_replicas_keep_their_weights_when_tensor_parallelism_changes(ranks, tmp_path, mode):
    """Between two synchronizations, each data-parallel rank has different weights."""
    changes = {"sync__mode": mode, "sync__interval": 4}
    move = Mover(ranks, tmp_path, "codegeex", **changes)
    _, expected = move("dp 2", "", 10)
    checkpoint, before = move("dp 2", "", 5)
    checkpoint, between = move("tp 2 dp 2", checkpoint, 2)
    _, after = move("dp 2", checkpoint, 3)
    torch.testing.assert_close(torch.cat([before, between, after]), expected, rtol=1e-5, atol=0)


def test_master_weights_of_bf16_survive_a_change_of_layout(ranks, tmp_path):
    """Without them, the bf16 weights would look right but lose every small update."""
    move = Mover(ranks, tmp_path, "codegeex", train__precision="bf16")
    source, target = "tp 2 dp 2 distributed", "dp 4 fsdp"
    checkpoint, _ = move(source, "", 2)
    assert any(b"master/" in content for content in newest_tensor_files(checkpoint).values())
    assert_round_trip(move, source, target, checkpoint)
    assert_round_trip(move, target, "dp 2 deepspeed 3", move(target, checkpoint)[0])


@pytest.mark.parametrize("name", ["dp 4 fsdp, 2 copies", "dp 4 distributed, 2 copies"])
def test_only_the_first_copy_of_a_shard_is_saved(ranks, tmp_path, name):
    """A checkpoint would grow with the number of machines, although every load would still be right."""
    folder, _ = Mover(ranks, tmp_path, "codegeex")(name, "", 1)
    (layout_file,) = (folder / "checkpoints").glob("iter_*/layout.json")
    for name, tensor in read_layout(layout_file.parent).tensors.items():
        for value in tensor.values.values():
            assert sum(each.end - each.start for each in value.slices) == math.prod(tensor.shape), name


def test_the_start_in_another_layout_prints_the_change(ranks, tmp_path, capsys):
    """The user must know that random streams restart, because dropout then differs from an unchanged layout."""
    folder, _ = Mover(ranks, tmp_path, "codegeex")("tp 2 dp 2 distributed", "", 1)
    resume_and_save("codegeex", str(tmp_path / "one rank"), str(folder), 0, {})
    size = sum(map(len, newest_tensor_files(folder).values()))
    (line,) = [line for line in unwrapped(capsys.readouterr().out).splitlines() if line.startswith("moved")]
    before = "moved from tp=2 cp=1 dp=2 pp=1, ddp local with a distributed optimizer to tp=1 cp=1 dp=1 pp=1, ddp local"
    assert line.startswith(f"{before}: rank 0 has read ")
    assert line.endswith(" MB; random streams restart from run.seed, iteration and rank")
    assert float(line.split("read ")[1].split(" ")[0]) == pytest.approx(size / 1e6, rel=0.2)
    resume_and_save("codegeex", str(tmp_path / "again"), str(tmp_path / "one rank"), 0, {})
    assert "moved" not in capsys.readouterr().out
    (layout_file,) = (tmp_path / "one rank" / "checkpoints").glob("iter_*/layout.json")
    layout = read_layout(layout_file.parent)
    files = {name: info for name, info in layout.files.items() if "rng" not in name}
    layout_file.write_text(dump_layout(layout.model_copy(update={"files": files})))  # `convert` omits them too
    resume_and_save("codegeex", str(tmp_path / "third"), str(tmp_path / "one rank"), 0, {})
    assert "\nrandom streams restart from run.seed, iteration and rank\n" in capsys.readouterr().out
