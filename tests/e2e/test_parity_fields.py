"""The fields of the families of models train on any layout like one process.

Each model joins several fields, so that a few of them have all. They start from random biases and norms: zero biases
would hide one that every rank adds.
"""

from functools import cache
from typing import Any

import pytest

from tests.helpers.cover import in_tiers
from tests.helpers.tiny import train_tiny

LAYERS = 4
BATCH = 8
# Name -> a model of MODELS and its changes. With two key/value groups, four ranks hold copies.
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "neox": (
        "gpt",
        {
            "position": "rotary",
            "rotary_percent": 0.25,
            "residual": "parallel",
            "tie_embeddings": "false",
            "head_bias": "true",
            "num_tokentypes": 3,
        },
    ),
    "gemma": (
        "llama",
        {
            "norm_placement": "sandwich",
            "zero_centered_norm": "true",
            "qk_norm": "head",
            "embedding_scale": 5.6,
            "attention_scale": 0.3,
            "logit_softcap": 2.0,
            "tie_embeddings": "true",
            "window_size": 3,
            "window_attn_skip_freq": 2,
            "local_rotary_base": 100.0,
            "rotary_scaling": "linear",
            "rotary_scaling_factor": 4.0,
            "activation": "geglu",
        },
    ),
    "olmo": (
        "llama",
        {
            "norm_placement": "output",
            "qk_norm": "full",
            "num_query_groups": 2,
            "rotary_scaling": "yarn",
            "rotary_scaling_factor": 4.0,
            "rotary_original_positions": 4,
        },
    ),
    "cohere": (
        "llama",
        {
            "norm": "layernorm",
            "norm_bias": "false",
            "residual": "parallel_shared_norm",
            "residual_scale": 0.5,
            "logit_scale": 0.5,
            "no_rope_freq": 2,
            "bias": "qkv",
            "rotary_scaling": "llama3",
            "rotary_scaling_factor": 4.0,
            "rotary_original_positions": 8,
        },
    ),
    "longrope": (
        "llama",
        {
            "bias": "attention",
            "rotary_scaling": "longrope",
            "rotary_scaling_factor": 2.0,
            "rotary_original_positions": 8,
            "rotary_short_factors": "[1.0, 1.5]",
            "rotary_long_factors": "[2.0, 3.0]",
        },
    ),
    "dynamic": (
        "llama",
        {
            "bias": "mlp",
            "rotary_scaling": "dynamic",
            "rotary_scaling_factor": 2.0,
            "rotary_original_positions": 8,
        },
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2": {"parallel__tensor": 2},
    "tensor 4": {"parallel__tensor": 4},
    "pipeline 2": {"parallel__pipeline": 2},
    "sequence": {"parallel__tensor": 2, "parallel__sequence": "true"},
    "sequence 4": {"parallel__tensor": 4, "parallel__sequence": "true"},
    "context 2": {"parallel__context": 2},
    "zero-1": {"optim__distributed": "true"},
    "fsdp": {"parallel__ddp": "fsdp"},
    "zero bubble": {"parallel__tensor": 2, "parallel__pipeline": 2, "parallel__schedule": "zb-h1"},
    "recomputed": {"parallel__tensor": 2, "parallel__sequence": "true", "train__recompute": "uniform:2"},
}
# The layouts that every model has, also in `make test`, and those of a few.
EVERYWHERE = list(LAYOUTS)[:8]
SPLITS = ("pipeline 2", "sequence", "context 2")
CASES = [(model, layout) for model in FIELDS for layout in LAYOUTS if layout in EVERYWHERE or model in ("neox", "olmo")]


def train(model: str, **changes: Any) -> dict[str, Any]:
    base, fields = FIELDS[model]
    settings = {f"model__{name}": value for name, value in fields.items()}
    sizes = {"model__num_layers": LAYERS, "train__global_batch_size": BATCH, "train__iterations": 3}
    return train_tiny(base, train__precision="fp64", **settings, **sizes, **changes)


def parts(case: tuple[str, str]) -> set:
    """Every model in the layouts that split it; other layouts once. Four ranks hold copies of the groups of olmo."""
    model, layout = case
    return {case} if layout in SPLITS or (model, layout) == ("olmo", "sequence 4") else {layout}


@cache
def one_process(model: str) -> dict[str, Any]:
    return train(model, train__micro_batch_size=BATCH)


@pytest.mark.parametrize(("model", "layout"), in_tiers(CASES, parts))
def test_losses_and_weights_equal_those_of_one_process(ranks, model, layout):
    """1e-10: only the order of sums differs. Key biases do not change the softmax, so their gradient is rounding, which
    Adam scales to the size of a step."""
    changes = LAYOUTS[layout]
    size = changes.get("parallel__tensor", 1) * changes.get("parallel__pipeline", 1)
    truth, count = one_process(model), max(2, size)
    for got in ranks(count, train, model, train__micro_batch_size=2, **changes):
        for name in ("loss", "grad_norm"):
            assert ((got[name] - truth[name]).abs() / truth[name].abs()).max() < 1e-10, name
        assert got["weights"].keys() == truth["weights"].keys()
        for name, want in truth["weights"].items():
            floor = 1e-12 if name.endswith("linear_qkv.bias") else 0.0
            assert (got["weights"][name] - want).abs().max() <= max(floor, 1e-10 * want.abs().max()), name


@pytest.mark.parametrize("model", FIELDS)
def test_the_fields_of_a_model_change_its_losses(model):
    """Fields without an effect would make the other test prove nothing."""
    base, fields = FIELDS[model]
    sizes = {"model__num_layers": LAYERS, "train__global_batch_size": BATCH, "train__iterations": 2}
    common = {**sizes, "train__precision": "fp64", "train__micro_batch_size": BATCH}
    settings = {f"model__{name}": value for name, value in fields.items()}
    needed = {"model__position", "model__tie_embeddings", "model__norm"}  # of others
    whole = train_tiny(base, **common, **settings)["loss"][0]
    for name in settings.keys() - needed - NOT_ALONE:
        changed = train_tiny(base, **common, **{key: value for key, value in settings.items() if key != name})
        assert changed["loss"][0] != whole, name


# Without these another field is an error, or they are the default of this model.
NOT_ALONE = {
    "model__window_size",
    "model__rotary_scaling_factor",
    "model__rotary_original_positions",
    "model__rotary_short_factors",
    "model__rotary_long_factors",
    "model__zero_centered_norm",  # the random values of a test are added to its 0 as to another norm's 1
}
