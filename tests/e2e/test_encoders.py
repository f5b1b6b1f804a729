"""BERT and T5 train under any layout to the losses, norms and weights of one process.

Their samples are real ones, masked or span-corrupted, of unequal lengths. Biases, norms and tables of relative
positions start from random values.
"""

from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers import parity
from tests.helpers.cover import cover, pairs
from tests.helpers.tiny import ENCODERS, train_tiny

BATCH = 12  # sequences in one optimizer step


def layout(tensor: int = 1, data: int = 1, pipeline: int = 1, micro: int = 4, **others: Any) -> dict[str, Any]:
    """The config changes of a layout and its number of ranks. `others` are keys of `parallel`, or `section__key`."""
    changes = {name if "__" in name else f"parallel__{name}": value for name, value in others.items()}
    changes |= {"parallel__tensor": tensor, "parallel__pipeline": pipeline, "train__micro_batch_size": micro}
    return {"ranks": tensor * data * pipeline * changes.get("parallel__context", 1), "changes": changes}


LAYOUTS = [
    layout(micro=2, train__recompute="full"),
    layout(micro=3, model__attention="math", train__recompute="selective"),
    layout(tensor=2),
    layout(tensor=2, pipeline=2, micro=6, model__attention="tiled", train__recompute="selective"),
    layout(tensor=4, micro=6),
    layout(tensor=2, micro=6, sequence=True),
    layout(tensor=4, micro=4, sequence=True, train__recompute="uniform:2"),
    layout(data=2, micro=3),
    layout(data=2, micro=1, ddp="torch"),
    layout(data=2, micro=3, optim__distributed="true"),
    layout(data=2, micro=2, ddp="fsdp"),
    layout(tensor=2, data=2, micro=3, ddp="fsdp", sequence=True, train__recompute="full"),
    layout(tensor=2, data=2, micro=2, optim__distributed="true", sequence=True),
    *(layout(pipeline=2, micro=micro, schedule=name) for name in ("gpipe", "1f1b", "zb-h1") for micro in (6, 4)),
    layout(pipeline=4, micro=3),
    layout(pipeline=2, micro=3, schedule="interleaved", virtual_pipeline=2),
    layout(pipeline=2, micro=3, train__recompute="stage"),
    layout(tensor=2, pipeline=2, micro=4, sequence=True),
    layout(tensor=2, pipeline=2, micro=3, sequence=True, schedule="interleaved", virtual_pipeline=2),
    layout(tensor=2, pipeline=2, micro=6, schedule="zb-h1", sequence=True, train__recompute="full:1"),
    layout(data=2, pipeline=2, micro=2, optim__distributed="true"),
]
SPLITS = [
    layout(pipeline=4, micro=3, encoder_stages=1, pipeline_layout="[4,1,2,1]"),
    layout(pipeline=4, micro=4, encoder_stages=3, schedule="zb-h1"),
    layout(pipeline=2, micro=3, encoder_stages=1, schedule="interleaved", virtual_pipeline=2),
    layout(pipeline=2, micro=3, encoder_stages=3, schedule="interleaved", virtual_pipeline=2, tensor=2, sequence=True),
]
CONTEXT = [
    layout(context=2, context_mode=mode, **others)
    for mode in ("ring", "all_gather", "ulysses")
    for others in ({}, {"pipeline": 2}, {"tensor": 2, "sequence": True})
]
# Other fields of encoders and encoder_decoders, each on a layout that would show a mistake in it.
FIELDS = [
    ("bert", {"model__binary_head": "false"}, layout(tensor=2, pipeline=2, sequence=True)),
    ("bert", {"model__num_tokentypes": 0}, layout(tensor=2)),
    ("bert", {"model__tie_embeddings": "false"}, layout(pipeline=2)),
    ("bert", {"model__position": "rotary"}, layout(tensor=2, sequence=True)),
    ("bert", {"model__window_size": 3}, layout(pipeline=2)),
    *(
        (name, {"model__norm_placement": placement}, layout(tensor=2, pipeline=2, sequence=True))
        for name in ("bert", "t5")
        for placement in ("pre", "post", "output", "sandwich")
    ),
    ("t5", {"model__position": "learned"}, layout(pipeline=2, tensor=2)),
    ("t5", {"model__position": "rotary", "model__num_query_groups": 2}, layout(pipeline=2, tensor=2)),
    ("t5", {"model__tie_embeddings": "false", "model__bias": "true"}, layout(pipeline=2)),
    ("t5", {"model__num_encoder_layers": 3, "model__num_layers": 1}, layout(pipeline=2, encoder_stages=1)),
]


