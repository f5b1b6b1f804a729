"""An error in the data of one rank ends all ranks, without a launcher that would kill them."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.load import load_config
from megatron_lite.errors import DataError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.pretrain import build_splits
from megatron_lite.training.state import TrainState


def error_of(overrides: list[str], local_ranks: list[int]) -> str:
    config = load_config(None, overrides)
    ctx = ParallelContext.create(Grid(dp=dist.get_world_size()), torch.device("cpu"), 60.0)
    run = SimpleNamespace(config=config, ctx=ctx, state=TrainState(), origin={})
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_ranks[ctx.rank])}),
        pytest.raises(DataError) as raised,
    ):
        build_splits(run)  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.parametrize("local_ranks, more", [([0, 1], ""), ([0, 0], " (1 more rank failed)")])
def test_every_rank_raises_the_data_error_of_the_rank_that_builds(ranks, tmp_path, local_ranks, more):
    """The other ranks would wait in the barrier for train.comm_timeout."""
    texts = ranks(2, error_of, [f"data.paths={tmp_path}/missing"], local_ranks)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 0: {tmp_path}/missing.idx: no such file")
    assert texts[0].endswith(f"its path without .bin or .idx{more}")
