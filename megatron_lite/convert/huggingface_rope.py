"""Rotary positions in a config.json of Hugging Face, in the spellings of transformers 4 and 5.

Version 4 has `rope_theta`, `rope_scaling` and `partial_rotary_factor`; version 5 has them in `rope_parameters`, for
Gemma 3 and OLMo 3 once for each kind of layer.
Source: transformers, modeling_rope_utils.py.
"""

from collections.abc import Sequence
from typing import Any

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.huggingface_fields import Fields
from megatron_lite.convert.huggingface_parts import FULL, SLIDING, Ours, Part
from megatron_lite.model.rotary import RAMPS
from megatron_lite.text import listed

# The parameters of each type: theirs -> ours.
_FACTOR = {"factor": "rotary_scaling_factor"}
_ATTENTION = {"attention_factor": "rotary_attention_factor"}
_ORIGINAL = {"original_max_position_embeddings": "rotary_original_positions"}
TYPES: dict[str, dict[str, str]] = {
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "llama3": {**_FACTOR, **_ORIGINAL, "low_freq_factor": "", "high_freq_factor": ""},
    "yarn": {**_FACTOR, **_ORIGINAL, **_ATTENTION, "beta_fast": "", "beta_slow": ""},
    "longrope": {
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION,
        "short_factor": "rotary_short_factors",
        "long_factor": "rotary_long_factors",
    },
}
RAMP_NAMES = {"yarn": ("beta_slow", "beta_fast"), "llama3": ("low_freq_factor", "high_freq_factor")}
OLD_TYPES = {"su": "longrope"}


def rope(
    *,
    partial: bool = False,
    local: str = "",
    old: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    types: Sequence[str] = tuple(TYPES),
) -> Part:
    """The part of a family.

    `partial`: it can rotate a part of each head. `local`: layers with a window have other parameters, whose base
    version 4 has in this field. `old` are the names of version 4 for base and percent. `types` are the scalings.
    """

    def read(fields: Fields, so_far: Ours) -> Ours:
        found = _read(fields, so_far, partial, local, old)
        if not partial and found["rotary_percent"] != 1:
            raise fields.error("partial_rotary_factor", found["rotary_percent"], "transformers ignores it here")
        if (kind := found.get("rotary_scaling")) and kind not in types:
            raise fields.error("rope_parameters", {"rope_type": kind}, f"this family has {listed(types)} only")
        return {"position": "rotary", **found}

    def write(model: ModelConfig) -> Ours:
        return _write(model, local, old)

    return Part(read, write)


def _read(fields: Fields, so_far: Ours, partial: bool, local: str, old: tuple[str, str]) -> Ours:
    scaling, parameters = (fields.take_as(name, dict, {}, null={}) for name in ("rope_scaling", "rope_parameters"))
    found: Ours = {}
    if local:
        full, of_window = _of_layers(fields, parameters)
        left = {**full, **scaling}
        base = _local_base(fields, of_window, local)
        found["local_rotary_base"] = base if so_far.get("window_size") else 0.0
    else:
        left = {**(scaling or parameters)}  # with both, transformers takes the first one
    kind = _pop_type(left)
    kind = OLD_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    percent = {} if partial else {"default": 1.0, "null": 1.0}
    for ours, name, key, options in (
        ("rotary_base", old[0], "rope_theta", {}),
        ("rotary_percent", old[1], "partial_rotary_factor", percent),
    ):
        stated = fields.take(name, **options) if name in fields or key not in left else None
        found[ours] = left.pop(key, stated)
        # Version 5 does not read the common name of a field that the family calls otherwise.
        if name != key and (other := fields.take(key, found[ours])) != found[ours]:
            raise fields.error(key, other, f"{name} is {found[ours]!r}")
    name = "rope_scaling" if scaling else "rope_parameters"
    # Some configs have the original length beside the parameters, also without a scaling.
    original = _original(fields, so_far, left, kind)
    if kind == "default":
        left.pop("original_max_position_embeddings", None)
        if left:
            raise fields.error(name, left, "ours has no such parameters without a type")
        return found
    if not isinstance(kind, str) or kind not in TYPES:
        raise fields.error(name, {"rope_type": kind}, f"ours are default, {', '.join(TYPES)}")
    return {**found, **_scaling(fields, name, kind, left, original, so_far)}


def _pop_type(parameters: Ours) -> Any:
    """The type of parameters, which can have two names, and is removed."""
    old = parameters.pop("type", "default")
    return parameters.pop("rope_type", old)


def _of_layers(fields: Fields, parameters: Ours) -> tuple[Ours, Ours]:
    """The parameters of layers without a window, and the others of layers with one."""
    full, of_window = ({} if parameters.get(name) is None else parameters[name] for name in (FULL, SLIDING))
    if parameters.keys() - {FULL, SLIDING} or not isinstance(full, dict) or not isinstance(of_window, dict):
        raise fields.error("rope_parameters", parameters, f"expected objects {FULL} and {SLIDING}")
    of_window = {**of_window}
    kind = _pop_type(of_window)
    if kind != "default" or of_window.keys() - {"rope_theta"}:
        raise fields.error("rope_parameters", parameters[SLIDING], "ours has no scaling in layers with a window")
    return full, of_window


