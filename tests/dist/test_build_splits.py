"""A data error on one rank is raised by all ranks, without a launcher that would kill them."""

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


def data_error(overrides: list[str], local_ranks: list[int]) -> str:
    config = load_config(None, overrides)
    ctx = ParallelContext.create(Grid(dp=dist.get_world_size()), torch.device("cpu"), 60.0)
    run = SimpleNamespace(config=config, ctx=ctx, state=TrainState(), origin={}, tokenizer=None)
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_ranks[ctx.rank])}),
        pytest.raises(DataError) as raised,
    ):
        build_splits(run)  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.parametrize("local_ranks, more", [([0, 1], ""), ([0, 0], " (1 more rank failed)")])
def test_all_ranks_raise_the_data_error_of_the_building_rank(ranks, tmp_path, local_ranks, more):
    """Otherwise the other ranks would wait in the barrier until train.comm_timeout."""
    texts = ranks(2, data_error, [f"data.paths={tmp_path}/missing"], local_ranks)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 0: {tmp_path}/missing.idx: no such file")
    assert texts[0].endswith(f"its path without .bin or .idx{more}")
