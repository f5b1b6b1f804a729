"""Ranks compare their configs before they create the first process group of the layout."""

import socket

import pytest
import torch
import torch.distributed as dist

from megatron_lite.errors import ConfigError
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron, join_process_group
from tests.helpers.tiny import tiny_config


def initialized(changes_of_last: dict) -> str:
    """The config error of this rank when the last rank has a different config, or `initialized`."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        initialize_megatron(tiny_config("gpt", **(changes_of_last if is_last else {})))
        return "initialized"
    except ConfigError as error:
        return str(error)
    finally:
        finalize_megatron()


def test_a_config_that_differs_on_one_rank_is_an_error_on_all_ranks(ranks):
    """A layout that only one rank has would hang in the creation of groups."""
    here = socket.gethostname()
    assert ranks(2, initialized, {"optim__lr": 0.5, "parallel__tensor": 2}) == 2 * [
        f"rank 0 on {here} and rank 1 on {here} have different configs (parallel.tensor: 1 and 2, "
        "optim.lr: 0.005 and 0.5); give every machine the same file and the same overrides"
    ]


def test_nccl_without_a_gpu_is_an_error_on_one_rank_too():
    """Otherwise the setting would have no effect there, and fail on the cluster."""
    with pytest.raises(ConfigError, match=r"run\.backend is nccl, which needs GPUs, and this rank is on the cpu"):
        initialize_megatron(tiny_config("gpt", run__backend="nccl", run__device="cpu"))


@pytest.mark.parametrize("place", ["run__dir", "data__cache_dir", "checkpoint__load"])
def test_paths_in_the_config_may_differ_between_machines(ranks, place):
    """Machines may mount run, cache and checkpoint folders in different places."""
    assert ranks(2, initialized, {place: "/elsewhere"}) == 2 * ["initialized"]


def test_restarts_by_torchrun_on_several_machines_raise_an_error(monkeypatch):
    """After the first lost rank, the others would try to connect to its old address for hours."""
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        join_process_group(torch.device("cpu"), 1.0, "gloo")
    message = str(raised.value)
    assert message.startswith("torchrun --max-restarts on several machines keeps old addresses; use `megatron-lite")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine" in message
    assert message.endswith("torchrun --rdzv-backend c10d")
