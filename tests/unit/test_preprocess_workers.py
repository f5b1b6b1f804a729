"""The ordered map over processes: order, errors in their place, and an end in every case."""

import functools
import os
import subprocess
import sys

import pytest

from megatron_lite.errors import DataError
from megatron_lite.preprocess.workers import map_in_order
from tests.helpers.limits import PATIENCE
from tests.helpers.worker_processes import Doubler, workers_alive


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_keep_the_order_of_the_items(workers):
    results = list(map_in_order(Doubler, range(50), workers))
    assert [(item, double) for item, (double, _) in results] == [(k, 2 * k) for k in range(50)]
    pids = {pid for _, (_, pid) in results}
    assert len(pids) == workers and os.getpid() not in pids


def test_an_error_comes_in_its_place():
    results = map_in_order(functools.partial(Doubler, fails_at=7), range(50), 2)
    assert [next(results)[0] for _ in range(7)] == list(range(7))
    with pytest.raises(DataError, match="item 7 is bad"):
        next(results)
    assert not workers_alive()


@pytest.mark.parametrize("dies_at", [0, 7, 49])
def test_a_process_that_dies_is_told_and_the_others_end(dies_at):
    """At once, in the middle, on the last item; with nobody left to answer, waiting would last for ever."""
    with pytest.raises(DataError, match="a worker process died; if it ran out of memory, use fewer"):
        list(map_in_order(functools.partial(Doubler, dies_at=dies_at), range(50), 2))
    assert not workers_alive()


def test_items_larger_than_a_pipe_holds_do_not_lock_both_sides():
    """Both may be sending a megabyte to each other at the same moment."""
    results = map_in_order(functools.partial(functools.partial, bytes.swapcase), [b"a" * (1 << 21)] * 12, 2)
    assert all(answer == b"A" * (1 << 21) for _, answer in results)


def test_nobody_reading_on_ends_the_processes():
    results = map_in_order(Doubler, range(50), 2)
    next(results)
    results.close()
    assert not workers_alive()


KILLED = """
from megatron_lite.preprocess.workers import map_in_order
from tests.helpers.worker_processes import Doubler
if __name__ == "__main__":
    for _, (_, pid) in map_in_order(Doubler, range(10_000), 2):
        print(pid, flush=True)
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    """Else every run that is killed leaves processes that hold its memory."""
    (tmp_path / "script.py").write_text(KILLED)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = {int(process.stdout.readline()) for _ in range(4)}
    process.kill()
    _, err = process.communicate(timeout=PATIENCE)  # ends when the last process that holds its output has
    assert len(pids) == 2 and "Traceback" not in err
