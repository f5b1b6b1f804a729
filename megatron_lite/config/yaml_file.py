"""Parse YAML into nodes that keep their line numbers, and convert nodes to Python values.

PyYAML follows YAML 1.1, where `3e-4` is text, `on` is a boolean and `1:30` is 90. Here null, booleans and decimal
numbers follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/, section 10.3); all else stays text.
"""

import re
from typing import Any

import yaml

from megatron_lite.errors import ConfigError

# An integer of more than 30 digits, which no setting needs, becomes a float: int() fails above 4,300 digits.
_INTEGER = re.compile(r"[-+]?[0-9]{1,30}")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULL = ("", "~", "null", "Null", "NULL")
_BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


def compose(text: str, where: str) -> yaml.Node | None:
    """The root node of a YAML document; None if it is empty. `where` names the source in messages."""
    try:
        return yaml.compose(text, Loader=yaml.BaseLoader)  # BaseLoader leaves every scalar a string
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        raise ConfigError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError:
        raise ConfigError(f"{where}:1: not valid YAML: brackets or sections are nested too deeply") from None


def line_of(node: yaml.Node) -> int:
    """The line on which a node starts, counted from 1."""
    return node.start_mark.line + 1


def value_of(node: yaml.Node, text: bool) -> Any:
    """The Python value of a scalar, or a tuple for a sequence; {}, which no field accepts, for any other node.

    With `text` a plain scalar stays a string as written, except null.
    """
    if isinstance(node, yaml.SequenceNode):
        return tuple(_scalar(item, text) if isinstance(item, yaml.ScalarNode) else {} for item in node.value)
    return _scalar(node, text) if isinstance(node, yaml.ScalarNode) else {}


def _scalar(node: yaml.ScalarNode, text: bool) -> Any:
    written: str = node.value
    if node.style is not None:  # quoted, or a block of text
        return written
    if written in _NULL:
        return None
    if text:
        return written
    if written in _BOOLEAN:
        return _BOOLEAN[written]
    if _INTEGER.fullmatch(written):
        return int(written)
    return float(written) if _NUMBER.fullmatch(written) else written


def show_value(value: Any) -> str:
    """A value in YAML."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join("..." if isinstance(item, dict) else str(item) for item in value) + "]"
    return repr(value) if isinstance(value, str) else str(value)
