"""The pool of ranks reuses its processes, and reports a rank that fails, hangs or dies."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_lite.launch.pool import Ranks, RanksFailed


def sum_of_ranks(x):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return x, dist.get_rank(), dist.get_world_size(), total.item(), os.getpid()


def fails_on_one_rank():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 fails")
    dist.barrier()


def hangs_on_one_rank():
    if dist.get_rank() == 1:
        time.sleep(60)


def dies_on_one_rank():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


@pytest.fixture
def pool():
    pool = Ranks(timeout_seconds=30)
    yield pool
    pool.close()


def test_smaller_calls_reuse_the_first_processes(pool):
    """New processes for every test would cost seconds each."""
    four = pool(4, sum_of_ranks, "a")
    two = pool(2, sum_of_ranks, x="b")
    assert [r[:4] for r in four] == [("a", rank, 4, 6.0) for rank in range(4)]
    assert [r[:4] for r in two] == [("b", rank, 2, 1.0) for rank in range(2)]
    assert [r[4] for r in two] == [r[4] for r in four][:2]


def test_a_failure_shows_the_traceback_of_its_rank(pool):
    """The next call must work, or one failed test would fail all later ones."""
    with pytest.raises(RanksFailed, match=r"--- rank 1 ---(.|\n)*ValueError: rank 1 fails"):
        pool(2, fails_on_one_rank)
    assert [r[3] for r in pool(2, sum_of_ranks, 0)] == [1.0, 1.0]


def test_a_timeout_shows_the_stack_of_the_rank_and_replaces_processes(pool):
    """A process that hangs can run no further test."""
    first = pool(2, sum_of_ranks, 0)
    with pytest.raises(RanksFailed) as failure:
        pool.within(1.0)(2, hangs_on_one_rank)
    assert "failed on 1 of 2 ranks" in str(failure.value)
    assert "--- rank 1 ---\nhung" in str(failure.value)
    assert "hangs_on_one_rank" in str(failure.value).split("hung")[1]
    again = pool(2, sum_of_ranks, 0)
    assert not {r[4] for r in first} & {r[4] for r in again}


def test_a_dead_rank_is_reported_with_its_exit_code(pool):
    """Without a report, the caller would wait for the result until the timeout."""
    with pytest.raises(RanksFailed, match="rank 1 ---\nthe process died, exit code 3"):
        pool(2, dies_on_one_rank)
    assert [r[3] for r in pool(2, sum_of_ranks, 0)] == [1.0, 1.0]


def test_a_closed_pool_leaves_no_temporary_files():
    """A store file per call would fill the disk in a long session."""
    pool = Ranks()
    pool(2, sum_of_ranks, 0)
    assert not list(pool._folder.glob("store-*"))
    pool.close()
    assert not pool._folder.exists()
