"""Any layout trains the same model: losses, gradient norms and weights of one process.

`make test` has every layout, and every pair of features that a layout and a model have, in two sharp steps; `make soak`
has all layouts with all models in five ordinary ones.

The models start from random biases and norms, and the loss masks have unequal lengths: zero biases and equal masks
would hide a bias added on every rank and a mean of means.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers import parity
from tests.helpers.axes import is_packed
from tests.helpers.cover import cover, pairs
from tests.helpers.layouts import (
    BATCH,
    CONTEXT,
    CONTEXT_PACKED,
    CONTEXT_PIPELINES,
    FLAT,
    GROUPS,
    PACKED,
    PACKING,
    PIPELINES,
    SEQUENCE,
    SEQUENCE_PIPELINES,
    name_of,
)
from tests.helpers.tiny import MODELS, train_tiny

STEPS = 5
CASES = [
    *((layout, 2) for layout in FLAT + SEQUENCE + CONTEXT),
    *((layout, 6) for layout in PIPELINES + SEQUENCE_PIPELINES + CONTEXT_PIPELINES),
]
PACKED_CASES = [({**layout, "changes": layout["changes"] | PACKING}, 4) for layout in PACKED + CONTEXT_PACKED]
GROUP_CASES = [(layout, 4) for layout in GROUPS]
GROUP_NAMES = [f"groups {name_of(layout)}" for layout in GROUPS]
PACKED_NAMES = [f"packed {name_of(layout)}" for layout in PACKED + CONTEXT_PACKED]
NAMES = [name_of(layout) for layout, _ in CASES]


@cache
def one_process(model: str, precision: str, num_layers: int, packed: bool, groups: int = 0) -> dict:
    """The reference: the global batch as one micro-batch, on one rank."""
    changes = {"model__num_query_groups": groups} if groups else {}
    changes |= {"train__micro_batch_size": BATCH, "train__global_batch_size": BATCH, "model__num_layers": num_layers}
    return train_tiny(model, train__precision=precision, **changes, **(PACKING if packed else {}))


def on_layout(ranks, layout: dict[str, Any], model: str, precision: str, num_layers: int) -> list[dict]:
    changes = layout["changes"] | {"train__global_batch_size": BATCH, "model__num_layers": num_layers}
    return ranks(layout["ranks"], train_tiny, model, train__precision=precision, **changes)


def reference(layout: dict[str, Any], model: str, precision: str, num_layers: int) -> dict:
    groups = layout["changes"].get("model__num_query_groups", 0)
    return one_process(model, precision, num_layers, is_packed(layout), groups)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).abs() / b.abs()).max())


def model_of(index: int) -> str:
    """The model for the fp32 test of one layout; neighbouring layouts have different ones."""
    return list(MODELS)[(index + index // len(MODELS)) % len(MODELS)]


MATRIX = [
    *((*case, model) for case in CASES + PACKED_CASES for model in MODELS),
    *((*case, "llama") for case in GROUP_CASES),
]


def parts(case: tuple[dict[str, Any], int, str]) -> set:
    layout, _, model = case
    return pairs({*parity.features(layout), model}) | {name_of(layout)}


def chosen(of: Callable[[tuple[dict[str, Any], int, str]], set]) -> list[Any]:
    """A cover with few ranks, as parameters."""
    cases = [MATRIX[at] for at in cover(MATRIX, of, cost=lambda case: case[0]["ranks"])]
    return [pytest.param(*case, id=f"{name_of(case[0])} {case[2]}") for case in cases]


@cache
def two_steps(model: str, precision: str, num_layers: int, packed: bool, groups: int) -> dict[str, Any]:
    """The reference of sharp steps: the global batch as one micro-batch, on one rank."""
    changes = {"model__num_query_groups": groups} if groups else {}
    changes |= {"train__micro_batch_size": BATCH, **(PACKING if packed else {})}
    return parity.train(model, precision, num_layers, **changes)


def check_two_steps(ranks, layout: dict[str, Any], num_layers: int, model: str, precision: str, limit: float) -> None:
    groups = layout["changes"].get("model__num_query_groups", 0)
    truth = two_steps(model, precision, num_layers, is_packed(layout), groups)
    for got in ranks(layout["ranks"], parity.train, model, precision, num_layers, **layout["changes"]):
        assert {name: value for name, value in parity.differences(got, truth).items() if value > limit} == {}


@pytest.mark.parametrize(("layout", "num_layers", "model"), chosen(parts))
def test_two_fp64_steps_equal_those_of_one_process(ranks, layout, num_layers, model):
    """Only the order of sums differs, so a difference above 1e-10 of a loss, norm or weight is a mistake."""
    check_two_steps(ranks, layout, num_layers, model, "fp64", 1e-10)


@pytest.mark.parametrize(("layout", "num_layers", "model"), chosen(lambda case: {*parity.features(case[0]), case[2]}))
def test_two_fp32_steps_equal_those_of_one_process(ranks, layout, num_layers, model):
    """Each feature once. Sums in fp32 round differently in another order, far below 1e-5 after two steps."""
    check_two_steps(ranks, layout, num_layers, model, "fp32", 1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "num_layers", "model"),
    [
        *((*case, model_of(index)) for index, case in enumerate(CASES[::2] + PACKED_CASES)),
        *((*case, "llama") for case in GROUP_CASES[:2]),
    ],
    ids=NAMES[::2] + PACKED_NAMES + GROUP_NAMES[:2],
)
def test_fp32_losses_and_gradient_norms_equal_those_of_one_process(ranks, layout, num_layers, model):
    """Every second layout without packing; the fp64 test, where rounding cannot hide a mistake, has all of them.

    Rounding depends on the order of sums. In five steps, the differences stay far below 1e-5.
    """
    truth = reference(layout, model, "fp32", num_layers)
    assert len(truth["loss"]) == STEPS
    assert truth["loss"].std() > 0.01  # the batches differ, so equal losses are no coincidence
    for got in on_layout(ranks, layout, model, "fp32", num_layers):
        assert relative(got["loss"], truth["loss"]) < 1e-5
        assert relative(got["grad_norm"], truth["grad_norm"]) < 1e-5


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "num_layers", "model"),
    MATRIX,
    ids=[*(f"{name} {model}" for name in NAMES + PACKED_NAMES for model in MODELS), *GROUP_NAMES],
)
def test_fp64_losses_and_final_weights_equal_those_of_one_process(ranks, model, layout, num_layers):
    """Only the order of sums differs, so a difference above 1e-10 is a mistake.

    Key biases have an absolute tolerance. They do not change the softmax, so their exact gradient is zero, and Adam
    scales its rounding error to the size of a normal step.
    """
    truth = reference(layout, model, "fp64", num_layers)
    for got in on_layout(ranks, layout, model, "fp64", num_layers):
        assert relative(got["loss"], truth["loss"]) < 1e-10
        assert relative(got["grad_norm"], truth["grad_norm"]) < 1e-10
        assert got["weights"].keys() == truth["weights"].keys()
        for name, want in truth["weights"].items():
            difference = (got["weights"][name] - want).abs()
            if name.endswith(("linear_qkv.bias", "linear_kv.bias")):
                assert difference.max() < 1e-10 * want.abs().max() or difference.max() < 1e-12, name
            else:
                assert difference.max() <= 1e-10 * want.abs().max(), name
