"""Runs on pipelines: tied embeddings, evaluation, generation, broken schedules, and stages that fail."""

import json
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lite.errors import ConfigError
from megatron_lite.model.build import get_model
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.pipeline import schedules
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.schedules import build_schedule, gpipe, one_f_one_b, zero_bubble_h1
from megatron_lite.training import setup
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.pretrain import pretrain
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.command import ROOT, make_corpus, run_python, start, tiny_yaml, wait_for
from tests.helpers.limits import PATIENCE
from tests.helpers.runs import CountingDataset, counting_splits
from tests.helpers.texts import all_texts
from tests.helpers.tiny import model_with_biases, next_microbatches, tiny_config

FOUR_LAYERS = {"model__num_layers": 4, "train__micro_batch_size": 1}
VIRTUAL = {"parallel__pipeline": 2, "parallel__schedule": "interleaved", "parallel__virtual_pipeline": 2}


def set_up(model: str, **changes: Any) -> Run:
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng, model_with_biases)


STEPS, POISONED = 9, 7


def poison(run: Run, name: str) -> None:
    """Make a gradient overflow in one iteration on the last data-parallel rank of the stage that has the parameter."""
    if name in run.params and run.ctx.dp.is_last:

        def overflow(grad: Tensor) -> Tensor:
            return grad * float("inf") if run.state.iteration + 1 == POISONED else grad

        run.params[name].register_hook(overflow)


def train_tied(**changes: Any) -> dict[str, Any]:
    """Train, and after every step compare the copies of the word embedding on all stages and data-parallel ranks."""
    run = set_up("gpt", train__iterations=STEPS, **changes)
    if run.config.train.precision == "fp16":
        poison(run, "decoder.final_layernorm.weight")
    names = [name for name in run.params if run.table[name].tied]
    losses, skipped, iterations_that_differ = [], [], []
    for iteration in range(1, STEPS + 1):
        before = {name: tensor.detach().clone() for name, tensor in run.params.items()}
        report = train_step(run, next_microbatches(run))
        losses.append(report.loss)
        skipped.append(report.skipped)
        unchanged = [torch.equal(before[name], tensor) for name, tensor in run.params.items()]
        assert all(unchanged) == (report.skipped or report.lr == 0)  # lr is 0 in the first step of the warmup
        for name in names:
            copies = all_gather(all_gather(run.params[name].detach()[None], run.ctx.dp, dim=0), run.ctx.embd, dim=0)
            assert len(copies) == 4
            if not all(torch.equal(copy, copies[0]) for copy in copies):
                iterations_that_differ.append(iteration)
    finalize_megatron()
    return {"names": names, "losses": torch.tensor(losses), "skipped": skipped, "differ": iterations_that_differ}


TIED = {
    "1f1b": {"parallel__pipeline": 2, "parallel__schedule": "1f1b"},
    "1f1b torch": {"parallel__pipeline": 2, "parallel__schedule": "1f1b", "parallel__ddp": "torch"},
    "interleaved": VIRTUAL,
    "interleaved torch": VIRTUAL | {"parallel__ddp": "torch"},
    "zb-h1": {"parallel__pipeline": 2, "parallel__schedule": "zb-h1"},
}
# precision -> tolerance and config changes; the initial loss scale of fp16 is so large that an early step overflows
PRECISIONS = {"fp32": (1e-5, {}), "bf16": (1e-2, {}), "fp16": (1e-2, {"optim__initial_loss_scale": 2.0**20})}


@cache
def one_process(precision: str) -> dict[str, Any]:
    return train_tied(train__precision=precision, **PRECISIONS[precision][1], **FOUR_LAYERS)


# Each schedule and each precision once with the local engine, and torch's engine with and without chunks.
FAST = [
    ("1f1b", "fp16"),
    ("1f1b torch", "bf16"),
    ("interleaved", "bf16"),
    ("interleaved torch", "fp16"),
    ("zb-h1", "fp32"),
]


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param(case, precision, marks=() if (case, precision) in FAST else pytest.mark.soak)
        for precision in PRECISIONS
        for case in TIED
    ],
)
def test_both_copies_of_a_tied_embedding_stay_equal(ranks, case, precision):
    """Copies that differ would train two models. All stages must skip a step that overflows on one of them.

    In fp32, only the order of sums differs from one process. In bf16 and fp16, one process sums the gradients of
    embedding and head in that dtype.
    """
    tolerance, changes = PRECISIONS[precision]
    truth = one_process(precision)
    results = ranks(4, train_tied, train__precision=precision, **changes, **FOUR_LAYERS, **TIED[case])
    first, last = ["embedding.word_embeddings.weight"], ["output_layer.weight"]
    assert [found["names"] for found in results] == [first, first, last, last]
    for found in results:
        assert found["differ"] == []
        assert found["skipped"] == truth["skipped"]
        assert ((found["losses"] - truth["losses"]) / truth["losses"]).abs().max() < tolerance
    if precision == "fp16":
        assert truth["skipped"][POISONED - 2 : POISONED + 1] == [False, True, False]
        assert any(truth["skipped"][: POISONED - 2])
    else:
        assert not any(truth["skipped"])