def name_of(layout: dict[str, Any]) -> str:
    return " ".join(f"{key.rpartition('__')[2]}={value}" for key, value in layout["changes"].items())


@cache
def one_process(model: str, precision: str, fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The reference: the global batch as one micro-batch, on one rank."""
    changes = {"train__micro_batch_size": BATCH, "train__global_batch_size": BATCH, "model__num_layers": 4}
    return train_tiny(model, train__precision=precision, **changes | dict(fields))


@cache
def two_steps(model: str, fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return parity.train(model, "fp64", 4, train__micro_batch_size=BATCH, **dict(fields))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).abs() / b.abs()).max())


def check_equal(ranks, model: str, layout: dict[str, Any], fields: dict[str, Any], precision: str = "fp64") -> None:
    """Only the order of sums differs, so in fp64 a difference above 1e-10 is a mistake.

    The exact gradient of a key's bias is zero, and Adam scales its rounding error to a normal step, so the tolerance
    is absolute there.
    """
    truth = one_process(model, precision, tuple(fields.items()))
    tolerance = 1e-10 if precision == "fp64" else 1e-5
    changes = {"train__global_batch_size": BATCH, "model__num_layers": 4} | layout["changes"] | fields
    for got in ranks(layout["ranks"], train_tiny, model, train__precision=precision, **changes):
        assert relative(got["loss"], truth["loss"]) < tolerance
        assert relative(got["grad_norm"], truth["grad_norm"]) < tolerance
        assert got["weights"].keys() == truth["weights"].keys()
        for name, want in truth["weights"].items() if precision == "fp64" else ():
            difference = (got["weights"][name] - want).abs().max()
            of_key = name.endswith(("linear_qkv.bias", "linear_kv.bias")) and difference < 1e-12
            assert of_key or difference <= 1e-10 * want.abs().max(), name


def test_the_losses_of_the_reference_fall_and_differ():
    for model in ENCODERS:
        losses = one_process(model, "fp64", ())["loss"]
        assert losses.std() > 0.01, losses


CASES = [
    *((model, layout, {}) for model in ENCODERS for layout in LAYOUTS),
    *(("t5", layout, {}) for layout in SPLITS),
    *(("bert", layout, {"model__binary_head": "false"}) for layout in CONTEXT),
    *((model, layout, fields) for model, fields, layout in FIELDS),
]


def parts(case: tuple[str, dict[str, Any], dict[str, Any]]) -> set:
    """A layout's pairs of features with its model, and each value of a field."""
    model, layout, fields = case
    return pairs({*parity.features(layout), model}) | {(model, f"{name}={value}") for name, value in fields.items()}


SHORT = [CASES[at] for at in cover(CASES, parts, cost=lambda case: case[1]["ranks"])]


@pytest.mark.parametrize(
    ("model", "layout", "fields"), SHORT, ids=[f"{m} {name_of(la)} {list(f.values())}" for m, la, f in SHORT]
)
def test_two_fp64_steps_equal_those_of_one_process(ranks, model, layout, fields):
    """Only the order of sums differs, so a difference above 1e-10 of a loss, norm or weight is a mistake."""
    truth = two_steps(model, tuple(fields.items()))
    for got in ranks(layout["ranks"], parity.train, model, "fp64", **{"num_layers": 4} | layout["changes"] | fields):
        assert {name: value for name, value in parity.differences(got, truth).items() if value > 1e-10} == {}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "layout", "fields"), CASES, ids=[f"{m} {name_of(la)} {list(f.values())}" for m, la, f in CASES]
)
def test_fp64_losses_norms_and_weights_equal_those_of_one_process(ranks, model, layout, fields):
    check_equal(ranks, model, layout, fields)


@pytest.mark.parametrize("model", ENCODERS)
def test_fp32_losses_and_norms_equal_those_of_one_process(ranks, model):
    check_equal(ranks, model, layout(tensor=2, pipeline=2, sequence=True), {}, "fp32")
