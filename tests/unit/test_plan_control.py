"""What one rank asks of the others does not grow with their number, except for the costs that docs/scale.md lists.

The real code of a rank runs in torch's fake process group (`benchmarks/one_rank.py`), and recorders count.
"""

import re
import sys
from collections import Counter
from importlib import import_module
from types import ModuleType
from unittest import mock

import pytest
import torch

from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.p2p import connect
from megatron_lite.plan import control
from tests.helpers.command import ROOT

PAGE = ROOT / "docs" / "scale.md"
WORLDS = (64, 512, 4096)
# They depend on the values and the processor, or on names of different lengths.
OTHERS = {"microseconds", "bytes read", "bytes to the store"}
PHASES = {"start": "start", "iteration 2": "step", "iteration 3": "log", "save 5": "save"}


@pytest.fixture(scope="module")
def one_rank() -> ModuleType:
    with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
        return import_module("one_rank")


@pytest.fixture(scope="module")
def counted(one_rank, tmp_path_factory) -> dict[int, dict[str, Counter[str]]]:
    """The counts of rank 0 by world and event."""
    found = {}
    for world in (512, 4096):
        folder = tmp_path_factory.mktemp(f"world_{world}")
        one_rank.write_corpus(folder)
        found[world] = dict(one_rank.drive(folder, 0, world, {}, {}).of)
    return found


def exceptions() -> dict[str, set[str]]:
    """The costs that grow, by event, in the table of the documentation."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (start|step|log|save) \| ([^|]+) \| [^|]+ \| [^|]+ \|$", text, flags=re.MULTILINE)
    assert rows, "docs/scale.md has no table of costs that grow"
    found: dict[str, set[str]] = {event: set() for event in PHASES.values()}
    for event, name in rows:
        found[event].add(name)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_rank_connects_as_many_groups_in_a_large_job_as_in_a_small_one(one_rank, schedule):
    """A group of other ranks, or one for each of them, would cost a start of 16,384 ranks minutes."""
    found = {}
    for world in WORLDS:
        pp = 4 if world == 64 else 8
        grid = Grid(tp=8, dp=world // 8 // pp, pp=pp)
        for stage in (0, 1, pp - 1):
            counts = one_rank.Counts()
            with one_rank.fake_world(counts, grid.rank(pp=stage), world, {}, {}):
                ctx = ParallelContext.create(grid, torch.device("cpu"), 10.0, ranks_per_host=8)
                connect(ctx, wraps=schedule == "interleaved", timeout_seconds=10.0)
            found[world, stage] = counts.of["start"]["calls of new_group"]
    assert len(set(found.values())) == 1, found
    assert max(found.values()) <= 10, found  # the world, the axes, and their products


def test_calls_and_requests_of_a_rank_do_not_grow_with_the_job(counted):
    """One request for each other rank would be 16,383 of them, and the store would serve their square."""
    allowed = exceptions()
    small, large = counted[512], counted[4096]
    for phase, event in PHASES.items():
        names = (set(small[phase]) | set(large[phase])) - OTHERS
        grown = {name for name in names if large[phase][name] > small[phase][name]}
        assert grown == allowed[event], (event, grown, "docs/scale.md lists other ones")


def test_a_start_a_step_and_a_save_make_few_calls(counted):
    """The counts are those of the code; more would come with each feature, and no single one would be noticed."""
    of = counted[512]
    assert control.REQUESTS_OF_A_START / 2 < of["start"]["store requests"] <= control.REQUESTS_OF_A_START
    assert control.REQUESTS_OF_A_SAVE / 2 < of["save 5"]["store requests"] <= control.REQUESTS_OF_A_SAVE
    assert of["iteration 2"]["store requests"] == 0
    assert of["iteration 2"]["collectives over the world"] <= 4
    assert of["iteration 3"]["collectives"] - of["iteration 2"]["collectives"] <= 5
    assert of["iteration 3"]["store requests"] == 0


def test_the_plan_counts_the_groups_that_a_rank_joins(one_rank, counted):
    """A plan would predict the start of another program."""
    grid = Grid(tp=8, dp=8, pp=8)
    assert len(control.groups_of(grid, 8, gathers=True)) == counted[512]["start"]["groups joined"]


def test_a_save_and_a_resume_move_the_bytes_of_the_checkpoint_at_the_speed_of_the_storage():
    """The storage is the slowest part of both: a second of it must not be lost or counted for each rank."""
    grid = Grid(tp=8, dp=8, pp=8)
    one, two = (control.save(grid, size, machines=64) for size in (1e12, 2e12))
    assert two.seconds - one.seconds == pytest.approx(1e12 / control.STORAGE)
    assert control.save(grid, 1e12, machines=1).parts["storage"] == pytest.approx(1e12 / control.STORAGE_OF_A_MACHINE)
    resumed = control.resume(control.start(grid, 8, gathers=True), grid, 1e12, machines=64, link=1e10)
    assert resumed.parts["storage"] == one.parts["storage"]
    assert resumed.parts["broadcast"] == pytest.approx(1e12 / 64 / 1e10)
    assert resumed.bytes == one.bytes == 1e12


def test_one_process_asks_no_store():
    assert control.start(Grid(), 1, gathers=True).seconds == control.PROCESS_SECONDS
