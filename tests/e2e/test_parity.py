"""Any layout trains the same model: losses, gradient norms and weights of one process, for every combination.

The models start from random biases and norms, and the loss masks have unequal lengths: zero biases and equal masks
would hide a bias added on every rank and a mean of means.
"""

from functools import cache

import pytest
import torch

from tests.e2e.tiny import MODELS, train_tiny

LAYOUTS = [  # tensor, data, engine, micro-batch size
    (1, 1, "local", 2),
    (2, 1, "local", 8),
    (2, 1, "torch", 2),
    (4, 1, "local", 4),
    (1, 2, "local", 4),
    (1, 2, "local", 1),
    (1, 2, "torch", 4),
    (1, 2, "torch", 1),
    (2, 2, "local", 1),
    (2, 2, "local", 4),
    (2, 2, "torch", 2),
    (2, 2, "torch", 4),
]
STEPS = 5


@cache
def one_process(model: str, precision: str) -> dict:
    """The reference: the whole global batch of 8 at once, on one rank."""
    return train_tiny(model, train__precision=precision, train__micro_batch_size=8)


def on_layout(ranks, model: str, precision: str, tensor: int, data: int, engine: str, micro: int) -> list[dict]:
    return ranks(
        tensor * data,
        train_tiny,
        model,
        parallel__tensor=tensor,
        parallel__ddp=engine,
        train__micro_batch_size=micro,
        train__precision=precision,
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).abs() / b.abs()).max())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tensor", "data", "engine", "micro"), LAYOUTS)
def test_losses_and_gradient_norms_are_those_of_one_process(ranks, model, tensor, data, engine, micro):
    """A lost all-reduce, a bias counted twice or a mean of means would show in the first steps.

    fp32: rounding differs with the order of sums, by far less than 1e-5 in five steps.
    """
    truth = one_process(model, "fp32")
    assert len(truth["loss"]) == STEPS
    assert truth["loss"].std() > 0.01  # the batches differ, so that equal losses say something
    for got in on_layout(ranks, model, "fp32", tensor, data, engine, micro):
        assert relative(got["loss"], truth["loss"]) < 1e-5
        assert relative(got["grad_norm"], truth["grad_norm"]) < 1e-5


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tensor", "data", "engine", "micro"), LAYOUTS)
def test_final_weights_are_those_of_one_process(ranks, model, tensor, data, engine, micro):
    """In fp64 only the order of sums differs, so whatever is larger than 1e-10 is a mistake.

    Key biases are compared absolutely: softmax does not see them, so their true gradient is zero, and Adam makes
    its rounding as large as any other step.
    """
    truth = one_process(model, "fp64")
    for got in on_layout(ranks, model, "fp64", tensor, data, engine, micro):
        assert got["weights"].keys() == truth["weights"].keys()
        for name, whole in truth["weights"].items():
            difference = (got["weights"][name] - whole).abs()
            if name.endswith(("linear_qkv.bias", "linear_kv.bias")):
                assert difference.max() < 1e-10 * whole.abs().max() or difference.max() < 1e-12, name
            else:
                assert difference.max() <= 1e-10 * whole.abs().max(), name
