"""Saves in the background: what they hold, what training may do meanwhile, and what happens when they fail."""

import errno
import os
import re
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.directory import iterations, read_latest
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from tests.helpers.checkpoints import CONFIG, TABLE, as_contents, assert_holds, contents

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Training:
    """Tensors that change after every save, as training changes them."""

    def __init__(self, root: Path, tp: int, dp: int):
        self.ctx = ParallelContext.create(Grid(tp=tp, dp=dp), torch.device("cpu"), 60)
        self.saver = Saver(self.ctx, in_background=True, timeout_seconds=60)
        self.root, self.said = root, []
        self.live = contents(self.ctx, 0)

    def save(self, version: int, *, must_be_done: bool = False) -> None:
        new = contents(self.ctx, version)
        self.saver.wait_for_copy()
        for name, weight in self.live["weights"].items():
            weight.copy_(new["weights"][name])
            for kind, value in self.live["optimizer_state"][name].items():
                value.copy_(new["optimizer_state"][name][kind])
        self.saver.save(
            self.root,
            version,
            self.said.append,
            must_be_done=must_be_done,
            copy_at_once=False,
            **as_contents(
                {**self.live, "rng": {"cpu": torch.full((5,), 10 * version + self.ctx.rank, dtype=torch.uint8)}}
            ),
            table=TABLE,
            state={"iteration": version, "version": version, "loss_scale": 0.1},
            config=CONFIG,
            origin={},
            keep=2,
        )

    def train_on(self) -> None:
        self.saver.wait_for_copy()
        for weight in self.live["weights"].values():
            weight.fill_(-1.0)


class Gate:
    """Lets no tensor file be written until it is opened."""

    def __init__(self, error: OSError | None = None):
        self._open, self._error, self._write = threading.Event(), error, store.write_tensors

    def open(self) -> None:
        self._open.set()

    def __call__(self, path, tensors):
        if threading.current_thread().name.startswith("checkpoint"):
            assert self._open.wait(30)
            if self._error is not None:
                with mock.patch("os.fsync", side_effect=self._error):
                    return self._write(path, tensors)
        return self._write(path, tensors)


def save_while_training(root: Path, tp: int, dp: int) -> list[str]:
    training, gate = Training(root, tp, dp), Gate()
    with mock.patch.object(store, "write_tensors", gate):
        training.save(1)
        training.train_on()
        training.saver.report(training.said.append)
        assert read_latest(root) is None, "it was waited for"
        gate.open()
        training.save(2)  # waits for the first
        assert read_latest(root) is not None
        training.train_on()
        training.save(3, must_be_done=True)
    assert (read_latest(root), iterations(root)) == (3, [2, 3])
    assert [assert_holds(root, training.ctx, n) for n in (2, 3)] == [2, 3]
    training.saver.close(training.said.append)
    return training.said


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 2)])
def test_what_is_saved_is_what_was_there_when_training_went_on(ranks, tmp_path, tp, dp):
    """A tensor that is written while the next step changes it would be of neither iteration."""
    for said in ranks(tp * dp, save_while_training, tmp_path, tp, dp):
        text = "\n".join(said)
        assert [line.split(" (")[0] for line in said if "successfully" in line] == [
            f"  successfully saved checkpoint from iteration       {n} to {tmp_path}" for n in (1, 2, 3)
        ]
        assert text.count("it is copied and written while training continues") == 2
        assert text.count(" s, of which training waited ") == 2


def fail_while_training(root: Path, failing: int) -> list[str]:
    training = Training(root, 2, 1)
    training.save(1, must_be_done=True)
    gate = Gate(FULL if training.ctx.rank == failing else None)
    gate.open()
    with mock.patch.object(store, "write_tensors", gate):
        training.save(2)
        training.saver.wait(training.said.append)
        assert read_latest(root) == 1 and assert_holds(root, training.ctx, 1) == 1
        # the next one is waited for, and here succeeds; from then on saves are in the background again
        training.save(3)
        assert read_latest(root) == 3 and assert_holds(root, training.ctx, 3) == 3
        gate._error = None
        training.save(4)
        training.saver.close(training.said.append)
    assert read_latest(root) == 4
    return training.said


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_fails_is_told_and_loses_nothing(ranks, tmp_path, failing):
    """On every rank, or the ranks would not agree on how to save next."""
    for said in ranks(2, fail_while_training, tmp_path, failing):
        (line,) = [line for line in said if "FAILED" in line]
        assert line.startswith(f"  FAILED to save checkpoint from iteration       2 to {tmp_path}: rank {failing}: ")
        assert "No space left on device. Free some space" in line
        assert line.endswith("Training continues, and stops if the next save fails too")
        kept = [line.split(" from")[0].strip() for line in said if not line.startswith(" saving")]
        copied = kept[1]
        assert "written while training continues" in copied and kept[3:] == [kept[0], copied, kept[0]]


def fail_to_copy(root: Path, failing: int) -> list[str]:
    training = Training(root, 2, 1)
    training.save(1, must_be_done=True)
    no_memory = mock.Mock(side_effect=RuntimeError("out of memory") if training.ctx.rank == failing else None)
    with mock.patch.object(Saver, "_copy_of", no_memory):
        training.save(2)
        training.train_on()
        training.saver.wait(training.said.append)
    assert no_memory.called and read_latest(root) == 1 and iterations(root) == [1]
    training.save(3)
    assert read_latest(root) == 3 and assert_holds(root, training.ctx, 3) == 3
    training.saver.close(training.said.append)
    return training.said


