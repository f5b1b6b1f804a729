"""Background saves: which values they write, how long training waits for them, and how failures are reported."""

import errno
import os
import re
import threading
import time
import weakref
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.directory import iterations, read_latest
from megatron_lite.checkpoint.saver import PinnedMemory, Saver
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.messages import limits
from tests.helpers.checkpoints import CONFIG, TABLE, assert_complete, contents, join_contents

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Training:
    """A saver and tensors that change after every save, as in training."""

    def __init__(self, root: Path, tp: int, dp: int):
        self.ctx = ParallelContext.create(Grid(tp=tp, dp=dp), torch.device("cpu"), 60)
        self.saver = Saver(self.ctx, in_background=True)
        self.root, self.lines = root, []
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
            self.lines.append,
            must_be_done=must_be_done,
            copy_at_once=False,
            **join_contents(
                {**self.live, "rng": {"cpu": torch.full((5,), 10 * version + self.ctx.rank, dtype=torch.uint8)}}
            ),
            table=TABLE,
            state={"iteration": version, "version": version, "loss_scale": 0.1},
            config=CONFIG,
            origin={},
            keep=2,
        )

    def overwrite_weights(self) -> None:
        """What an optimizer step does while a save is in flight."""
        self.saver.wait_for_copy()
        for weight in self.live["weights"].values():
            weight.fill_(-1.0)


class Gate:
    """A `write_tensors` whose background calls wait until `open`, and then fail if there is an error."""

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
        training.overwrite_weights()
        training.saver.report(training.lines.append)
        assert read_latest(root) is None, "training waited for the save"
        gate.open()
        training.save(2)  # waits for the first save
        assert read_latest(root) is not None
        training.overwrite_weights()
        training.save(3, must_be_done=True)
    assert (read_latest(root), iterations(root)) == (3, [2, 3])
    assert [assert_complete(root, training.ctx, n) for n in (2, 3)] == [2, 3]
    training.saver.close(training.lines.append)
    return training.lines


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 2)])
def test_a_background_save_has_the_values_at_its_start(ranks, tmp_path, tp, dp):
    """A tensor that the next step changes while it is written would be of neither iteration."""
    for lines in ranks(tp * dp, save_while_training, tmp_path, tp, dp):
        text = "\n".join(lines)
        assert [line.split(" (")[0] for line in lines if line.startswith("saved")] == [
            f"saved checkpoint from iteration {n} to {tmp_path}" for n in (1, 2, 3)
        ]
        assert text.count(" while training continues") == 2
        assert text.count(" s, of which training waited ") == 2


def fail_while_training(root: Path, failing: int) -> list[str]:
    training = Training(root, 2, 1)
    training.save(1, must_be_done=True)
    gate = Gate(FULL if training.ctx.rank == failing else None)
    gate.open()
    with mock.patch.object(store, "write_tensors", gate):
        training.save(2)
        training.saver.wait(training.lines.append)
        assert read_latest(root) == 1 and assert_complete(root, training.ctx, 1) == 1
        # After a failure, training waits for the next save. It succeeds, so later saves are in the background again.
        training.save(3)
        assert read_latest(root) == 3 and assert_complete(root, training.ctx, 3) == 3
        gate._error = None
        training.save(4)
        training.saver.close(training.lines.append)
    assert read_latest(root) == 4
    return training.lines


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_save_is_reported_and_the_previous_checkpoint_remains(ranks, tmp_path, failing):
    """Every rank must know of the failure; otherwise ranks would disagree on how to save next."""
    for lines in ranks(2, fail_while_training, tmp_path, failing):
        (line,) = [line for line in lines if "FAILED" in line]
        assert line.startswith(f"FAILED to save checkpoint from iteration 2 to {tmp_path}: rank {failing}: ")
        assert "No space left on device. Free some space" in line
        assert line.endswith("Training continues, and stops if the next save fails too")
        outcomes = [line.split(" from")[0].strip() for line in lines]
        in_background = outcomes[1]
        assert in_background == "copying and writing the checkpoint"
        assert outcomes[3:] == [outcomes[0], in_background, outcomes[0]]


def fail_to_copy(root: Path, failing: int) -> list[str]:
    training = Training(root, 2, 1)
    training.save(1, must_be_done=True)
    no_memory = mock.Mock(side_effect=RuntimeError("out of memory") if training.ctx.rank == failing else None)
    with mock.patch.object(Saver, "_copy_of", no_memory):
        training.save(2)
        training.overwrite_weights()
        training.saver.wait(training.lines.append)
    assert no_memory.called and read_latest(root) == 1 and iterations(root) == [1]
    training.save(3)
    assert read_latest(root) == 3 and assert_complete(root, training.ctx, 3) == 3
    training.saver.close(training.lines.append)
    return training.lines


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_copy_is_reported_like_a_failed_save(ranks, tmp_path, failing):
    """Training on that rank, or a save on another rank, would otherwise wait for the copy forever."""
    for lines in ranks(2, fail_to_copy, tmp_path, failing):
        (line,) = [line for line in lines if "FAILED" in line]
        assert f"from iteration 2 to {tmp_path}: rank {failing}: " in line and "out of memory" in line
        assert line.endswith("Training continues, and stops if the next save fails too")
        assert sum(line.startswith("saved ") for line in lines) == 2


def change_before_copy(root: Path) -> list[str]:
    training, may_copy, copy_of = Training(root, 2, 1), threading.Event(), Saver._copy_of

    def delayed_copy(self, *arguments):
        assert may_copy.wait(30)
        return copy_of(self, *arguments)

    with mock.patch.object(Saver, "_copy_of", delayed_copy):
        training.save(1)
        if training.ctx.rank == 1:
            next(iter(training.live["weights"].values())).add_(1)
        may_copy.set()
        training.saver.close(training.lines.append)
    assert read_latest(root) is None
    return training.lines


