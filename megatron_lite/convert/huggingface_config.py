"""config.json of Hugging Face's models, to our fields and back, by the table of families.

A model is written as the first family that computes it. That is known by reading: what a family writes is read again,
and every field of ours must come back.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_lite.checkpoint.compatible import DERIVED, NOT_OF_WEIGHTS
from megatron_lite.config.schema import Config, DataConfig, ModelConfig
from megatron_lite.config.validate import failures
from megatron_lite.convert.huggingface_defaults import DEFAULTS, REQUIRED
from megatron_lite.convert.huggingface_families import FAMILIES
from megatron_lite.convert.huggingface_family import read_model, write_model
from megatron_lite.convert.huggingface_fields import Fields
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.rotary import RAMPS
from megatron_lite.text import listed

# Fields that no config.json has, and that do not change the function of the weights.
_NOT_COMPARED = NOT_OF_WEIGHTS | {"padded_vocab_size", "fp32_residual"}


def to_model(
    path: Path, content: Mapping[str, Any], overrides: Mapping[str, Any], ignored: Collection[str] = ()
) -> tuple[str, ModelConfig]:
    """The model type and our model section of a config.json; `path` is for messages, `ignored` fields are not read."""
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"{path}: model_type is {model_type!r}; expected one of {', '.join(FAMILIES)}")
    # A missing field has a default, which can be one that ours does not compute.
    if missing := [name for name in ignored if name not in {**content, **DEFAULTS[model_type]}]:
        raise ConfigError(f"{path}: has no {', '.join(missing)}, which --ignore-field names; leave it out")
    fields = Fields(path, content, DEFAULTS[model_type], ignored)
    ours = read_model(FAMILIES[model_type], fields)
    fields.finish()
    try:
        model, stated = ModelConfig(**{**ours, **overrides}), ModelConfig(**ours)
    except (ValidationError, TypeError) as error:
        problems = error.errors() if isinstance(error, ValidationError) else []
        values = [f"{'.'.join(map(str, problem['loc']))} {problem['input']!r}" for problem in problems]
        raise CheckpointError(f"{path}: has invalid values: {listed(values) if values else error}") from None
    names = [name for name in ours.keys() & overrides.keys() if name not in NOT_OF_WEIGHTS | {"tie_embeddings"}]
    pairs = [(name, *(getattr(each, DERIVED.get(name, name)) for each in (model, stated))) for name in sorted(names)]
    if other := [f"model.{name} is {given}, not the {value}" for name, given, value in pairs if given != value]:
        raise ConfigError(f"{path}: {listed(other)} of this file; leave out fields of another model")
    config = Config(model=model, data=DataConfig(seq_length=min(1024, model.max_position_embeddings)))
    if problems := failures(config, 1):
        raise CheckpointError(
            f"{path}: does not describe a model that megatron_lite has: {problems[0]}{defaults_of(content)}"
        )
    if obstacles := _obstacles(model_type, model):  # of fields that were given
        raise _no_family(model_type, obstacles)
    return model_type, model


def defaults_of(content: Mapping[str, Any]) -> str:
    """A part of a message: the fields that a config.json lacks, with the defaults of its family."""
    defaults = DEFAULTS[content["model_type"]]
    lacking = [
        f"{name} {json.dumps(value)}"
        for name, value in defaults.items()
        if name not in content and value is not REQUIRED
    ]
    return (
        f" (fields that it lacks have the defaults of {content['model_type']}: {', '.join(lacking)})" if lacking else ""
    )


def from_model(model: ModelConfig, preferred: str = "") -> dict[str, Any]:
    """The config.json of the Hugging Face model that computes the same; CheckpointError if there is none.

    Of several families it is the `preferred` one, or the first of the table.
    """
    candidates = [name for name, family in FAMILIES.items() if family.architecture == model.architecture]
    obstacles: dict[str, list[str]] = {}
    for name in sorted(candidates, key=lambda name: name != preferred):
        obstacles[name] = _obstacles(name, model)
        if not obstacles[name]:
            break
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    if obstacles[nearest]:
        raise _no_family(nearest, obstacles[nearest])
    family = FAMILIES[nearest]
    cls = "BertForPreTraining" if model.binary_head else family.cls
    return {"architectures": [cls], "model_type": nearest, **write_model(family, model)}


def _no_family(nearest: str, obstacles: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"Hugging Face has no model that computes the same: {', '.join(obstacles)} (nearest: {nearest}); choose "
        "another format"
    )


def _obstacles(model_type: str, model: ModelConfig) -> list[str]:
    """The fields of a model that this family cannot compute."""
    family = FAMILIES[model_type]
    try:
        ours = read_model(family, Fields(Path("config.json"), write_model(family, model), DEFAULTS[model_type]))
        wanted, found = _compared(model), _compared(ModelConfig(**{**ours, **_not_in_files(model)}))
    except (CheckpointError, ValidationError) as error:
        return [str(error)]
    return [
        f"model.{name} is {wanted[name]}" for name in wanted if not _equal(wanted[name], found.get(name, wanted[name]))
    ]


def _not_in_files(model: ModelConfig) -> dict[str, Any]:
    """Fields that the tensors of a file show, and not its config.json."""
    return {"binary_head": model.binary_head} if model.architecture == "encoder" else {}


def _compared(model: ModelConfig) -> dict[str, Any]:
    """The fields that the function of the weights depends on, with the values that defaults stand for."""
    fields = {name: getattr(model, DERIVED.get(name, name)) for name in ModelConfig.model_fields}
    if model.head_size and math.isclose(model.attention_scale, model.head_size**-0.5):
        fields["attention_scale"] = 0.0
    unused = set(_NOT_COMPARED)
    if model.norm == "rmsnorm":
        unused.add("norm_bias")
    if model.position != "relative":
        unused |= {"relative_buckets", "relative_max_distance"}
    scaling = model.rotary_scaling
    if model.position != "rotary":
        unused |= {name for name in fields if name.startswith("rotary_")}
    if scaling == "none":
        unused |= {name for name in fields if name.startswith("rotary_")} - {
            "rotary_base",
            "rotary_percent",
            "rotary_scaling",
        }
    fields["rotary_original_positions"] = model.rotary_original_positions or model.max_position_embeddings
    fields["rotary_ramp"] = model.rotary_ramp or RAMPS.get(scaling, ())
    if model.rotary_of(0) or model.local_rotary_base:
        # With equal bases and without scaling there is one rotation.
        local = model.local_rotary_base if model.window_size else 0.0
        fields["local_rotary_base"] = 0.0 if local == model.rotary_base and scaling == "none" else local
    if scaling == "linear":
        unused.add("rotary_original_positions")
    return {name: value for name, value in fields.items() if name not in unused}


def _equal(first: Any, second: Any) -> bool:
    """Whether two values are equal, numbers to rounding."""
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return math.isclose(first, second, rel_tol=1e-9)
    return first == second
