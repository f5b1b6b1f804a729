"""Reads a YAML file and `section.field=value` overrides into a `Config`, and reports all mistakes at once.

A mistake has its place: `gpt.yaml:2: unknown field model.hidden_sise; did you mean model.hidden_size?` Values of the
command line override those of the file, and both override `model.preset`. Nothing is guessed or repaired. Relative
paths are kept as written, so they start at the current directory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Config, Section
from megatron_lite.config.yaml_file import compose, line_of, value_of
from megatron_lite.errors import ConfigError

COMMAND_LINE = "command line"

SECTIONS: dict[str, type[Section]] = {
    name: info.annotation  # type: ignore[misc]
    for name, info in Config.model_fields.items()
}
FIELDS: dict[str, FieldInfo] = {
    f"{name}.{field}": info for name, section in SECTIONS.items() for field, info in section.model_fields.items()
}


@dataclass(frozen=True)
class _Given:
    """A value and its place."""

    value: Any
    where: str
    line: int  # for the order of messages; 0 on the command line


class _Mistakes:
    """Messages, raised together in the order of the file, with those of the command line last."""

    def __init__(self) -> None:
        self._messages: list[tuple[bool, int, str]] = []

    def add(self, where: str, line: int, message: str) -> None:
        self._messages.append((where == COMMAND_LINE, line, f"{where}: {message}"))

    def raise_any(self) -> None:
        if self._messages:
            raise ConfigError("\n".join(message for _, _, message in sorted(self._messages, key=lambda m: m[:2])))


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The config of a file, or the default one, with overrides such as `optim.lr=3e-4`.

    Raises one ConfigError that lists every unknown field, wrong type and duplicate. `validate` checks the rules that
    join fields or need the number of processes.
    """
    mistakes = _Mistakes()
    given = _read_file(Path(path), mistakes) if path is not None else {}
    for override in overrides:
        _read_override(override, given, mistakes)
    _check_preset(given, mistakes)
    sections = {name: _build(name, section, given, mistakes) for name, section in SECTIONS.items()}
    mistakes.raise_any()
    return Config(**sections)  # type: ignore[arg-type]


def dump_config(config: Config) -> str:
    """YAML with every field, which `load_config` reads back as the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def resolved(config: Config, world_size: int) -> Config:
    """The same config with each 0 that follows from other fields replaced by its value."""
    model, train, optim = config.model, config.train, config.optim
    decay = optim.decay_iterations or train.iterations
    sizes = {
        "num_query_groups": model.query_groups,
        "head_dim": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "padded_vocab_size": model.padded_vocab,
    }
    steps = {"decay_iterations": decay}
    if optim.schedule == "wsd":
        steps["wsd_decay_iterations"] = optim.wsd_length(decay)
    batch = {"global_batch_size": train.global_batch(config.parallel.data(world_size))}
    return config.model_copy(
        update={
            "model": model.model_copy(update=sizes),
            "train": train.model_copy(update=batch),
            "optim": optim.model_copy(update=steps),
        }
    )


def _read_file(path: Path, mistakes: _Mistakes) -> dict[str, _Given]:
    """Every known `section.field` of a file; unknown and repeated ones become mistakes."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file in {Path.cwd()}; --config needs a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a text file: {error}") from error
    root = compose(text, str(path))
    if root is None:
        raise ConfigError(f"{path}: the file is empty; add sections such as model: and train:")
    given: dict[str, _Given] = {}
    for section, node, line in _entries(root, str(path), "the file", mistakes):
        where = f"{path}:{line}"
        if section not in SECTIONS:
            mistakes.add(where, line, _unknown(section))
        elif not _is_empty(node):
            for field, value, field_line in _entries(node, str(path), section, mistakes):
                _record(f"{section}.{field}", value, _Given(None, f"{path}:{field_line}", field_line), given, mistakes)
    return given


def _entries(node: yaml.Node, path: str, what: str, mistakes: _Mistakes) -> Iterable[tuple[str, yaml.Node, int]]:
    """Key, value node and line of a mapping's entries, each key once."""
    if not isinstance(node, yaml.MappingNode):
        wanted = "sections such as `model:`" if what == "the file" else f"indented fields such as `{_example(what)}`"
        mistakes.add(f"{path}:{line_of(node)}", line_of(node), f"{what} must hold {wanted}")
        return
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), line_of(key_node)
        if key in lines:
            name = key if what == "the file" else f"{what}.{key}"
            mistakes.add(f"{path}:{line}", line, f"{name} is given twice, on line {lines[key]} already; keep one")
        else:
            lines[key] = line
            yield key, value_node, line


def _record(name: str, node: yaml.Node, place: _Given, given: dict[str, _Given], mistakes: _Mistakes) -> None:
    """Adds a field's value to `given`; an unknown field becomes a mistake."""
    if name not in FIELDS:
        mistakes.add(place.where, place.line, _unknown(name))
    else:
        value = value_of(node, text=_wants_text(FIELDS[name].annotation))
        given[name] = _Given(value, place.where, place.line)


