"""Every rank raises an error when a chunk is invalid, or when a stage fails or hangs; no rank waits forever."""

import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lite.errors import TrainingError
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.pipeline.schedules import build_schedule
from tests.helpers.small_pipelines import BATCH, MESSAGE, WIDTH, engine_of, forward_of, modules_of


def run_with(mistake: str, schedule: str, rank: int, timeout_seconds: float) -> None:
    """Run six micro-batches; `rank` makes a mistake in the third."""
    engine = engine_of(1, timeout_seconds)
    correct = forward_of(modules_of("split", engine), engine)

    def forward(chunk: int, microbatch: int, hidden: Tensor | None) -> Any:
        output = correct(chunk, microbatch, hidden)
        if (engine.pp.rank, microbatch) != (rank, 2):
            return output
        if mistake == "it raises":
            raise ValueError("a mistake in the chunk")
        if mistake == "it sleeps":
            time.sleep(timeout_seconds + 1.5)
        mistaken: dict[str, Callable[[], Any]] = {
            "another shape": lambda: output[:2],
            "another dtype": lambda: output.float(),
            "no gradient": output.detach,
            "two outputs": lambda: (output, None),
            "independent of its input": lambda: correct(chunk, microbatch, torch.ones(BATCH, WIDTH).double()),
        }
        return mistaken.get(mistake, lambda: output)()

    with torch.set_grad_enabled(schedule != "forward-only"):
        engine.run(build_schedule(schedule, engine.pp.size, 6, 1), forward, MESSAGE)


def errors_of(ranks, size: int, *arguments: Any) -> list[str]:
    """The error of each rank: the last line of its traceback."""
    with pytest.raises(RanksFailed) as raised:
        ranks(size, run_with, *arguments)
    parts = str(raised.value).split("--- rank ")[1:]
    assert [int(part.split()[0]) for part in parts] == list(range(size))
    return [part.strip().splitlines()[-1].removeprefix("megatron_lite.errors.") for part in parts]


MISTAKES = {
    "another shape": "in F2.0: the chunk returned [2, 6] torch.float64; the next stage needs [3, 6] torch.float64",
    "another dtype": "in F2.0: the chunk returned [3, 6] torch.float32; the next stage needs [3, 6] torch.float64",
    "no gradient": "in F2.0: the chunk returned a tensor that needs no gradient; a stage has trainable ",
    "two outputs": "in F2.0: the chunk returned a tuple; a chunk returns one tensor",
    "independent of its input": "in B2.0: the output does not depend on `hidden`; use it in the chunk's forward",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_error_of_an_invalid_chunk_names_stage_action_and_mistake(ranks, mistake):
    """Without the check, the neighbour would receive wrong bytes or wait until the timeout."""
    errors = errors_of(ranks, 3, mistake, "1f1b", 1, 60.0)
    assert errors[1].startswith(f"TrainingError: rank 1, pipeline stage 1 of 0..2, {MISTAKES[mistake]}")


def run_after_a_failure() -> str:
    engine = engine_of(1)
    forward, schedule = forward_of(modules_of("plain", engine), engine), build_schedule("1f1b", engine.pp.size, 2, 1)
    for _ in range(2):
        engine.run(schedule, forward, MESSAGE)  # successful runs can follow each other
    with pytest.raises(ValueError):
        engine.run(schedule, mock.Mock(side_effect=ValueError), MESSAGE)
    with pytest.raises(TrainingError) as raised:
        engine.run(schedule, forward, MESSAGE)
    return str(raised.value)


def test_an_engine_that_failed_raises_an_error_in_the_next_run(ranks):
    """Otherwise the next run would receive messages of the failed run."""
    assert ranks(1, run_after_a_failure) == [
        "the pipes may contain messages of a failed run; restart from the newest checkpoint"
    ]


def run_without_the_second_stage() -> None:
    """Rank 1 fails after the engine is built and before the run; torch closes its connections."""
    engine = engine_of(1)
    if engine.pp.rank == 1:
        raise ValueError("before the run")
    time.sleep(1)
    run = forward_of(modules_of("plain", engine), engine)
    engine.run(build_schedule("1f1b", engine.pp.size, 2, 1), run, MESSAGE)


def test_the_error_names_a_neighbour_that_exits_before_the_run(ranks):
    """torch's error would not show which rank to look at."""
    with pytest.raises(RanksFailed) as raised:
        ranks(2, run_without_the_second_stage)
    assert (
        "TrainingError: rank 0, pipeline stage 0 of 0..1, in F0.0 waited for a connection to rank 1, and the "
        "connection broke ("
    ) in str(raised.value)


def run_out_of_memory() -> None:
    engine = engine_of(1)
    forward, schedule = forward_of(modules_of("plain", engine), engine), build_schedule("1f1b", engine.pp.size, 2, 1)
    if engine.pp.rank == 1:
        with mock.patch.object(torch, "empty", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
            engine.run(schedule, forward, MESSAGE)
    else:
        engine.run(schedule, forward, MESSAGE)


def test_out_of_memory_is_not_reported_as_a_broken_connection(ranks):
    """The user would search the network for the cause."""
    with pytest.raises(RanksFailed) as raised:
        ranks(2, run_out_of_memory)
    assert str(raised.value).strip().endswith("torch.OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize("mistake", ["no gradient", "two outputs"])
def test_a_last_chunk_that_returns_no_loss_raises_an_error(ranks, mistake):
    """The last stage sends nothing, so no neighbour would detect the mistake."""
    assert MISTAKES[mistake] in errors_of(ranks, 2, mistake, "1f1b", 1, 60.0)[1]


def test_when_a_stage_fails_the_errors_of_other_ranks_name_message_and_peer(ranks):
    """The user must find the failed rank. Connections to it break long before the timeout."""
    errors = errors_of(ranks, 4, "it raises", "1f1b", 1, 60.0)
    assert errors.pop(1) == "ValueError: a mistake in the chunk"
    for rank, error in zip((0, 2, 3), errors, strict=True):
        what = r"(the (activation|gradient) of micro-batch \d from rank \d|rank \d to receive .+)"
        place = rf"rank {rank}, pipeline stage {rank} of 0\.\.3, in [FB]\d\.0"
        assert re.match(rf"TrainingError: {place} waited for {what}, and the connection broke \(", error), error
        assert "look at the output of that rank first" in error


@pytest.mark.parametrize(
    ("schedule", "waits"),
    [
        ("1f1b", ["B1.0 waited for the gradient of micro-batch 1 from rank 1", "F2.0 waited for the activation of"]),
        ("forward-only", ["F5.0 waited for rank 1 to receive all messages", "F2.0 waited for the activation"]),
    ],
)
def test_ranks_wait_for_a_hanging_stage_until_the_configured_timeout(ranks, schedule, waits):
    """A rank without a timeout would use a cluster for hours without progress."""
    errors = errors_of(ranks, 3, "it sleeps", schedule, 1, 1.5)
    for rank, wait in zip((0, 2), waits, strict=True):
        assert errors[rank].startswith(f"TrainingError: rank {rank}, pipeline stage {rank} of 0..2, in {wait}")
        assert "and timed out after 1.5 s; look at the output of that rank first" in errors[rank]
        assert "raise train.comm_timeout" in errors[rank]
    assert re.search(
        r"rank 1, .* (waited for|to receive) .*, and the connection broke", errors[1]
    )  # its peers exited during its sleep
