"""The config.json of published models is read, and describes the tensors that transformers has.

tests/helpers/published_configs.json has the fields of each with its source, and the published number of parameters.
"""

import json
from math import prod
from pathlib import Path

import pytest
import torch

from megatron_lite.convert.huggingface import recipes
from megatron_lite.convert.huggingface_config import from_model, to_model
from megatron_lite.convert.recipe import full_table
from megatron_lite.plan.sizes import num_parameters
from tests.helpers.command import ROOT

PUBLISHED = json.loads((ROOT / "tests" / "helpers" / "published_configs.json").read_text())
# The embedding has no dropout there, but the residual branches have.
IGNORED = {"microsoft/phi-2": ["embd_pdrop"]}
# OPT's table has two positions that only padding uses.
WITHOUT_USE = {"facebook/opt-125m": 2 * 768}


def test_at_least_25_models_are_recorded_with_their_source():
    assert len(PUBLISHED) >= 25
    assert all(entry["source"].startswith(f"https://huggingface.co/{name}/") for name, entry in PUBLISHED.items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_describes_the_tensors_of_transformers(name):
    """Names and shapes of all tensors are those of the model that transformers builds on the meta device."""
    import transformers

    content = PUBLISHED[name]["config"]
    model_type, model = to_model(Path("config.json"), content, {}, IGNORED.get(name, ()))
    assert num_parameters(model) == PUBLISHED[name]["parameters"] - WITHOUT_USE.get(name, 0)
    cls = getattr(transformers, content["architectures"][0])
    with torch.device("meta"):
        theirs = cls(cls.config_class(**content))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == PUBLISHED[name]["parameters"]
    wanted = {key: tuple(parameter.shape) for key, parameter in theirs.named_parameters()}
    if "lm_head.weight" in wanted and model_type == "gpt_neox":  # its name in files
        wanted["embed_out.weight"] = wanted.pop("lm_head.weight")
    table = full_table(model)
    found = {
        key: shape
        for ours, recipe in recipes(model_type, model, table).items()
        for key, shape in zip(recipe.names, recipe.foreign_shapes(table[ours].shape), strict=True)
    }
    assert found == wanted
    assert sum(map(prod, found.values())) == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_written_so_that_it_is_read_as_the_same_model(name):
    """A field that is lost on the way out would change the model."""
    model_type, model = to_model(Path("config.json"), PUBLISHED[name]["config"], {}, IGNORED.get(name, ()))
    written = from_model(model, model_type)
    assert written["model_type"] == model_type
    assert written["architectures"] == PUBLISHED[name]["config"]["architectures"]
    again = to_model(Path("config.json"), written, {})[1]
    assert from_model(again, model_type) == written
