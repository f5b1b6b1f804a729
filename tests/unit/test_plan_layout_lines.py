"""The lines about slow layouts at the start of a run."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lite.config.load import load_config
from megatron_lite.errors import ConfigError
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.plan import layout_lines
from megatron_lite.training.initialize import backend_of
from megatron_lite.training.state import TrainState


def lines(monkeypatch, grid: Grid, hosts: list[str], *overrides: str) -> list[str]:
    """The lines on the first rank of a run on these hosts, one for each rank."""
    in_tp = [len({hosts[rank] for rank in ranks}) == 1 for ranks in grid.groups("tp")]

    def same(own: object, group: Group) -> bool:
        return in_tp[0] if group.name == "tp" else len(set(in_tp)) == 1

    monkeypatch.setattr(layout_lines, "same", same)
    # Thousands of ranks must not send their names where no group spans machines.
    monkeypatch.setattr(layout_lines, "gather_objects", None if all(in_tp) else lambda own, group: hosts)
    config = load_config(None, list(overrides))
    run = SimpleNamespace(config=config, ctx=ParallelContext.at(grid, 0), state=TrainState())
    return list(layout_lines.slow_layout_lines(run))  # type: ignore[arg-type]


def test_fewer_than_four_micro_batches_for_each_stage_are_named(monkeypatch):
    """With M = K micro-batches almost half of the time is bubble."""
    batch = ("train.micro_batch_size=2", "train.global_batch_size=14")
    assert lines(monkeypatch, Grid(pp=2), ["a"] * 2, *batch) == [
        "7 micro-batches for 2 pipeline stages; the bubble is small with 8 or more: raise train.global_batch_size, or "
        "lower train.micro_batch_size"
    ]
    assert lines(monkeypatch, Grid(pp=2), ["a"] * 2, "train.global_batch_size=8") == []
    assert lines(monkeypatch, Grid(dp=2), ["a"] * 2, "train.global_batch_size=2") == []


@pytest.mark.parametrize(
    ("grid", "hosts", "group", "fits"),
    [
        (Grid(tp=8), ["a"] * 4 + ["b"] * 4, "0 to 7", 4),
        (Grid(tp=2, dp=3), ["a"] * 3 + ["b"] * 3, "2 and 3", 1),
    ],
)
def test_a_tensor_parallel_group_on_two_machines_is_named(monkeypatch, grid, hosts, group, fits):
    """The second group may span machines although rank 0's does not."""
    (line,) = lines(monkeypatch, grid, hosts)
    assert line.startswith("the tensor-parallel group of ranks ") and " spans a and b, so every layer waits" in line
    assert group in line and line.endswith(f"parallel.tensor: {fits} fits into a machine")


def test_groups_within_machines_are_not_named(monkeypatch):
    assert lines(monkeypatch, Grid(tp=4, dp=2), ["a"] * 4 + ["b"] * 4) == []


def test_nccl_needs_a_gpu():
    """torch's own error does not name the setting."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [backend_of("auto", device, 32) for device in (cpu, gpu)] == ["gloo", "cpu:gloo,cuda:nccl"]
    assert [backend_of("auto", device, 33) for device in (cpu, gpu)] == ["gloo", "nccl"]
    assert [backend_of(name, gpu, 8) for name in ("nccl", "gloo")] == ["nccl", "gloo"]
    with pytest.raises(
        ConfigError, match=r"run\.backend is nccl, which needs GPUs, and this rank is on the cpu; use auto"
    ):
        backend_of("nccl", cpu, 8)
