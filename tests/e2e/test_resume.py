"""A resumed run is bit for bit the run that was not interrupted."""

import json
import math
import re
import shutil
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_lite.checkpoint.layout import Layout, content_checksum, dump_layout, read_layout
from megatron_lite.convert.driver import convert_hint
from megatron_lite.errors import CheckpointError, DamagedCheckpoint, TrainingError
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.model import build
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.faults import answer_bad_values
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.checkpoints import newest_tensor_files
from tests.helpers.cover import in_tiers
from tests.helpers.printed import unwrapped
from tests.helpers.runs import rows, tensor_files, train_to_end
from tests.helpers.tiny import next_microbatches, tiny_config

VIRTUAL = {
    "parallel__pipeline": 2,
    "parallel__schedule": "interleaved",
    "parallel__virtual_pipeline": 2,
    "model__num_layers": 4,
}
# The scale is so large that steps overflow before and after the restart.
OVERFLOWING = {"optim__initial_loss_scale": 2.0**25}
CASES = {
    "fp32 tp 2": (2, {"train__precision": "fp32", "parallel__tensor": 2}),
    "bf16 tp 2": (2, {"train__precision": "bf16", "parallel__tensor": 2}),
    "fp16 tp 2, after skipped steps": (
        2,
        {"train__precision": "fp16", "parallel__tensor": 2} | OVERFLOWING,
    ),
    "fp32 dp 2": (2, {"train__precision": "fp32"}),
    "bf16 dp 2 torch": (2, {"train__precision": "bf16", "parallel__ddp": "torch"}),
    "fp16 dp 2, after skipped steps": (2, {"train__precision": "fp16"} | OVERFLOWING),
    "fp32 tp 2 dp 2": (4, {"train__precision": "fp32", "parallel__tensor": 2}),
    "bf16 one rank": (1, {"train__precision": "bf16"}),
    "fp32 pp 2": (2, {"parallel__pipeline": 2}),
    "bf16 pp 2 x v 2": (2, VIRTUAL | {"train__precision": "bf16"}),
    "fp16 pp 2 tp 2, after skipped steps": (
        4,
        {"train__precision": "fp16", "parallel__pipeline": 2, "parallel__tensor": 2} | OVERFLOWING,
    ),
    "fp32 pp 2 dp 2 zb-h1": (4, {"parallel__pipeline": 2, "parallel__schedule": "zb-h1"}),
    "bf16 dp 2 distributed": (2, {"train__precision": "bf16", "optim__distributed": "true"}),
    "fp16 pp 2 dp 2 distributed, after skipped steps": (
        4,
        {"train__precision": "fp16", "parallel__pipeline": 2, "optim__distributed": "true"} | OVERFLOWING,
    ),
    "bf16 tp 2 dp 2 fsdp, sequence parallel": (
        4,
        {"train__precision": "bf16", "parallel__tensor": 2, "parallel__sequence": "true", "parallel__ddp": "fsdp"},
    ),
    "fp16 dp 2 fsdp, after skipped steps": (
        2,
        {"train__precision": "fp16", "parallel__ddp": "fsdp"} | OVERFLOWING,
    ),
    "bf16 dp 2 deepspeed 2": (
        2,
        {"train__precision": "bf16", "parallel__ddp": "deepspeed", "deepspeed__zero_stage": 2},
    ),
    "bf16 tp 2 dp 2 deepspeed 3": (
        4,
        {
            "train__precision": "bf16",
            "parallel__tensor": 2,
            "parallel__ddp": "deepspeed",
            "deepspeed__zero_stage": 3,
            "deepspeed__stage3_param_persistence_threshold": 100,
        },
    ),
    "bf16 dp 2 delayed by 2": (2, {"train__precision": "bf16", "sync__mode": "delayed", "sync__delay": 2}),
    "bf16 pp 2 dp 2 diloco, with a synchronization in flight": (
        4,
        {
            "train__precision": "bf16",
            "parallel__pipeline": 2,
            "sync__mode": "diloco",
            "sync__interval": 4,
            "sync__delay": 3,
        },
    ),
    "fp32 dp 2 local_sgd, between synchronizations": (2, {"sync__mode": "local_sgd", "sync__interval": 4}),
    "fp32 pp 2 dp 2 torch": (4, {"parallel__pipeline": 2, "parallel__ddp": "torch"}),
}


def features(case: str) -> set[Hashable]:
    """The words of its name: each precision, engine, schedule, kind of parallelism and mode of synchronization."""
    return {case.partition(" deepspeed ")[2], *case.replace(",", "").split()}