def test_a_tensor_changed_before_its_copy_makes_the_save_fail(ranks, tmp_path):
    """A model may update running statistics in forward; the checkpoint would mix two iterations."""
    for lines in ranks(2, change_before_copy, tmp_path):
        (line,) = [line for line in lines if "FAILED" in line]
        assert f": rank 1: weight of {next(iter(TABLE))} changed while it was copied" in line
        assert "checkpoint.async_save: false" in line


def copy_slowly(root: Path) -> list[str]:
    training, copied = Training(root, 2, 1), Saver._copied

    def slow_copy(self, contents, ready):
        time.sleep(0.5 * training.ctx.rank)
        return copied(self, contents, ready)

    with mock.patch.object(Saver, "_copied", slow_copy):
        training.save(1)
        training.overwrite_weights()
        while not training.lines[-1].startswith("saved "):
            time.sleep(0.01)
            training.saver.report(training.lines.append)
    training.saver.close(training.lines.append)
    return training.lines


def test_the_reported_wait_is_that_of_the_slowest_rank(ranks, tmp_path):
    """The other ranks wait in the optimizer's collectives while the slowest rank copies."""
    lines, _ = ranks(2, copy_slowly, tmp_path)  # the first rank prints
    (line,) = [line for line in lines if line.startswith("saved ")]
    waited = re.search(r"of which training waited ([0-9.]+) s", line)
    assert waited and float(waited[1]) >= 0.5


def test_temporary_tensors_of_a_save_are_freed_after_the_copy(ranks, tmp_path):
    """Until the disk is done would be too long: the next forward needs their memory."""
    assert ranks(1, count_tensors_alive_during_write, tmp_path) == [0]


def count_tensors_alive_during_write(root: Path) -> int:
    training, gate = Training(root, 1, 1), Gate()
    with mock.patch.object(store, "write_tensors", gate):
        training.save(1)
        training.saver.wait_for_copy()
        references = [
            weakref.ref(value) for kinds in training.live["optimizer_state"].values() for value in kinds.values()
        ]
        training.live = {}
        num_alive = sum(value() is not None for value in references)
        gate.open()
        training.saver.close(training.lines.append)
    assert read_latest(root) == 1
    return num_alive


def save_after_close(root: Path) -> None:
    training = Training(root, 1, 1)
    training.saver.close(training.lines.append)
    with pytest.raises(RuntimeError, match="after shutdown"):
        training.save(1)
    training.saver.wait_for_copy()


def test_waiting_after_a_save_that_could_not_start_returns(ranks, tmp_path):
    """The next step waits for the copy; it would wait forever for one that no thread makes."""
    ranks(1, save_after_close, tmp_path)


def save_with_timeout(root: Path) -> list[str]:
    training = Training(root, 2, 1)
    write_tensors = store.write_tensors

    def write(path, tensors):
        if training.ctx.rank == 1:
            time.sleep(2)
        return write_tensors(path, tensors)

    with mock.patch.object(store, "write_tensors", write), mock.patch.multiple(limits, silence=0.5, hang=0.1):
        training.save(1)
        if training.ctx.rank == 0:
            training.saver.wait(training.lines.append)
        training.saver.wait(training.lines.append)
    for version in (2, 3, 4):
        training.save(version)
    training.saver.close(training.lines.append)
    assert read_latest(root) == 4 and assert_complete(root, training.ctx, 4) == 4
    return training.lines


def test_after_a_timeout_saves_continue_in_the_background(ranks, tmp_path):
    """The ranks have left the save at different places. In one order of exchanges later saves would fail."""
    for lines in ranks(2, save_with_timeout, tmp_path):
        assert sum("FAILED" in line for line in lines) == 1
        assert sum(line.endswith(" while training continues") for line in lines) == 3


def fail_twice(root: Path) -> str:
    training = Training(root, 2, 1)
    with mock.patch("os.fsync", side_effect=FULL):
        training.save(1)
        training.saver.wait(training.lines.append)
        with pytest.raises(CheckpointError) as caught:
            training.save(2)
        training.saver.close(training.lines.append)
    return str(caught.value)


def test_a_second_failed_save_in_a_row_stops_training(ranks, tmp_path):
    """A run that trained on for days without checkpoints would lose those days in a crash."""
    first, second = ranks(2, fail_twice, tmp_path)
    assert first == second and "No space left on device" in first


def test_copies_of_a_gpu_share_blocks_of_pinned_memory():
    """Each tensor alone would be rounded up to a power of two bytes."""
    blocks: list[torch.Tensor] = []

    def allocate(size):
        blocks.append(torch.empty(size, dtype=torch.uint8))
        return blocks[-1]

    memory = PinnedMemory(allocate)
    shapes = [
        (torch.Size([1000, 1000]), torch.float32),
        (torch.Size([]), torch.float32),
        (torch.Size([3]), torch.bfloat16),
    ]
    taken = [memory.take(shape, dtype=dtype) for shape, dtype in shapes for _ in range(20)]
    assert [(x.shape, x.dtype) for x in taken] == [entry for entry in shapes for _ in range(20)]
    assert [len(block) for block in blocks] == [PinnedMemory.BLOCK]
    ends = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    memory.take(torch.Size([PinnedMemory.BLOCK]), dtype=torch.uint8)
    assert len(blocks) == 2
