"""What ranks find out about each other before the first group of the layout is made."""

import socket

import pytest
import torch.distributed as dist

from megatron_lite.errors import ConfigError
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from tests.e2e.tiny import tiny_config


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
        f"rank 0 on {here} and rank 1 on {here} were given different configs (parallel.tensor: 1 and 2, "
        "optim.lr: 0.005 and 0.5); give every machine the same file and the same overrides"
    ]


@pytest.mark.parametrize("place", ["run__dir", "data__cache_dir", "checkpoint__load"])
def test_machines_may_keep_things_in_other_places(ranks, place):
    assert ranks(2, initialized, {place: "/elsewhere"}) == 2 * ["initialized"]