def _read_override(override: str, given: dict[str, _Given], mistakes: _Mistakes) -> None:
    """Adds `section.field=value` to `given`; the value is YAML, or plain text for a text field."""
    name, equals, value = override.partition("=")
    if not equals:
        is_file = override.endswith((".yaml", ".yml"))
        advice = f"; a file is given as --config {override}" if is_file else ""
        mistakes.add(COMMAND_LINE, 0, f"{override!r} is not of the form section.field=value{advice}")
        return
    if name in FIELDS and _is_text(FIELDS[name].annotation) and value[:1] not in ("'", '"'):
        given[name] = _Given(None if value in ("", "null", "~") else value, COMMAND_LINE, 0)
        return
    try:
        node = compose(value, COMMAND_LINE)
    except ConfigError as error:
        mistakes.add(COMMAND_LINE, 0, f"{override}: {str(error).removeprefix('command line:1: ')}")
        return
    _record(name, node or yaml.ScalarNode("", ""), _Given(None, COMMAND_LINE, 0), given, mistakes)


def _check_preset(given: dict[str, _Given], mistakes: _Mistakes) -> None:
    """Removes an unknown preset, so that the other fields are checked too."""
    preset = given.get("model.preset")
    if preset is not None and isinstance(preset.value, str) and preset.value and preset.value not in PRESETS:
        near = _question(_nearest(preset.value, PRESETS))
        mistakes.add(
            preset.where, preset.line, f"unknown model.preset {preset.value}{near}; use one of {_list(PRESETS)}"
        )
        del given["model.preset"]


def _build(name: str, section: type[Section], given: dict[str, _Given], mistakes: _Mistakes) -> Section | None:
    """One section from its given fields; None when a field is wrong, which becomes a mistake."""
    values = {}
    for key, item in given.items():
        if key.startswith(name + "."):
            empty_text = item.value is None and _is_text(FIELDS[key].annotation)
            values[key.removeprefix(name + ".")] = "" if empty_text else item.value
    try:
        return section(**values)
    except ValidationError as error:
        for field in dict.fromkeys(str(problem["loc"][0]) for problem in error.errors()):
            key = f"{name}.{field}"
            item = given[key]
            got = "is empty" if item.value is None else f"is {_show(item.value)}"
            mistakes.add(item.where, item.line, f"{key} {got}; it must be {_wanted(FIELDS[key], item.value)}")
        return None


def _is_text(annotation: Any) -> bool:
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return plain is str or get_origin(plain) is Literal


def _wants_text(annotation: Any) -> bool:
    """True for text and lists of text."""
    return _is_text(get_args(annotation)[0] if get_origin(annotation) is tuple else annotation)


def _is_empty(node: yaml.Node) -> bool:
    """True for a section whose lines are all commented out."""
    return isinstance(node, yaml.ScalarNode) and value_of(node, text=False) is None


def _wanted(info: FieldInfo, value: Any) -> str:
    """The accepted values of a field, in words."""
    if info.description:
        return info.description
    if get_origin(info.annotation) is Literal:
        choices = [str(choice) for choice in get_args(info.annotation)]
        return f"one of {_list(choices)}{_question(_nearest(str(value), choices))}"
    words = {bool: "true or false", str: "text", int: "an integer", float: "a number"}[info.annotation]  # type: ignore
    bounds = [f"above {bound.gt}" for bound in info.metadata if isinstance(bound, Gt)]
    bounds += [f"of at least {bound.ge:.12g}" for bound in info.metadata if isinstance(bound, Ge)]  # type: ignore[str-bytes-safe]
    bounds += [f"below {bound.lt:.12g}" for bound in info.metadata if isinstance(bound, Lt)]  # type: ignore[str-bytes-safe]
    return " ".join([words, " and ".join(bounds)]).strip()


def _unknown(name: str) -> str:
    """The message for an unknown section or field, with the most similar name."""
    section, dot, field = name.partition(".")
    # Only the field's name is compared: a common section would make any two names similar.
    every = {key.partition(".")[2]: key for key in FIELDS}
    if not dot and name in SECTIONS:
        return f"{name} is a section; name one of its fields, such as {name}.{_example(name)}"
    if not dot:
        near = _question(every.get(name) or _nearest(name, SECTIONS))
        return f"unknown section {name}{near}; sections are {_list(SECTIONS)}"
    elsewhere = every.get(_nearest(field, every), "")
    if section not in SECTIONS:
        return f"unknown section {section} in {name}{_question(elsewhere or _nearest(section, SECTIONS))}"
    own = SECTIONS[section].model_fields
    here = "" if field in every else _nearest(field, own)
    near = _question(f"{section}.{here}" if here else elsewhere)
    return f"unknown field {name}{near or f'; {section} has {_list(own)}'}"


def _question(name: str) -> str:
    return f"; did you mean {name}?" if name else ""


def _nearest(word: str, words: Iterable[str]) -> str:
    """The most similar of `words`; empty when none is similar."""
    return next(iter(get_close_matches(word, list(words), n=1, cutoff=0.6)), "")


def _example(section: str) -> str:
    return next(iter(SECTIONS[section].model_fields))


def _list(words: Iterable[str]) -> str:
    return ", ".join(words)


def _show(value: Any) -> str:
    """A value in YAML."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join("..." if isinstance(item, dict) else str(item) for item in value) + "]"
    return repr(value) if isinstance(value, str) else str(value)
