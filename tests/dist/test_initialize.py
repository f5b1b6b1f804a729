"""What ranks find out about each other before the first group of the layout is made."""

import socket

import pytest
import torch
import torch.distributed as dist

from megatron_lite.errors import ConfigError
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron, join_process_group
from tests.helpers.tiny import tiny_config


def initialized(changes_of_last: dict) -> str:
    """What a rank is told when the last one was given another config than the others."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        initialize_megatron(tiny_config("gpt", **(changes_of_last if is_last else {})))
        return "initialized"
    except ConfigError as error:
        return str(error)
    finally:
        finalize_megatron()


def test_a_config_that_differs_on_one_machine_is_refused_on_all(ranks):
    """A layout that only one of them has would hang where the groups are made."""
    here = socket.gethostname()
    assert ranks(2, initialized, {"optim__lr": 0.5, "parallel__tensor": 2}) == 2 * [
        f"rank 0 on {here} and rank 1 on {here} have different configs (parallel.tensor: 1 and 2, "
        "optim.lr: 0.005 and 0.5); give every machine the same file and the same overrides"
    ]


@pytest.mark.parametrize("place", ["run__dir", "data__cache_dir", "checkpoint__load"])
def test_machines_may_keep_things_in_other_places(ranks, place):
    assert ranks(2, initialized, {place: "/elsewhere"}) == 2 * ["initialized"]


def test_torchrun_is_told_what_it_needs_to_start_ranks_of_several_machines_again(monkeypatch):
    """Otherwise the first lost rank would leave the others looking for its address, for hours."""
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        join_process_group(torch.device("cpu"), 1.0)
    message = str(raised.value)
    assert message.startswith("torchrun --max-restarts on several machines keeps old addresses; use `megatron-lite")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine" in message
    assert message.endswith("torchrun --rdzv-backend c10d")
