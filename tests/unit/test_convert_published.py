"""The config.json of published models is read, and describes the tensors that transformers has.

tests/helpers/published_configs.json has the fields of each with its source, and the published number of parameters.
"""

import json
from math import prod
from pathlib import Path

import pytest
import torch

from megatron_lite.config.presets import PRESETS
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


def preset_of(name: str) -> str:
    """The preset of a published model; empty if there is none."""
    known = {
        **{f"meta-llama/Llama-{size.upper()}": f"llama-{size}" for size in ("3.1-8b", "3.1-70b", "3.1-405b")},
        **{f"meta-llama/Llama-{size.upper()}": f"llama-{size}" for size in ("3.2-1b", "3.2-3b")},
        **{f"allenai/OLMo-2-1124-{size}": f"olmo2-{size.lower()}" for size in ("7B", "13B")},
        **{f"google/gemma-2-{size}": f"gemma2-{size}" for size in ("2b", "9b")},
        "mistralai/Mistral-7B-v0.1": "mistral-7b",
    }
    plain = name.partition("/")[2].lower()
    families = ("qwen2.5", "qwen3", "smollm2", "pythia", "starcoder2")
    return known.get(name, plain if plain.startswith(families) else "")


def test_every_preset_of_these_families_has_a_published_config():
    found = {preset_of(name) for name in PUBLISHED} - {""}
    starts = ("llama-3", "qwen", "smollm", "olmo", "pythia", "gemma", "mistral", "starcoder")
    assert found == {name for name in PRESETS if name.startswith(starts)}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if preset_of(name)])
def test_a_preset_is_the_published_model(name):
    """A run with the preset can start from the published weights: no field contradicts their config."""
    config, fields = PUBLISHED[name]["config"], PRESETS[preset_of(name)]
    published, given = (to_model(Path("config.json"), config, changes)[1] for changes in ({}, fields))
    assert from_model(published) == from_model(given)
