"""Any layout trains the same model: losses, gradient norms and weights of one process, for every combination.

The models start from random biases and norms, and the loss masks have unequal lengths: zero biases and equal masks
would hide a bias added on every rank and a mean of means.
"""

from functools import cache
from typing import Any

import pytest
import torch

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


def is_packed(layout: dict[str, Any]) -> bool:
    return layout["changes"].items() >= PACKING.items()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).abs() / b.abs()).max())


def model_of(index: int) -> str:
    """The model for the fp32 test of one layout; neighbouring layouts have different ones."""
    return list(MODELS)[(index + index // len(MODELS)) % len(MODELS)]


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


@pytest.mark.parametrize(
    ("layout", "num_layers", "model"),
    [
        *((*case, model) for case in CASES + PACKED_CASES for model in MODELS),
        *((*case, "llama") for case in GROUP_CASES),
    ],
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
