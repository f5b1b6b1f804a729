"""Parts of a config.json of Hugging Face: each reads some fields into ours, and writes them from ours.

A family is a list of parts. `read` gets the fields and what earlier parts have read; it raises CheckpointError for a
value that our model does not compute. `write` never fails: `huggingface_config.from_model` reads the result again, and
a field of ours that comes back with another value is one that the family cannot compute.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.checkpoint.compatible import DERIVED
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.huggingface_defaults import REQUIRED
from megatron_lite.convert.huggingface_fields import Fields

Ours = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu"}


@dataclass(frozen=True)
class Part:
    """Some fields of a config.json."""

    read: Callable[[Fields, Ours], Ours]
    write: Callable[[ModelConfig], Ours]


def fixed(**ours: Any) -> Part:
    """Values that a family has without a field."""
    return Part(lambda fields, so_far: ours, lambda model: {})


def expected(**theirs: Any) -> Part:
    """Fields that must have one value; null stands for false, or for none."""

    def read(fields: Fields, so_far: Ours) -> Ours:
        for name, value in theirs.items():
            fields.expect(name, fields.take(name, value, null=REQUIRED if value else value), value)
        return {}

    return Part(read, lambda model: theirs)


def same(ours: str, theirs: str, *, null: Any = REQUIRED) -> Part:
    """A field with the value of ours; a `null` that is the name of a field of ours has its value."""

    def read(fields: Fields, so_far: Ours) -> Ours:
        return {ours: fields.take(theirs, null=so_far.get(null, null) if isinstance(null, str) else null)}

    return Part(read, lambda model: {theirs: getattr(model, DERIVED.get(ours, ours))})


def sizes(**theirs: str) -> tuple[Part, ...]:
    """Fields of ours with the same value in a field of theirs."""
    return tuple(same(ours, name) for ours, name in theirs.items())


def mapped(ours: str, theirs: str, names: Mapping[str, str]) -> Part:
    """A field whose names are others."""

    def read(fields: Fields, so_far: Ours) -> Ours:
        value = fields.take(theirs)
        if not isinstance(value, str) or value not in names:
            raise fields.error(theirs, value, f"ours are {', '.join(names)}")
        return {ours: names[value]}

    def write(model: ModelConfig) -> Ours:
        value = getattr(model, ours)
        return {theirs: next((name for name, of_ours in names.items() if of_ours == value), next(iter(names)))}

    return Part(read, write)


def scaled(ours: str, theirs: str, power: float) -> Part:
    """A field with a number whose power is ours: with `power` -0.5, ours is 1 / sqrt(theirs)."""

    def read(fields: Fields, so_far: Ours) -> Ours:
        value = fields.take(theirs)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise fields.error(theirs, value, "expected a number above 0")
        return {ours: value**power}

    def write(model: ModelConfig) -> Ours:
        value = getattr(model, ours) or model.head_size**-0.5  # only the scale of attention can be 0
        power_of = value ** (1 / power)
        return {theirs: round(power_of) if math.isclose(power_of, round(power_of), rel_tol=1e-12) else power_of}

    return Part(read, write)


def optional(ours: str, theirs: str) -> Part:
    """A field in which null stands for ours 0."""
    return Part(
        lambda fields, so_far: {ours: fields.take(theirs, null=0.0)},
        lambda model: {theirs: getattr(model, ours) or None},
    )


def dropouts(hidden: str, embedding: str, attention: str) -> Part:
    """Dropout of residual branches and of the embedding, which is one in ours, and of attention."""

    def read(fields: Fields, so_far: Ours) -> Ours:
        residual = fields.take(hidden)
        other = fields.take(embedding) if embedding and embedding not in fields.ignored else residual
        if other != residual:
            raise fields.error(embedding, other, f"{hidden} is {residual!r}, and ours has one hidden_dropout")
        return {"hidden_dropout": residual, "attention_dropout": fields.take(attention)}

    def write(model: ModelConfig) -> Ours:
        others = {embedding: model.hidden_dropout} if embedding else {}
        return {hidden: model.hidden_dropout, **others, attention: model.attention_dropout}

    return Part(read, write)


def biases(attention: str, mlp: str | bool) -> Part:
    """Biases of attention, and of the MLP: a field, or always or never."""

    def read(fields: Fields, so_far: Ours) -> Ours:
        of_attention = fields.take(attention)
        of_mlp = fields.take(mlp) if isinstance(mlp, str) else mlp
        for name, value in ((attention, of_attention), (mlp, of_mlp)):
            fields.expect(str(name), value, True, False)
        both = {(True, True): True, (False, False): False, (True, False): "attention", (False, True): "mlp"}
        return {"bias": both[of_attention, of_mlp]}

    def write(model: ModelConfig) -> Ours:
        others = {mlp: model.has_bias("mlp")} if isinstance(mlp, str) else {}
        return {attention: model.has_bias("qkv"), **others}

    return Part(read, write)


def window(every: int | None = None, *, named: bool = False, flag: bool = False, no_rope: bool = False) -> Part:
    """A sliding window: of all layers, or with `every` of those in `layer_types`, by default all but each such one.

    With `named`, `sliding_window_pattern` of version 4 has another number than `every`. With `flag` there is a window
    only if `use_sliding_window` is set, by default in the layers from `max_window_layers` on, or with `no_rope` in
    those without positions.
    """

    def read(fields: Fields, so_far: Ours) -> Ours:
        size, layers = fields.take("sliding_window", null=0), so_far["num_layers"]
        is_used = not flag or fields.take_as("use_sliding_window", bool)
        first = fields.take_as("max_window_layers", int, 0) if flag else 0
        number = fields.take_as("sliding_window_pattern", int, every) if every else 0
        if not named:
            fields.expect("sliding_window_pattern", number, every or 0)
        if not isinstance(layers, int) or layers > 10_000:  # an error of another check
            return {"window_size": 0, "window_attn_skip_freq": 0}
        numbers = range(layers)
        if no_rope:
            found = [bool(so_far["no_rope_freq"]) and (at + 1) % so_far["no_rope_freq"] == 0 for at in numbers]
        else:
            found = [at >= first and not (number and (at + 1) % number == 0) for at in numbers]
        types = [SLIDING if is_used and has_window else FULL for has_window in found]
        types = fields.take_as("layer_types", list, null=types) if every is not None else types
        if other := [kind for kind in types if kind not in (SLIDING, FULL)]:
            raise fields.error("layer_types", other[0], f"ours are {SLIDING} and {FULL}")
        if not size or SLIDING not in types:
            return {"window_size": 0, "window_attn_skip_freq": 0}
        if not is_used:
            raise fields.error("layer_types", SLIDING, "use_sliding_window is false")
        skipped = 1 + types.index(FULL) if FULL in types else 0
        regular = [FULL if skipped and (at + 1) % skipped == 0 else SLIDING for at in numbers]
        if types != regular:
            name = "max_window_layers" if first else "layer_types"
            raise fields.error(name, first or types, "ours has a window in all layers, or in all but every n-th one")
        return {"window_size": size, "window_attn_skip_freq": skipped}

    def write(model: ModelConfig) -> Ours:
        # With a pattern, transformers needs a size even if no layer has a window.
        theirs: Ours = {"sliding_window": model.window_size or (model.max_position_embeddings if every else None)}
        if every is not None:
            numbers = range(min(model.num_layers, 10_000))
            theirs["layer_types"] = [SLIDING if model.window_of(layer) else FULL for layer in numbers]
        if flag:
            first = 0 if model.window_size else model.num_layers
            theirs |= {"use_sliding_window": model.window_size > 0, "max_window_layers": first}
        return theirs

    return Part(read, write)


def _read_no_rope(fields: Fields, so_far: Ours) -> Ours:
    every, layers = fields.take_as("no_rope_layer_interval", int), so_far["num_layers"]
    if every < 1:
        raise fields.error("no_rope_layer_interval", every, "expected at least 1")
    if not isinstance(layers, int) or layers > 10_000:
        return {"no_rope_freq": 0}
    regular = [int((at + 1) % every != 0) for at in range(layers)]
    given = fields.take_as("no_rope_layers", list, null=regular)
    skipped = 1 + given.index(0) if 0 in given else 0
    if given != [int(not skipped or (at + 1) % skipped != 0) for at in range(layers)]:
        raise fields.error("no_rope_layers", given, "ours has no positions in every n-th layer")
    return {"no_rope_freq": skipped}


NO_ROPE = Part(
    _read_no_rope,
    lambda model: {
        "no_rope_layer_interval": model.no_rope_freq or model.num_layers + 1,
        "no_rope_layers": [
            int(not model.no_rope_freq or (at + 1) % model.no_rope_freq != 0)
            for at in range(min(model.num_layers, 10_000))
        ],
    },
)


def flag(ours: str, theirs: str, values: Sequence[Any]) -> Part:
    """A boolean of theirs; `values` are ours for false and true."""

    def read(fields: Fields, so_far: Ours) -> Ours:
        value = fields.take(theirs)
        fields.expect(theirs, value, True, False)
        return {ours: values[value]}

    return Part(read, lambda model: {theirs: getattr(model, ours) == values[True]})
