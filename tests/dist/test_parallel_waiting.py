"""A collective that times out reports its operation, its group and the ranks of the group."""

import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

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
}


def collectives_without_a_peer() -> dict[str, str]:
    """Call each collective on one of two ranks, in a new group; return this rank's errors by name."""
    errors, store = {}, _get_default_store()
    for name, call in COLLECTIVES.items():
        pg = dist.new_group([0, 1])
        _set_pg_timeout(timedelta(seconds=0.3), pg)  # after connecting, which takes longer on a busy machine
        group = Group("dp", (0, 1), dist.get_rank(), pg)
        if group.rank == 1:
            store.wait([name])
            continue
        with pytest.raises(LostRanks) as raised:
            call(torch.zeros(2), group)
        errors[name] = str(raised.value)
        store.set(name, "")
        assert current_wait()[0] == ""
    return errors


def test_a_collective_that_times_out_names_its_group_and_ranks(ranks):
    """torch's error names only an address, which does not show where to look for the cause."""
    errors, _ = ranks(2, collectives_without_a_peer)
    assert len(errors) == len(COLLECTIVES)
    for name, text in errors.items():
        op = name.partition(",")[0]
        assert re.fullmatch(
            rf"rank 0 got no answer in {op} over dp \(ranks 0 and 1\): .*[Tt]imed out.*\. Look at the output of those "
            r"ranks first; if one of them really computes for so long, raise train.comm_timeout",
            text,
        ), f"{name}: {text}"


def test_errors_other_than_of_communication_are_not_replaced():
    """A bug or a lack of memory must not be reported as a lost rank."""
    group = Group("tp", (0, 1), 0)
    for error in (ValueError("a bug"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()):
        with pytest.raises(type(error)), communicating("all_reduce", group):
            raise error
        assert current_wait()[0] == ""


def test_a_description_lists_small_groups_and_abbreviates_large_ones():
    """A list of a thousand ranks would hide the rest of the message."""
    assert describe("all_reduce", Group("tp", (4, 6), 0)) == "all_reduce over tp (ranks 4 and 6)"
    assert describe("barrier", Group("dp", (0, 2, 4), 0)) == "barrier over dp (ranks 0, 2 and 4)"
    assert describe("barrier", Group("world", tuple(range(1000)), 0)) == "barrier over world (ranks 0 to 999)"


def test_waits_are_counted_and_recorded_except_those_of_ignored_threads():
    """The watchdog would mistake the waits of a background save for progress of training."""
    group, recorded = Group("pp", (0, 1), 0), []

    class Recorder:
        def begin(self, what: str) -> None:
            recorded.append(("begin", what))

        def end(self, what: str) -> None:
            recorded.append(("end", what))

    def wait_in_an_ignored_thread() -> None:
        ignore_this_thread()
        with waiting("barrier", group):
            seen.append(current_wait())

    seen: list[tuple[str, int]] = []
    before = current_wait()[1]
    record_waits(Recorder())
    try:
        with waiting("receive from rank 1", group):
            assert current_wait() == ("receive from rank 1 over pp (ranks 0 and 1)", before + 1)
        thread = threading.Thread(target=wait_in_an_ignored_thread)
        thread.start()
        thread.join()
    finally:
        record_waits(None)
    with waiting("barrier", group):
        pass
    assert seen == [("", before + 1)]
    assert current_wait() == ("", before + 2)
    assert recorded == [("begin", "receive from rank 1"), ("end", "receive from rank 1")]