def without(order: list[Action], action: Action) -> list[Action]:
    assert action in order
    return [other for other in order if other != action]


def swapped(order: list[Action], a: Action, b: Action) -> list[Action]:
    assert a in order and b in order
    return [{a: b, b: a}.get(action, action) for action in order]


def break_rank_1(base: Schedule, how: Any, *actions: Action) -> Schedule:
    return [how(order, *actions) if rank == 1 else order for rank, order in enumerate(base)]


# Two stages and four micro-batches; the mistake is in rank 1's list.
BROKEN = {
    "two forwards swapped": (
        lambda: break_rank_1(gpipe(2, 4), swapped, Action("F", 1), Action("F", 2)),
        "rank 1: F2.0 receives the output that rank 0 sent for F1.0; use one order",
    ),
    "a backward before its forward": (
        lambda: break_rank_1(one_f_one_b(2, 4), swapped, Action("F", 0), Action("B", 0)),
        "rank 1: B0.0 comes before F0.0, which it needs",
    ),
    "a missing W": (
        lambda: break_rank_1(zero_bubble_h1(2, 4), without, Action("W", 2)),
        "rank 1: W2.0 is missing",
    ),
    "another chunk": (
        lambda: break_rank_1(
            one_f_one_b(2, 4), lambda order: [a if a != Action("B", 3) else Action("B", 3, 1) for a in order]
        ),
        "rank 1: B3.1 has model chunk 1, not 0..0",
    ),
    "ranks that wait for each other": (
        lambda: list(reversed(one_f_one_b(2, 4))),
        "the schedule deadlocks: rank 0 at B0.0 waits for B0.0 or I0.0 of rank 1; rank 1 at F1.0 waits for F1.0 of",
    ),
}


def errors_of_broken_schedules() -> dict[str, str]:
    """The error of each broken schedule. No forward runs before the errors, and a normal step works after them."""
    run = set_up("gpt", parallel__pipeline=2, train__micro_batch_size=2)
    forwards = []
    for chunk in run.model:
        chunk.register_forward_pre_hook(lambda module, inputs: forwards.append(1))
    batch, messages = next_microbatches(run), {}
    for name, (make, _) in BROKEN.items():
        build_schedule.cache_clear()
        try:
            with mock.patch.dict(schedules.SCHEDULES, {"1f1b": lambda pp, microbatches, chunks, make=make: make()}):
                train_step(run, batch)
        except ConfigError as error:
            messages[name] = str(error)
        finally:
            build_schedule.cache_clear()
    assert not forwards
    train_step(run, batch)
    assert len(forwards) == 4
    finalize_megatron()
    return messages


def test_a_broken_schedule_is_an_error_on_every_rank_before_any_forward(ranks):
    for messages in ranks(2, errors_of_broken_schedules):
        assert messages.keys() == BROKEN.keys()
        for name, (_, words) in BROKEN.items():
            assert messages[name].startswith(words), (name, messages[name])


def train_and_evaluate(**changes: Any) -> list[float]:
    """Loss of a step, validation loss, loss of the next step, validation loss."""
    run = set_up("gpt", train__precision="fp64", train__eval_iterations=2, train__global_batch_size=12, **changes)
    data = CountingDataset(40, run.config.data.seq_length, run.config.model.vocab_size)
    found = []
    for _ in range(2):
        found += [train_step(run, next_microbatches(run)).loss, evaluate(run, data, -1)]
        assert all(chunk.training for chunk in run.model)
    finalize_megatron()
    return found


EVALUATED = {
    # Two stages and three micro-batches: the forward-only schedule's last group is smaller.
    "pp 2": (2, {"parallel__pipeline": 2, "train__micro_batch_size": 4}),
    "pp 2 zb-h1": (2, {"parallel__pipeline": 2, "parallel__schedule": "zb-h1", "train__micro_batch_size": 6}),
    "pp 2 x v 2": (2, VIRTUAL | {"train__micro_batch_size": 3}),
    "pp 4 x v 1": (4, {"parallel__pipeline": 4, "train__micro_batch_size": 4}),
    "pp 2 x dp 2": (4, {"parallel__pipeline": 2, "train__micro_batch_size": 2}),
    "pp 2 x v 2 x dp 2": (4, VIRTUAL | {"train__micro_batch_size": 1}),
}


@cache
def evaluated_by_one_process() -> list[float]:
    return train_and_evaluate(model__num_layers=4, train__micro_batch_size=12)


def params(cases: Iterable[str], soak: set[str]) -> list[Any]:
    """Parameters of a test, those in `soak` only for `make soak`."""
    assert soak <= set(cases)
    return [pytest.param(case, marks=pytest.mark.soak if case in soak else ()) for case in cases]


