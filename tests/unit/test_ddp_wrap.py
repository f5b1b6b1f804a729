"""ddp/wrap.py: the choice of the engine, and checks of a custom model's parameters."""

import pytest
import torch
from torch import nn

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.ddp.local import LocalDDP
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from tests.helpers.toy import TABLE, ToyModel

CTX = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=10)


def config_of(kind: str) -> Config:
    return load_config(None, ["optim.distributed=true"] if kind == "distributed" else [f"parallel.ddp={kind}"])


@pytest.mark.parametrize("kind", ["local", "torch", "fsdp", "distributed"])
def test_one_data_parallel_rank_needs_no_process_group(kind):
    """A run of one process must not depend on torch.distributed."""
    model = ToyModel(CTX, torch.float32)
    ddp = wrap_ddp(config_of(kind), [model], model.named(), TABLE, CTX, grad_dtype=torch.float32)
    assert type(ddp) is LocalDDP
    assert ddp.main_grads.keys() == TABLE.keys()


def test_a_parameter_outside_the_table_is_an_error():
    """Otherwise all parameters of a custom model but that one would be trained."""
    model = ToyModel(CTX, torch.float32)
    params = model.named()
    model.extra = nn.Linear(2, 3)
    with pytest.raises(TrainingError, match=r"parameter extra\.weight of model chunk 0, shape \(3, 2\), is not in the"):
        wrap_ddp(config_of("local"), [model], params, TABLE, CTX, grad_dtype=torch.float32)


@pytest.mark.parametrize("kind", ["local", "torch"])
def test_the_error_of_a_frozen_parameter_names_it(kind):
    """torch's error about a hook would not name the parameter."""
    model = ToyModel(CTX, torch.float32)
    name = next(iter(dict(model.named_parameters())))
    model.get_parameter(name).requires_grad_(False)
    with pytest.raises(
        TrainingError, match=rf"parameter {name} .* requires_grad off; leave it on, or make .* a buffer"
    ):
        wrap_ddp(config_of(kind), [model], model.named(), TABLE, CTX, grad_dtype=torch.float32)