def _local_base(fields: Fields, of_window: Ours, local: str) -> Any:
    """The base in layers with a window, where `of_window` are the parameters of version 5."""
    name = "rope_local_base_freq"
    is_stated, stated = name in fields, fields.take(name)
    base = of_window.get("rope_theta", stated if local == name else fields.defaults[name])
    if is_stated and stated != base:
        raise fields.error(name, stated, f"version 5 of transformers computes with {base!r}")
    if "rope_theta" not in of_window and local != name and fields.get(local, base) != base:
        raise fields.error(local, fields.get(local), f"version 5 of transformers has {base!r} in layers with a window")
    return base


def _original(fields: Fields, so_far: Ours, left: Ours, kind: Any) -> Any:
    """The number of positions of the first training."""
    name = "original_max_position_embeddings"
    if name in fields.defaults:  # of the model, and before that of the parameters
        return fields.take(name)
    original = left.get(name) or so_far["max_position_embeddings"]
    stated = fields.take(name, original, null=original)
    if stated != original and kind != "default":
        raise fields.error(name, stated, f"version 5 of transformers computes with {original!r}")
    return original


def _scaling(fields: Fields, name: str, kind: str, left: Ours, original: Any, so_far: Ours) -> Ours:
    """Our fields of a scaling; `left` are its parameters."""
    positions = so_far["max_position_embeddings"]
    if kind == "yarn":
        for key, value in (("truncate", True), ("mscale", None), ("mscale_all_dim", None)):
            if (given := left.pop(key, value)) != value:
                raise fields.error(name, {key: given}, f"ours computes with {value!r}")
    if unknown := left.keys() - TYPES[kind].keys():
        raise fields.error(name, {key: left[key] for key in sorted(unknown)}, f"ours has no such parameters of {kind}")
    found: Ours = {"rotary_scaling": kind}
    if "original_max_position_embeddings" in TYPES[kind]:
        left["original_max_position_embeddings"] = original
    elif kind == "dynamic":
        found["rotary_original_positions"] = positions
    if kind == "longrope" and left.get("factor") is None:
        try:
            left["factor"] = max(1.0, positions / left["original_max_position_embeddings"])
        except (TypeError, ZeroDivisionError):
            raise fields.error("max_position_embeddings", positions, "expected a number above 0") from None
    for theirs, ours in TYPES[kind].items():
        if left.get(theirs) is None:
            left.pop(theirs, None)
            if theirs not in ("attention_factor", "beta_fast", "beta_slow"):
                raise fields.error(name, kind, f"it needs {theirs}")
        elif theirs in _ATTENTION and left[theirs] == 0:  # in our config 0 is the default factor
            raise fields.error(name, {theirs: left[theirs]}, "expected a number above 0")
        elif ours:
            found[ours] = tuple(left[theirs]) if isinstance(left[theirs], list) else left[theirs]
    if kind in RAMP_NAMES and left.keys() & set(RAMP_NAMES[kind]):
        ramp = zip(RAMP_NAMES[kind], RAMPS[kind], strict=True)
        found["rotary_ramp"] = tuple(left.get(key) or default for key, default in ramp)
    return found


def _write(model: ModelConfig, local: str, old: tuple[str, str]) -> Ours:
    kind = model.rotary_scaling
    original = model.rotary_original_positions or model.max_position_embeddings
    parameters: Ours = {}
    for theirs, ours in TYPES.get(kind, {}).items():
        if theirs == "original_max_position_embeddings":
            parameters[theirs] = original
        elif ours and (value := getattr(model, ours)):
            parameters[theirs] = list(value) if isinstance(value, tuple) else value
    if kind in RAMP_NAMES:
        parameters |= dict(zip(RAMP_NAMES[kind], model.rotary_ramp or RAMPS[kind], strict=True))
    ratio = model.max_position_embeddings / original
    if kind == "longrope" and abs(parameters.get("factor", 1.0) - max(1.0, ratio)) < 1e-9:
        parameters.pop("factor", None)  # transformers 4 knows no such parameter for Phi-3
    theirs = {"rope_type": "default" if kind == "none" else kind, **parameters}
    partial = {} if model.rotary_percent == 1 else {"partial_rotary_factor": model.rotary_percent}
    content: Ours = {"rope_parameters": {**theirs, "rope_theta": model.rotary_base, **partial}}
    if local:
        of_window = {"rope_type": "default", "rope_theta": model.local_rotary_base or model.rotary_base}
        content["rope_parameters"] = {FULL: content["rope_parameters"], SLIDING: of_window}
        content["rope_local_base_freq"] = of_window["rope_theta"]
    if kind == "longrope":
        content["original_max_position_embeddings"] = parameters.pop("original_max_position_embeddings")
    if kind != "none":
        # Version 4 checks that Phi-3 has three fields here.
        names = {"type": kind} if kind == "longrope" else {"type": kind, "rope_type": kind}
        content["rope_scaling"] = {**names, **parameters}
    if model.rotary_percent != 1:
        content[old[1] or "partial_rotary_factor"] = model.rotary_percent
    return {**content, old[0]: model.rotary_base}
