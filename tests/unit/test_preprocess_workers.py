"""The ordered map over processes: the order of results and errors, and the exit of every worker."""

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


def test_an_error_is_raised_in_the_order_of_the_items():
    results = map_in_order(functools.partial(Doubler, fails_at=7), range(50), 2)
    assert [next(results)[0] for _ in range(7)] == list(range(7))
    with pytest.raises(DataError, match="item 7 is bad"):
        next(results)
    assert not workers_alive()


@pytest.mark.parametrize("dies_at", [0, 7, 49])
def test_a_dead_worker_is_an_error_and_the_others_exit(dies_at):
    """On the first, a middle or the last item, a wait for the answer of a dead process would never end."""
    with pytest.raises(DataError, match="a worker process died; if it ran out of memory, use fewer"):
        list(map_in_order(functools.partial(Doubler, dies_at=dies_at), range(50), 2))
    assert not workers_alive()


def test_items_larger_than_a_pipe_buffer_cause_no_deadlock():
    """Both sides can send megabytes to each other at the same time."""
    results = map_in_order(functools.partial(functools.partial, bytes.swapcase), [b"a" * (1 << 21)] * 12, 2)
    assert all(answer == b"A" * (1 << 21) for _, answer in results)


def test_workers_exit_when_the_iterator_is_closed():
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


def test_workers_exit_when_their_parent_is_killed(tmp_path):
    """Otherwise a killed parent would leave workers that use memory."""
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
    _, err = process.communicate(timeout=PATIENCE)  # returns when all processes with this output have exited
    assert len(pids) == 2 and "Traceback" not in err
