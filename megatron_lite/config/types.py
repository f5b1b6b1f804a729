"""Types of config fields that need more than a bound: lists with short forms, names from a table, paths.

`Accepts` has the accepted values in words, because pydantic's own messages name patterns and Python types.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, NonNegativeFloat

from megatron_lite.config.presets import PRESETS


class Accepts(NamedTuple):
    """The accepted values of a type in words, for the error message."""

    words: str


LARGEST = 1 << 53  # arithmetic with floats is exact up to it, and cannot overflow
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
MOST_SECONDS = Field(le=1e8)  # three years; clocks overflow at less than 1e10
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]


def _paths(value: Any) -> Any:
    """A single prefix is a list of one."""
    return (value,) if isinstance(value, str) else _tuple(value)


def _split(value: Any) -> Any:
    """Accepts Megatron's spelling too, the text `969,30,1`; other text is left to the type."""
    if isinstance(value, str):
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            return value
    return _tuple(value)


def _tuple(value: Any) -> Any:
    """JSON and YAML have lists where a frozen section has tuples."""
    return tuple(value) if isinstance(value, list) else value


def _offload(value: Any) -> Any:
    """Accepts the booleans of older configs."""
    known = {"false": "none", "true": "cpu"}
    return known.get(str(value).lower(), value)


# A file name may hold a newline, which would end a line of a job script; nothing accepts NUL.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
Paths = Annotated[
    tuple[Annotated[str, Field(pattern=PRINTABLE)], ...],
    BeforeValidator(_paths, json_schema_input_type=str | tuple[str | NonNegativeFloat, ...]),
    Accepts("a list of path prefixes, without control characters"),
]
Split = Annotated[
    tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat],
    BeforeValidator(_split, json_schema_input_type=str | tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat]),
    Accepts("exactly three non-negative numbers, such as 969,30,1"),
]
RampUp = Annotated[
    tuple[PositiveInt, PositiveInt, NonNegativeInt] | None,
    BeforeValidator(_tuple),
    Accepts("three integers [start, increment, samples], the first two above 0"),
]
StageLayers = Annotated[
    Literal["even", "balanced"] | tuple[NonNegativeInt, ...],
    BeforeValidator(_tuple),
    Accepts("even, balanced, or a list with the number of layers of each stage, such as [3, 4, 4, 3]"),
]
Offload = Annotated[
    Literal["none", "cpu", "nvme"],
    BeforeValidator(_offload, json_schema_input_type=bool | Literal["none", "cpu", "nvme"]),
    Accepts("none, cpu or nvme; false is none, and true is cpu"),
]
Recompute = Annotated[
    str,
    Field(pattern=r"^(none|activation|selective|full|stage|(full|uniform):[1-9][0-9]*)$"),
    Accepts("none, activation, selective, full, full:n for the first n layers of each stage, uniform:n, or stage"),
]
if TYPE_CHECKING:
    Preset = str
else:  # a type checker cannot read the names from a table
    Preset = Literal[("", *PRESETS)]
Bias = Annotated[bool | Literal["qkv", "attention", "mlp"], Accepts("true, false, qkv, attention or mlp")]
Numbers = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_tuple), Accepts("a list of numbers above 0")
]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what NumPy's generators take
Folder = Annotated[
    str, Field(min_length=1, pattern=PRINTABLE), Accepts("the path of a folder, without control characters")
]
OptionalPath = Annotated[str, Field(pattern=PRINTABLE), Accepts("a path without control characters, or empty")]