@pytest.mark.parametrize("case", in_tiers(list(CASES), features, cost=lambda case: CASES[case][0]))
def test_six_and_six_resumed_iterations_equal_twelve(ranks, tmp_path, case):
    """A resume must restore weights, masters, moments, scaler, random streams, learning rate and data position."""
    size, changes = CASES[case]
    changes = changes | {
        "train__iterations": 12,
        "train__micro_batch_size": 2,
        "checkpoint__interval": 6,
        "model__hidden_dropout": 0.1,  # so that random streams matter
        "model__attention_dropout": 0.1,
        "train__ramp_up": "[4,4,24]",  # the batch size grows at the restart
    }
    uninterrupted, halves = tmp_path / "uninterrupted", tmp_path / "halves"
    ranks(size, train_to_end, uninterrupted, "codegeex", **changes)
    shutil.copytree(uninterrupted, halves)
    shutil.rmtree(halves / "checkpoints" / "iter_0000012")
    (halves / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("6")
    ranks(size, train_to_end, halves, "codegeex", **changes)

    truth = rows(uninterrupted)
    assert [row["iteration"] for row in truth] == list(range(1, 13))
    if "fp16" in case:
        assert truth[5]["skipped"] and truth[6]["skipped"] and not truth[-1]["skipped"]
    assert rows(halves) == truth
    newest = "checkpoints/iter_0000012"
    stored = tensor_files(uninterrupted / newest)
    assert any("optimizer" in name for name in stored)
    assert any("rng" in name for name in stored)
    assert tensor_files(halves / newest) == stored


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The full weights in the newest checkpoint, by name."""
    layout = read_layout(newest := next((folder / "checkpoints").glob("iter_*")))
    return {
        name: tensor.shard.join([load_file(newest / each.file)[each.key] for each in layout.slices(name, "weight")])
        for name, tensor in layout.tensors.items()
    }


def test_a_warm_start_loads_only_the_weights_of_a_run(ranks, tmp_path):
    """Another precision, optimizer and engine are allowed, as for the start from a published model.

    Under warmup, the learning rate of the first step is 0, so one step does not change the weights.
    """
    common = {"train__micro_batch_size": 2, "parallel__tensor": 2}
    ranks(2, train_to_end, tmp_path / "source", "gpt", train__iterations=5, **common)
    source = weights_of(tmp_path / "source")
    start = {"checkpoint__load_weights": tmp_path / "source", "train__precision": "bf16", "train__iterations": 1}
    engines = {"optim__distributed": "true"}, {"parallel__ddp": "fsdp"}, {"parallel__ddp": "deepspeed"}
    for number, engine in enumerate(({}, *engines)):
        folder = tmp_path / str(number)
        ranks(4, train_to_end, folder, "gpt", **common, **start, **engine, optim__warmup_iterations=1)
        assert [row["iteration"] for row in rows(folder)] == [1]
        if not engine:
            for name, weight in weights_of(folder).items():
                assert torch.equal(weight, source[name].bfloat16()), name
        assert rows(folder)[0]["loss"] == rows(tmp_path / "0")[0]["loss"]


def test_a_warm_start_prints_the_loaded_checkpoint(tmp_path, capsys):
    train_to_end(tmp_path / "source", "gpt", train__iterations=2)
    train_to_end(tmp_path / "run", "gpt", train__iterations=2, checkpoint__load_weights=tmp_path / "source")
    root = tmp_path / "source" / "checkpoints"
    assert f"loading weights from {root} at iteration 2; training starts at iteration 0\n" in unwrapped(
        capsys.readouterr().out
    )


def test_a_run_cannot_resume_from_weights_alone(ranks, tmp_path):
    """A converted checkpoint has no moments. Moments that restart at zero would change the run silently."""
    train_to_end(tmp_path, "gpt", train__iterations=2)
    (folder,) = (tmp_path / "checkpoints").glob("iter_*")
    content = read_layout(folder).model_dump()
    for tensor in content["tensors"].values():
        tensor["values"] = {"weight": tensor["values"]["weight"]}
    (folder / "layout.json").write_text(dump_layout(Layout.model_validate(content)))
    with pytest.raises(CheckpointError) as raised:
        train_to_end(tmp_path, "gpt", train__iterations=4)
    assert re.search(rf"{folder}: has weights alone; start from them with checkpoint\.load_weights", str(raised.value))


def test_a_warm_start_from_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(CheckpointError) as raised:
        train_to_end(tmp_path, "gpt", checkpoint__load_weights=tmp_path / "nowhere")
    assert str(raised.value) == (
        f"checkpoint.load_weights: {tmp_path}/nowhere: is not a folder. Give a run.dir or iter_... folder"
    )


def test_a_run_branches_off_an_older_iteration_of_another(tmp_path, capsys):
    """The branch has the counters of that iteration. A second start of the same command resumes the branch."""
    train_to_end(tmp_path / "source", "gpt", train__iterations=3, checkpoint__interval=1)
    before = newest_tensor_files(tmp_path / "source")
    branch = {"checkpoint__load": tmp_path / "source", "checkpoint__load_iteration": 1, "train__iterations": 3}
    train_to_end(tmp_path / "branch", "gpt", **branch)
    root = tmp_path / "source" / "checkpoints"
    assert f"loading checkpoint from {root} at iteration 1\n" in unwrapped(capsys.readouterr().out)
    assert [row["iteration"] for row in rows(tmp_path / "branch")] == [2, 3]
    assert newest_tensor_files(tmp_path / "branch") == before
    train_to_end(tmp_path / "branch", "gpt", **branch)
    out = unwrapped(capsys.readouterr().out)
    assert "checkpoint.load is not used: run.dir has checkpoints\n" in out and "at iteration 3\n" in out


def test_there_is_no_fallback_from_damage_in_a_chosen_iteration(tmp_path):
    """A user who gives iteration 2 does not want iteration 1."""
    train_to_end(tmp_path / "source", "gpt", train__iterations=2, checkpoint__interval=1)
    (damaged,) = (tmp_path / "source/checkpoints/iter_0000002").glob("*/model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=f"^{damaged}: "):
        train_to_end(tmp_path / "run", "gpt", checkpoint__load=tmp_path / "source", checkpoint__load_iteration=2)
    assert damaged.exists()


def test_a_layout_with_invalid_edits_is_an_error_that_names_it(tmp_path):
    """The edits have a correct checksum. A traceback would not name the file."""
    train_to_end(tmp_path, "gpt", train__iterations=2)
    (folder,) = (tmp_path / "checkpoints").glob("iter_*")
    layout = read_layout(folder)
    train = layout.state["train"]
    for state, config, message in (
        ({}, {}, f"{folder}: its state {{}} is not that of a run. Load another checkpoint"),
        ({**layout.state, "adam_steps": "2"}, {}, "state.adam_steps: Input should be a valid integer"),
        ({**layout.state, "loss_scaler": 1}, {}, "state.loss_scaler: Input should be a valid dict"),
        ({**layout.state, "train": {**train, "iteration": "2"}}, {}, "state.train.iteration.int: "),
        ({**layout.state, "train": {**train, "iteration": 1}}, {}, "is not that of a run"),
        (
            layout.state,
            {"parallel": {"ddp": 5}},
            f"{folder}: config in layout.json: parallel.ddp: ",
        ),
    ):
        edited = layout.model_copy(update={"state": state, "config": {**layout.config, **config}})
        (folder / "layout.json").write_text(dump_layout(edited))
        with pytest.raises(CheckpointError, match=re.escape(message)):
            train_to_end(tmp_path, "gpt", train__iterations=4)
    content = layout.model_dump()
    content["config"]["model"] = 5
    content = {"crc32": content_checksum(content), **content}
    (folder / "layout.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"layout.json: config.model: Input should be a valid dictionary"):
        train_to_end(tmp_path, "gpt", train__iterations=4)


def test_the_error_of_a_foreign_checkpoint_names_the_convert_command(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError) as raised:
        train_to_end(tmp_path / "run", "gpt", hint=convert_hint, checkpoint__load_weights=tmp_path / "hf")
    assert str(raised.value) == (
        f"checkpoint.load_weights: {tmp_path}/hf: has no checkpoint. Give a run.dir or iter_... folder. "
        f"It is a checkpoint of huggingface: run `megatron-lite convert {tmp_path}/hf "
        "NEW_FOLDER`, and load NEW_FOLDER"
    )


def test_diloco_replicas_need_the_saved_number_of_ranks(ranks, tmp_path):
    """An additional replica would have no moments, and with a missing one, its updates would be lost."""
    diloco = {"sync__mode": "diloco", "sync__interval": 2, "train__iterations": 2, "train__micro_batch_size": 1}
    ranks(2, train_to_end, tmp_path, "gpt", **diloco)
    with pytest.raises(RanksFailed) as raised:
        ranks(4, train_to_end, tmp_path, "gpt", **diloco)
    assert re.search(
        r"differs on 2 data-parallel ranks, this run has 4; use 2, or load the "
        r"weights alone with checkpoint\.load_weights",
        str(raised.value),
    )


STAGES = {"parallel__tensor": 1, "parallel__pipeline": 2}
DELAYED = {"sync__mode": "delayed", "train__micro_batch_size": 2}


def test_a_run_that_stops_before_its_first_delayed_update_resumes(ranks, tmp_path):
    """At that time fewer gradients are pending than later. The resumed run must not apply an additional one."""
    changes = DELAYED | {"sync__delay": 3, "train__iterations": 6, "checkpoint__interval": 1, "checkpoint__keep": 0}
    uninterrupted, halves = tmp_path / "uninterrupted", tmp_path / "halves"
    ranks(2, train_to_end, uninterrupted, "gpt", **changes)
    shutil.copytree(uninterrupted, halves)
    for number in range(3, 7):
        shutil.rmtree(halves / f"checkpoints/iter_{number:07d}")
    (halves / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    ranks(2, train_to_end, halves, "gpt", **changes)
    assert rows(halves) == rows(uninterrupted)
    assert tensor_files(halves / "checkpoints/iter_0000006") == tensor_files(uninterrupted / "checkpoints/iter_0000006")


def test_a_pending_gradient_that_is_not_finite_is_not_saved(tmp_path):
    """The run would fail after every restart from that checkpoint, with older checkpoints already deleted."""
    config = tiny_config("gpt", run__dir=str(tmp_path), **DELAYED, sync__delay=2)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    for number in range(2):
        save_run(run, print)
        train_step(run, next_microbatches(run))
        if number == 1:
            run.ddp.pending_grads()[1]["decoder.final_layernorm.bias"][3] = math.nan
    with pytest.raises(TrainingError) as raised:
        save_run(run, print)
    assert str(raised.value) == (
        "iteration 2: a pending gradient of the last 2 iterations (sync.delay) is not finite, so nothing is saved; "
        "lower optim.lr, lengthen optim.warmup_iterations or look at the data of these iterations"
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")) == ["iter_0000000", "iter_0000001"]
    train_step(run, next_microbatches(run))
    report = train_step(run, next_microbatches(run))
    with pytest.raises(
        TrainingError, match=r"iteration 4: .* look at the data of iteration 2, which computed that gradient"
    ):
        answer_bad_values(run, report, print)
    finalize_megatron()


def test_a_loss_that_is_not_finite_stops_a_delayed_run_in_its_first_step():
    """That step updates no weight, which must not be mistaken for an overflow that the loss scaler handles."""
    config = tiny_config("gpt", **DELAYED, sync__delay=2)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    report = train_step(run, next_microbatches(run))
    assert report.skipped
    answer_bad_values(run, report, print)
    with pytest.raises(TrainingError, match="the loss is nan"):
        answer_bad_values(run, replace(report, loss=math.nan, bad="nan"), print)
    finalize_megatron()


def test_sums_in_flight_cannot_be_resumed_under_another_layout_or_interval(ranks, tmp_path):
    """Pending gradients are saved before some of their sums, and those depend on the layout.

    Only sequence parallelism sums over tensor-parallel ranks, and only a pipeline over the stages of a tied embedding.
    With another interval, other weights would be in flight.
    """
    delayed = DELAYED | {"sync__delay": 1, "parallel__tensor": 2}
    diloco = DELAYED | {"sync__mode": "diloco", "sync__interval": 2, "sync__delay": 1}
    for name, before, change, words in (
        ("delayed", delayed, {"parallel__sequence": "true"}, "parallel.sequence (checkpoint: False, config: True)"),
        (
            "norms",
            delayed | {"parallel__sequence": "true"},
            {"parallel__tensor": 1},
            "parallel.tensor (checkpoint: 2, config: 1)",
        ),
        ("stages", delayed, STAGES, "parallel.pipeline (checkpoint: 1, config: 2)"),
        ("diloco", diloco, {"sync__interval": 4}, "sync.interval (checkpoint: 2, config: 4)"),
    ):
        ranks(2, train_to_end, tmp_path / name, "gpt", train__iterations=4, **before)
        with pytest.raises(RanksFailed) as raised:
            ranks(2, train_to_end, tmp_path / name, "gpt", train__iterations=8, **(before | change))
        assert (
            f"{words}: the sums that sync.delay has in flight need the old values; restore them, or load the weights "
            "alone with checkpoint.load_weights"
        ) in str(raised.value)


def test_a_resumed_run_draws_no_initial_weights(tmp_path, monkeypatch):
    """A restart of a large model would draw for minutes what the checkpoint overwrites."""
    drawn: list[str] = []
    real = build.fill
    monkeypatch.setattr(build, "fill", lambda *args, **options: drawn.append(options["name"]) or real(*args, **options))
    train_to_end(tmp_path, "gpt", checkpoint__interval=2, train__iterations=3)
    assert "embedding.word_embeddings.weight" in drawn
    drawn.clear()
    train_to_end(tmp_path, "gpt", checkpoint__interval=2, train__iterations=5)
    assert drawn == []
    train_to_end(tmp_path / "warm", "gpt", checkpoint__load_weights=str(tmp_path), train__iterations=3)
    assert drawn  # a folder of weights may lack some
