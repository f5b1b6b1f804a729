"""Ranks wait for the work of others without a deadline, and not for a rank that is gone."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.parallel import messages
from megatron_lite.parallel.agreement import all_gather_objects, gather_objects, on_all, on_first, same
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import current_wait, ignore_this_thread


def world() -> Group:
    return Group("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


@contextmanager
def limited(silence: float, hang: float) -> Iterator[None]:
    before = vars(messages.limits).copy()
    vars(messages.limits).update(silence=silence, hang=hang)
    try:
        yield
    finally:
        vars(messages.limits).update(before)


def wait_for_slow_work() -> tuple[str, list[int], bool]:
    rank = dist.get_rank()
    with limited(silence=0.4, hang=60):
        before = current_wait()[1]
        first = on_first(lambda: time.sleep(1) or "converted", world())
        is_progress = rank == 0 or current_wait()[1] > before + 1
        each = on_all(lambda: time.sleep(rank) or rank, world())
        return first, all_gather_objects(each, world()), is_progress


def test_work_may_take_longer_than_the_timeout(ranks):
    """A conversion, index or checksum of a large model takes longer than a collective may. The others wait; for their
    watchdogs that is progress."""
    for first, each, is_progress in ranks(3, wait_for_slow_work):
        assert first == "converted" and each == [0, 1, 2] and is_progress


def wait_for_lost_work(lose: Callable[[], object], call: str) -> float:
    """Rank 1 of 3, or rank 0 in `on_first`, is lost in its work; returns seconds of the others."""
    lost = 0 if call == "on_first" else 1
    started = time.monotonic()
    with limited(silence=0.8, hang=0.4):
        try:
            if call == "on_first":
                on_first(lose, world())
            else:
                on_all(lose if dist.get_rank() == lost else int, world())
        finally:
            if dist.get_rank() != lost:
                assert time.monotonic() - started < 6
                time.sleep(1)
    return 0.0


def hang() -> None:
    """Work for a moment, as a conversion that then waits for a disk."""
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
    time.sleep(4)


@pytest.mark.parametrize("call, lose, named", [("on_first", hang, "rank 0"), ("on_all", hang, "rank 1")])
def test_a_rank_that_hangs_in_its_work_is_named(ranks, call, lose, named):
    """Its thread still runs and could send a heartbeat forever."""
    with pytest.raises(RanksFailed) as raised:
        ranks(3, wait_for_lost_work, lose, call)
    assert f"{call} over world (ranks 0 to 2): {named} sent no heartbeat for " in str(raised.value)


def fail(rank: int, kind: type[Exception]) -> None:
    if dist.get_rank() >= rank:
        raise kind("wrong", *()) if kind is not DamagedCheckpoint else DamagedCheckpoint("wrong", "a file")


def errors_of_all() -> tuple[str, str, str]:
    found = []
    for rank, kind in ((1, CheckpointError), (2, KeyError), (1, DamagedCheckpoint)):
        try:
            on_all(lambda rank=rank, kind=kind: fail(rank, kind), world())
        except Exception as error:
            found.append(f"{type(error).__name__} {error}{getattr(error, 'file', '')}")
    return tuple(found)


def test_all_ranks_raise_the_error_of_the_lowest_failed_rank(ranks):
    """An error that only its rank raised would leave the others in the next collective. The damaged file is known on
    every rank, so that the first rank can confirm it."""
    expected = (
        "CheckpointError rank 1: wrong (1 more rank failed)",
        "TrainingError rank 2: KeyError: 'wrong'",
        "DamagedCheckpoint rank 1: wrong (1 more rank failed)a file",
    )
    assert ranks(3, errors_of_all) == [expected] * 3


def exchange_objects() -> tuple[list[str], bool, bool, str]:
    rank = dist.get_rank()
    gathered = gather_objects("x" * rank, world())
    return gathered, same({"a": 1}, world()), same(rank // 2, world()), on_first(lambda: "y" * 100_000, world())[-2:]


def test_objects_are_gathered_and_compared(ranks):
    """A large result goes around the store, and comparisons need no objects."""
    expected = ([], True, False, "yy")
    assert ranks(3, exchange_objects) == [(["", "x", "xx"], *expected[1:]), expected, expected]


def exchange_in_two_threads() -> list[int]:
    found = []

    def in_background() -> None:
        ignore_this_thread()
        for number in range(20):
            found.append(on_first(lambda number=number: number, world()))
            on_all(lambda: None, world())

    thread = threading.Thread(target=in_background)
    thread.start()
    for _ in range(dist.get_rank() * 10 + 10):
        time.sleep(0.001)
    for _ in range(20):
        on_all(lambda: None, world())
    thread.join()
    return found


def test_a_background_thread_has_exchanges_of_its_own(ranks):
    """A save in the background and training make their calls in another order on each rank."""
    assert ranks(2, exchange_in_two_threads) == [list(range(20))] * 2


def keys_after(count: int) -> int:
    for _ in range(count):
        on_first(lambda: "x", world())
        gather_objects("x", world())
        on_all(lambda: None, world())
    dist.barrier()
    return _get_default_store().num_keys()


def test_keys_of_the_store_are_deleted(ranks):
    """A run of months would fill the memory of the process that serves the store."""
    few, many = (ranks(2, keys_after, count)[0] for count in (2, 20))
    assert many == few
