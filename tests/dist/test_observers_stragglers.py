"""The straggler line names a rank that computes longer than others, and ignores noise, waits and other stages."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_lite.observers.stragglers import Stragglers
from megatron_lite.parallel.collectives import barrier
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid


def lines_of(seconds_by_step: list[list[float]], pp: int, tp: int) -> list[str]:
    """The straggler line after each step, in which every rank sleeps for its seconds and then waits in a barrier."""
    grid = Grid(tp=tp, cp=1, dp=dist.get_world_size() // (pp * tp), pp=pp)
    ctx = ParallelContext.create(grid, torch.device("cpu"), 60.0)
    stragglers = Stragglers(SimpleNamespace(ctx=ctx))  # type: ignore[arg-type]
    lines = []
    for seconds in seconds_by_step:
        with stragglers.measured():
            time.sleep(seconds[ctx.rank])
            barrier(ctx.world)
        lines.append(stragglers.line())
    return lines


@pytest.mark.parametrize(
    "steps, pp, tp, expected",
    [
        ([[0.3, 0.02, 0.02, 0.02]] * 4, 1, 1, [None, None, [0], [0]]),
        ([[0.02, 0.3, 0.02, 0.02]] * 2 + [[0.02, 0.02, 0.3, 0.02]], 1, 1, [None] * 3),  # another rank in the third step
        ([[0.3, 0.3, 0.02, 0.02]] * 3, 2, 1, [None] * 3),  # stages differ by design
        ([[0.02, 0.02, 0.02, 0.3]] * 3, 2, 1, [None, None, [3]]),
        ([[0.02, 0.3, 0.02, 0.3]] * 3, 1, 2, [None, None, [1, 3]]),  # all ranks of one index in tp
        ([[0.015, 0.0, 0.0, 0.0]] * 3, 1, 1, [None] * 3),  # too little time to matter
    ],
)
def test_only_a_rank_that_is_slow_three_times_in_a_row_is_named(ranks, steps, pp, tp, expected):
    """Warnings about noise would hide a machine that is really slow."""
    (lines, *_) = ranks(4, lines_of, steps, pp, tp)
    for line, late in zip(lines, expected, strict=True):
        assert re.findall(r"(?:^STRAGGLER: |; )rank (\d) on ", line) == [str(rank) for rank in late or ()]
        if late:
            assert " needs 0.3" in line and "s of computation per iteration; the median of the other ranks" in line
        else:
            assert line == ""
