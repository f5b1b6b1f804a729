"""Collectives that get no answer: who waited for whom, in which group."""

import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from megatron_lite.parallel.agreement import all_gather_objects, gather_objects, on_all, on_first
from megatron_lite.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_async,
    barrier,
    broadcast,
    reduce_scatter_async,
)
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import (
    LostRanks,
    communicating,
    current_wait,
    describe,
    ignore_this_thread,
    record_waits,
    waiting,
)

COLLECTIVES = {
    "all_reduce": lambda x, group: all_reduce(x, group),
    "all_reduce, asynchronous": lambda x, group: all_reduce_async(x, group)[1](),
    "all_gather": lambda x, group: all_gather(x, group, dim=0),
    "reduce_scatter": lambda x, group: reduce_scatter_async(x, group)[1](),
    "broadcast": lambda x, group: broadcast(x, group, src=1),
    "barrier": lambda x, group: barrier(group),
    "all_gather of objects": lambda x, group: all_gather_objects(1, group),
    "all_gather of errors": lambda x, group: on_all(lambda: 1, group),
    "all_gather of sizes": lambda x, group: gather_objects(1, group),
}


def left_alone() -> dict[str, str]:
    """Rank 0 calls collectives that rank 1 never comes to, each in a group of its own."""
    said, store = {}, _get_default_store()
    for name, call in {**COLLECTIVES, "broadcast of an object": None}.items():
        pg = dist.new_group([0, 1])
        _set_pg_timeout(timedelta(seconds=0.3), pg)  # only now: on a busy machine, connecting takes longer
        group = Group("dp", (0, 1), dist.get_rank(), pg)
        waits = 1 if call is None else 0  # the first rank of on_first need not wait
        if group.rank != waits:
            store.wait([name])
            continue
        with pytest.raises(LostRanks) as raised:
            call(torch.zeros(2), group) if call else on_first(lambda: 1, group)
        said[name] = str(raised.value)
        store.set(name, "")
        assert current_wait()[0] == ""
    return said


def test_a_collective_that_gets_no_answer_names_its_group_and_its_ranks(ranks):
    """torch's own error says an address."""
    of_first, of_second = ranks(2, left_alone)
    assert len(of_first) == len(COLLECTIVES)
    for rank, said in enumerate((of_first, of_second)):
        for name, text in said.items():
            op = re.split("[, ]", name)[0]
            assert re.fullmatch(
                rf"rank {rank} got no answer in {op} over dp \(ranks 0 and 1\): .*[Tt]imed out.*\. Look at the output "
                r"of those ranks first; if one of them really computes for so long, raise train.comm_timeout",
                text,
            ), f"{name}: {text}"


def test_what_is_no_failure_of_communication_stays_as_it_is():
    group = Group("tp", (0, 1), 0)
    for error in (ValueError("a bug"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()):
        with pytest.raises(type(error)), communicating("all_reduce", group):
            raise error
        assert current_wait()[0] == ""


def test_a_message_lists_the_ranks_of_small_groups_and_the_ends_of_large_ones():
    assert describe("all_reduce", Group("tp", (4, 6), 0)) == "all_reduce over tp (ranks 4 and 6)"
    assert describe("barrier", Group("dp", (0, 2, 4), 0)) == "barrier over dp (ranks 0, 2 and 4)"
    assert describe("barrier", Group("world", tuple(range(1000)), 0)) == "barrier over world (ranks 0 to 999)"


def test_waits_are_counted_and_timed_but_not_those_of_other_threads():
    """A save in the background is no progress of training, and no wait of it."""
    group, told = Group("pp", (0, 1), 0), []

    class Recorder:
        def begin(self, what: str) -> None:
            told.append(("begin", what))

        def end(self, what: str) -> None:
            told.append(("end", what))

    def aside() -> None:
        ignore_this_thread()
        with waiting("barrier", group):
            seen.append(current_wait())

    seen: list[tuple[str, int]] = []
    before = current_wait()[1]
    record_waits(Recorder())
    try:
        with waiting("receive from rank 1", group):
            assert current_wait() == ("receive from rank 1 over pp (ranks 0 and 1)", before + 1)
        thread = threading.Thread(target=aside)
        thread.start()
        thread.join()
    finally:
        record_waits(None)
    with waiting("barrier", group):
        pass
    assert seen == [("", before + 1)]
    assert current_wait() == ("", before + 2)
    assert told == [("begin", "receive from rank 1"), ("end", "receive from rank 1")]
