"""The variables of CUDA, NCCL and torch follow from the config, and never replace those of the user."""

import os
import resource

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.launch.environment import environment, set_environment

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("fields", "connections"),
    [
        ([], None),
        (["parallel.tensor=2"], "1"),  # the all-reduce of an input gradient starts before the weight gradient
        (["parallel.tensor=2", "parallel.ddp=torch"], "1"),
        (["parallel.tensor=2", "parallel.pipeline=2"], None),  # messages would wait behind the computation
        (["parallel.tensor=2", "parallel.ddp=fsdp"], "32"),  # so would gathers
        (["parallel.ddp=deepspeed"], "32"),
        (["parallel.tensor=2", "parallel.ddp=ring_all_reduce"], "32"),
    ],
)
def test_the_number_of_hardware_queues_follows_from_the_layout(fields, connections):
    assert environment(load_config(None, fields)).get(CONNECTIONS) == connections


def test_errors_of_nccl_are_handled_as_torch_does_by_default():
    """The value 1 aborts communicators first, which can hang."""
    assert not any("ERROR_HANDLING" in name for name in environment(load_config(None, [])))


def test_the_flight_recorder_is_on_and_memory_is_not_fragmented():
    variables = environment(load_config(None, []))
    assert int(variables["TORCH_FR_BUFFER_SIZE"]) > 0
    assert "expandable_segments:True" in variables.values()


def test_a_variable_of_the_user_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {CONNECTIONS: "8"})
    set_environment(load_config(None, ["parallel.tensor=2"]))
    assert os.environ[CONNECTIONS] == "8"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"


def test_a_run_on_the_cpu_gets_the_flight_recorder_only(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    set_environment(load_config(None, ["parallel.tensor=2", "run.device=cpu"]))
    assert all(name.startswith("TORCH_") for name in os.environ)


def test_a_rank_may_open_as_many_files_as_its_hard_limit(monkeypatch):
    """A login shell gives 1024 files, fewer than the first rank of a large run has connections."""
    monkeypatch.setattr(os, "environ", {})
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        set_environment(load_config(None, []))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
