"""Runs in which the work of one rank takes longer than the others may be silent."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from megatron_lite.checkpoint import directory, store
from megatron_lite.checkpoint.directory import read_latest
from megatron_lite.parallel import messages
from megatron_lite.training import checkpointing, initialize
from tests.helpers.checkpoints import flip_a_bit
from tests.helpers.runs import rows, train_to_end

COMMON = {"checkpoint__interval": 1, "checkpoint__keep": 0, "train__micro_batch_size": 2}
SILENCE, DELAY = 0.7, 1.1  # seconds
# The work that the first rank does alone at a save and at a resume from a damaged checkpoint.
PLACES = [(directory, "publish"), (store, "verify"), (checkpointing, "set_aside")]


def delayed(function: Callable) -> Callable:
    def slow(*args, **kwargs):
        time.sleep(DELAY)
        return function(*args, **kwargs)

    return slow


def train_slowly(folder: Path, changes: dict[str, object]) -> None:
    limits = messages.Limits(SILENCE)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(messages, "limits", limits))
        stack.enter_context(mock.patch.object(initialize, "limits", messages.Limits()))  # collectives keep their time
        for module, name in PLACES:
            stack.enter_context(mock.patch.object(module, name, delayed(getattr(module, name))))
        train_to_end(folder, "codegeex", **COMMON, **changes, train__iterations=2)


def train(folder: Path, changes: dict[str, object]) -> None:
    train_to_end(folder, "codegeex", **COMMON, **changes, train__iterations=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"optim__distributed": "true"},
        {"parallel__ddp": "fsdp"},
        {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 3},
    ],
    ids=["zero1", "fsdp", "deepspeed"],
)
def test_slow_work_of_one_rank_stops_no_other(ranks, tmp_path, changes):
    """The run would end in the confirmation of the damage, the tracker would still name the damaged checkpoint, and
    each restart would end there again."""
    folder, root = tmp_path / "run", tmp_path / "run/checkpoints"
    ranks(2, train, folder, changes)
    expected = rows(folder)
    flip_a_bit(root / "iter_0000002")
    ranks(2, train_slowly, folder, changes)
    assert rows(folder) == expected and read_latest(root) == 2
    ranks(2, train, folder, changes)
    assert sorted(path.name for path in root.glob("*iter_*")) == [
        "damaged-iter_0000002",
        "iter_0000001",
        "iter_0000002",
    ]