@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_that_fails_is_told_like_a_save_that_fails(ranks, tmp_path, failing):
    """And no rank waits for it for ever: neither its own training nor the other ranks' saves."""
    for said in ranks(2, fail_to_copy, tmp_path, failing):
        (line,) = [line for line in said if "FAILED" in line]
        assert f"from iteration       2 to {tmp_path}: rank {failing}: " in line and "out of memory" in line
        assert line.endswith("Training continues, and stops if the next save fails too")
        assert sum("successfully saved" in line for line in said) == 2


def change_while_copying(root: Path) -> list[str]:
    training, may_copy, copy_of = Training(root, 2, 1), threading.Event(), Saver._copy_of

    def late(self, *what):
        assert may_copy.wait(30)
        return copy_of(self, *what)

    with mock.patch.object(Saver, "_copy_of", late):
        training.save(1)
        if training.ctx.rank == 1:
            next(iter(training.live["weights"].values())).add_(1)
        may_copy.set()
        training.saver.close(training.said.append)
    assert read_latest(root) is None
    return training.said


def test_what_was_changed_before_it_was_copied_is_not_saved(ranks, tmp_path):
    """As running statistics that a model keeps as parameters: the checkpoint would be of two iterations."""
    for said in ranks(2, change_while_copying, tmp_path):
        (line,) = [line for line in said if "FAILED" in line]
        assert f": rank 1: weight of {next(iter(TABLE))} changed while it was copied" in line
        assert "checkpoint.async_save: false" in line


def copy_slowly(root: Path) -> list[str]:
    training, copy_of = Training(root, 2, 1), Saver._copies_of

    def slow(self, mine):
        time.sleep(0.5 * training.ctx.rank)
        return copy_of(self, mine)

    with mock.patch.object(Saver, "_copies_of", slow):
        training.save(1)
        training.train_on()
        while "successfully" not in training.said[-1]:
            time.sleep(0.01)
            training.saver.report(training.said.append)
    training.saver.close(training.said.append)
    return training.said


def test_training_waits_as_long_as_its_slowest_rank(ranks, tmp_path):
    """The other ranks stand in the optimizer's collectives meanwhile."""
    for said in ranks(2, copy_slowly, tmp_path):
        (line,) = [line for line in said if "successfully saved" in line]
        waited = re.search(r"of which training waited ([0-9.]+) s", line)
        assert waited and float(waited[1]) >= 0.5


def test_what_was_made_for_a_save_lives_until_it_is_copied(ranks, tmp_path):
    """Its memory is needed by the next forward, and a disk may be slow."""
    assert ranks(1, how_many_live_while_written, tmp_path) == [0]


def how_many_live_while_written(root: Path) -> int:
    training, gate = Training(root, 1, 1), Gate()
    with mock.patch.object(store, "write_tensors", gate):
        training.save(1)
        training.saver.wait_for_copy()
        made = [weakref.ref(value) for kinds in training.live["optimizer_state"].values() for value in kinds.values()]
        training.live = {}
        living = sum(value() is not None for value in made)
        gate.open()
        training.saver.close(training.said.append)
    assert read_latest(root) == 1
    return living


def save_after_close(root: Path) -> None:
    training = Training(root, 1, 1)
    training.saver.close(training.said.append)
    with pytest.raises(RuntimeError, match="after shutdown"):
        training.save(1)
    training.saver.wait_for_copy()


def test_a_save_that_could_not_begin_is_not_waited_for(ranks, tmp_path):
    ranks(1, save_after_close, tmp_path)


def time_out(root: Path) -> list[str]:
    training = Training(root, 2, 1)
    _set_pg_timeout(timedelta(seconds=1), training.saver._background.world.pg)  # of this connection, not of the next
    slow, is_late = store.write_tensors, root / "rank 0 has waited for too long"

    def write(path, tensors):
        while training.ctx.rank == 1 and not is_late.exists():
            time.sleep(0.01)
        return slow(path, tensors)

    with mock.patch.object(store, "write_tensors", write):
        training.save(1)
        if training.ctx.rank == 0:
            training.saver.wait(training.said.append)
            is_late.touch()
        training.saver.wait(training.said.append)
    for version in (2, 3, 4):
        training.save(version)
    training.saver.close(training.said.append)
    assert read_latest(root) == 4 and assert_holds(root, training.ctx, 4) == 4
    return training.said


def test_after_a_time_out_saves_go_on_in_the_background(ranks, tmp_path):
    """A connection that has timed out stays broken: every second save would fail for the rest of the run."""
    for said in ranks(2, time_out, tmp_path):
        assert sum("FAILED" in line for line in said) == 1
        assert sum("written while training continues" in line for line in said) == 3


def fail_twice(root: Path) -> str:
    training = Training(root, 2, 1)
    with mock.patch("os.fsync", side_effect=FULL):
        training.save(1)
        training.saver.wait(training.said.append)
        with pytest.raises(CheckpointError) as caught:
            training.save(2)
        training.saver.close(training.said.append)
    return str(caught.value)


def test_a_second_failure_ends_training(ranks, tmp_path):
    """A run without checkpoints for days would lose them all."""
    first, second = ranks(2, fail_twice, tmp_path)
    assert first == second and "No space left on device" in first