# Each of these is a part of the case with both `v 2` and `dp 2`, or, with four stages, in `WRITING` too.
@pytest.mark.parametrize("case", params(EVALUATED, {"pp 2 x v 2", "pp 2 x dp 2", "pp 4 x v 1"}))
def test_evaluation_equals_that_of_one_process_and_does_not_change_training(ranks, case):
    """In fp64, only the order of sums differs."""
    size, changes = EVALUATED[case]
    truth = evaluated_by_one_process()
    assert len(set(truth)) == 4
    for found in ranks(size, train_and_evaluate, model__num_layers=4, **changes):
        assert found == pytest.approx(truth, rel=1e-12)


WRITING = {
    "tp 2": ("gpt", 2, {"parallel__tensor": 2}),
    "tp 2, llama": ("llama", 2, {"parallel__tensor": 2}),
    "pp 2": ("codegeex", 2, {"parallel__pipeline": 2}),
    "pp 2, window": ("llama", 2, {"parallel__pipeline": 2, "model__window_size": 4}),
    "pp 2 x v 2": ("codegeex", 2, VIRTUAL | {"train__global_batch_size": 2}),
    "pp 4": ("gpt", 4, {"parallel__pipeline": 4}),
    "tp 2 x pp 2": ("codegeex", 4, {"parallel__tensor": 2, "parallel__pipeline": 2}),
}


@cache
def written_by_one_process(model: str, window: int) -> dict[str, Any]:
    return all_texts(model, 12, model__window_size=window)


@pytest.mark.parametrize("case", params(WRITING, {"tp 2", "pp 2"}))  # `tp 2 x pp 2` has both
def test_any_layout_generates_the_texts_of_one_process_with_and_without_a_cache(ranks, case):
    model, size, changes = WRITING[case]
    truth = written_by_one_process(model, changes.get("model__window_size", 0))
    assert truth["greedy, cache"] == truth["greedy, no cache"] != truth["sampled, no cache"]
    for found in ranks(size, all_texts, model, 12, **changes):
        assert found == truth


HANG_SECONDS = 5.0


def hanging_stage(folder: str) -> None:
    """Train on two stages; the second one hangs in its third iteration."""
    config = tiny_config("gpt", run__dir=folder, parallel__pipeline=2, train__micro_batch_size=2)
    engine = setup.PipelineEngine
    # A short timeout only for the engine: the start of the ranks can differ by more.
    setup.PipelineEngine = lambda *args, **options: engine(*args, **{**options, "timeout_seconds": HANG_SECONDS})
    forwards = []

    def hang(module: torch.nn.Module, inputs: tuple) -> None:
        forwards.append(1)
        if len(forwards) == 2 * 4 + 2:  # the second micro-batch
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # otherwise torch waits half a minute until it sends SIGKILL
            time.sleep(600)

    def provider(config, ctx, rng, **options):
        chunks = get_model(config, ctx, rng, **options)
        if ctx.pp.rank == 1:
            chunks[0].register_forward_pre_hook(hang)
        return chunks

    pretrain(config, provider, counting_splits)


LAUNCH = """\
import sys
from megatron_lite.launch.launcher import launch
from megatron_lite.launch.nodes import Nodes
sys.exit(launch("tests.e2e.test_pipeline:hanging_stage", (sys.argv[1],), Nodes(2)))
"""


def test_the_error_of_a_hanging_stage_names_the_waiting_rank_and_action(tmp_path):
    (tmp_path / "launch.py").write_text(LAUNCH)
    done = run_python(str(tmp_path / "launch.py"), str(tmp_path / "run"), cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "rank 0, pipeline stage 0 of 0..1, in B1.0 waited for the gradient of micro-batch 1 from rank 1, and timed "
        f"out after {HANG_SECONDS:g} s; look at the output of that rank first, or raise train.comm_timeout if a stage "
        "computes for that long\n"
    )
    assert "Traceback" not in done.stderr


def pid_of_rank(folder: Path, rank: int) -> int:
    """The process of a rank, when it has sent its first heartbeat."""
    file, until = folder / "heartbeat" / "host_00000", time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with suppress(OSError, ValueError, IndexError):  # not yet
            return json.loads(file.read_bytes().splitlines()[rank])["pid"]
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} has sent no heartbeat")


def test_a_run_exits_at_once_when_one_stage_is_killed(tmp_path):
    settings = {"parallel": {"pipeline": 2}, "train": {"iterations": 100_000}, "log": {"interval": 1000}}
    config = tiny_yaml(tmp_path, make_corpus(tmp_path), **settings, checkpoint={"interval": 0})
    process = start("pretrain", "--config", str(config), "--nproc-per-node", "2", cwd=tmp_path)
    try:
        wait_for("training from iteration", process)
        first, second = (pid_of_rank(tmp_path / "run", rank) for rank in (0, 1))
        os.kill(second, signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert not Path(f"/proc/{first}").exists()
