"""After a hang, torch's flight recorder names the rank that did not start an operation."""

import os
import subprocess
import sys

import pytest
import torch

from megatron_lite.observers.flight_recorder import ranks_behind
from tests.helpers.command import ROOT, environment

OPERATION = ["nccl:all_reduce", "[[16, 4]]", "scheduled"]


def test_a_rank_with_fewer_operations_of_a_group_is_behind():
    operations = {0: {"3 dp": [7, *OPERATION]}, 2: {"3 dp": [6, *OPERATION], "1 tp": [4, *OPERATION]}}
    assert ranks_behind(operations) == [
        "rank 2 has started 6 operations of process group 3 dp, and rank 0 has started 7: it waits for rank 2 in "
        "nccl:all_reduce of [[16, 4]] (scheduled)"
    ]


def test_equal_counts_and_groups_of_one_rank_name_nobody():
    assert ranks_behind({0: {"1 tp": [4, *OPERATION]}, 1: {"1 tp": [4, *OPERATION], "2 pp": [9, *OPERATION]}}) == []
    assert ranks_behind({0: {}, 1: {}}) == []


# Rank 1 does not start the third sum.
RANK = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from megatron_lite.training.progress import Progress
from megatron_lite.observers.watchdog import Watchdog

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
with Watchdog(Progress(), folder, rank=rank, world_size=2, hang_timeout=3.0):
    for number in range(3):
        if (rank, number) == (1, 2):
            time.sleep(600)
        dist.all_reduce(torch.ones(5))
"""


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="torch records Gloo from 2.13 on"
)
def test_a_hang_in_a_collective_names_the_rank_that_did_not_start_it(tmp_path):
    """torch's NCCL has the same recorder; there a wait returns at once, and no Python stack shows the cause."""
    variables = environment() | {"TORCH_FR_BUFFER_SIZE": "100"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)],
            cwd=ROOT,
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = "".join(rank.communicate()[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert (
        "rank 1 has started 2 operations of process group 0 default_pg, and rank 0 has started 3: it waits for rank 1 "
        "in gloo:all_reduce of [[5]]" in errors
    )
