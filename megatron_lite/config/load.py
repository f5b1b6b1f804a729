"""Reads a YAML file and `section.field=value` overrides into a `Config`, and reports all mistakes at once.

A mistake has its place: `gpt.yaml:2: unknown field model.hidden_sise; did you mean model.hidden_size?` Values of the
command line override those of the file, and both override `model.preset`. Nothing is guessed or repaired. Relative
paths are kept as written, so they start at the current directory.
"""

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, overload

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Config, Section
from megatron_lite.config.types import LARGEST, Accepts
from megatron_lite.config.validate import raise_any
from megatron_lite.config.yaml_file import compose, line_of, show_value, value_of
from megatron_lite.errors import ConfigError
from megatron_lite.files import read_file
from megatron_lite.text import one_line

SETTINGS, RESOLVED = "settings.yaml", "resolved.yaml"  # of a run.dir: the given fields, and all fields
OLD_RESOLVED = "config.yaml"  # the name of RESOLVED in older run.dirs
WRITTEN = "# Written by megatron-lite, again at each start of the run: copy this file to change it.\n"
AnyConfig = TypeVar("AnyConfig", bound=Config)


def sections_of(config_type: type[Config]) -> dict[str, type[Section]]:
    """The sections of a config by name."""
    return {name: info.annotation for name, info in config_type.model_fields.items()}  # type: ignore[misc]


@cache
def fields_of(config_type: type[Config]) -> dict[str, FieldInfo]:
    """All fields of a config as `section.field`."""
    sections = sections_of(config_type)
    return {f"{name}.{key}": info for name, section in sections.items() for key, info in section.model_fields.items()}


SECTIONS, FIELDS = sections_of(Config), fields_of(Config)


class _Place(NamedTuple):
    """The source of a value: a line of the file, or the command line, whose messages are last."""

    line: float  # infinite on the command line
    name: str


_COMMAND_LINE = _Place(math.inf, "command line")


@overload
def load_config(path: str | Path | None, overrides: Sequence[str] = ...) -> Config: ...
@overload
def load_config(path: str | Path | None, overrides: Sequence[str], config_type: type[AnyConfig]) -> AnyConfig: ...
def load_config(path: str | Path | None, overrides: Sequence[str] = (), config_type: type[Config] = Config) -> Config:
    """The config of a file, or the default one, with overrides such as `optim.lr=3e-4`.

    A subclass as `config_type` adds sections. Raises one ConfigError that lists every unknown field, wrong type and
    duplicate. `validate` checks the rules that join fields or need the number of processes.
    """
    reader = _Reader(config_type)
    if path is not None:
        reader.read_file(Path(path))
    for override in overrides:
        reader.read_override(override)
    sections = {name: reader.build(name, section) for name, section in sections_of(config_type).items()}
    mistakes = sorted(reader.mistakes, key=lambda mistake: mistake[0].line)
    raise_any(f"{place.name}: {message}" for place, message in mistakes)
    return config_type(**sections)  # type: ignore[arg-type]


def dump_config(config: Config) -> str:
    """YAML with every field, which `load_config` reads back as the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def dump_settings(config: Config) -> str:
    """YAML with the given fields alone, which `load_config` reads back as the same config.

    Given is what differs from the default or the preset, and what a file or a script names, unless it names all fields.
    """
    settings = {}
    for name, values in config.model_dump(mode="json").items():
        section: Section = getattr(config, name)
        fields, preset = type(section).model_fields, PRESETS.get(getattr(section, "preset", ""), {})
        given = section.model_fields_set - preset.keys()
        given = given if given < fields.keys() - preset.keys() else set()
        default = {key: info.get_default(call_default_factory=True) for key, info in fields.items()}
        kept = {
            key: value
            for key, value in values.items()
            if key in given or (value != preset[key] if key in preset else getattr(section, key) != default[key])
        }
        settings |= {name: kept} if kept else {}
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120)


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
    wsd = {"wsd_decay_iterations": optim.wsd_length(decay)} if optim.schedule == "wsd" else {}
    batch = {"global_batch_size": train.global_batch(config.parallel.data(world_size))}
    return config.model_copy(
        update={
            "model": model.model_copy(update=sizes),
            "train": train.model_copy(update=batch),
            "optim": optim.model_copy(update={"decay_iterations": decay, **wsd}),
        }
    )


class _Reader:
    """The given values of a config, by `section.field`, and the mistakes in them."""

    def __init__(self, config_type: type[Config]):
        self.config_type = config_type
        self.fields = fields_of(config_type)
        self.given: dict[str, tuple[Any, _Place]] = {}
        self.mistakes: list[tuple[_Place, str]] = []

    def read_file(self, path: Path) -> None:
        """Every known `section.field` of a file; unknown and repeated ones become mistakes."""
        try:
            text = read_file(path).decode()
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file in {Path.cwd()}; --config needs a YAML file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as a text file: {error}") from error
        root = compose(text, str(path))
        if root is None:
            raise ConfigError(f"{path}: the file is empty; add sections such as model: and train:")
        for section, node, place in self._entries("", root, path):
            if section not in self.config_type.model_fields:
                self._unknown(section, place)
            elif value_of(node, text=False) is not None:  # None: all lines of the section are comments
                for name, value, place_of_value in self._entries(section, node, path):
                    self._record(name, value, place_of_value)

    def read_override(self, override: str) -> None:
        """Adds `section.field=value`; the value is YAML, or plain text for a text field."""
        name, equals, value = override.partition("=")
        if not equals:
            is_file = override.endswith((".yaml", ".yml"))
            advice = f"; a file is given as --config {override}" if is_file else ""
            self.mistakes.append((_COMMAND_LINE, f"{override!r} is not of the form section.field=value{advice}"))
            return
        if name in self.fields and _is_text(self.fields[name].annotation) and value[:1] not in ("'", '"'):
            self.given[name] = (None if value in ("", "null", "~") else value, _COMMAND_LINE)
            return
        try:
            node = compose(value, _COMMAND_LINE.name)
        except ConfigError as error:
            message = str(error).removeprefix("command line:1: ")
            self.mistakes.append((_COMMAND_LINE, f"{override}: {message}"))
            return
        self._record(name, node or yaml.ScalarNode("", ""), _COMMAND_LINE)

    def build(self, name: str, section: type[Section]) -> Section | None:
        """One section from its given fields; None when a field is wrong, which becomes a mistake."""
        values = {}
        for key, (value, _) in self.given.items():
            if key.startswith(name + "."):
                empty_text = value is None and _is_text(self.fields[key].annotation)
                values[key.removeprefix(name + ".")] = "" if empty_text else value
        try:
            return section(**values)
        except ValidationError as error:
            problems = {str(problem["loc"][0]) if problem["loc"] else "": problem["msg"] for problem in error.errors()}
            for field, message in problems.items():
                key = f"{name}.{field}"
                if key not in self.given:  # a validator of a script
                    self.mistakes.append((_Place(math.inf, name), message))
                    continue
                value, place = self.given[key]
                got = "empty" if value is None else show_value(value)
                near = _question(_nearest(str(value), choices(self.fields[key])))
                wanted = accepted_values(self.fields[key])
                self.mistakes.append((place, f"{key} is {got}; it must be {wanted}{near}"))
            return None

    def _entries(self, section: str, node: yaml.Node, path: Path) -> Iterable[tuple[str, yaml.Node, _Place]]:
        """Full name, value node and place of each entry of a section (of the file for ""), each name once."""
        if not isinstance(node, yaml.MappingNode):
            example = next(iter(sections_of(self.config_type)[section].model_fields)) if section else ""
            fields = f"indented fields such as `{example}`" if section else "sections such as `model:`"
            place = _Place(line_of(node), f"{path}:{line_of(node)}")
            self.mistakes.append((place, f"{section or 'the file'} must hold {fields}"))
            return
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = line_of(key_node)
            key = one_line(key_node.value)
            name = f"{section}.{key}" if section else key
            place = _Place(line, f"{path}:{line}")
            if name in lines:
                self.mistakes.append((place, f"{name} is given twice, on line {lines[name]} already; keep one"))
            else:
                lines[name] = line
                yield name, value_node, place

    def _record(self, name: str, node: yaml.Node, place: _Place) -> None:
        """Adds a field's value; an unknown field becomes a mistake."""
        if name in self.fields:
            self.given[name] = (value_of(node, text=_wants_text(self.fields[name].annotation)), place)
        else:
            self._unknown(name, place)

    def _unknown(self, name: str, place: _Place) -> None:
        self.mistakes.append((place, unknown_name(name, self.config_type)))


def _is_text(annotation: Any) -> bool:
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return plain is str or get_origin(plain) is Literal


def _wants_text(annotation: Any) -> bool:
    """True for text and lists of text."""
    return _is_text(get_args(annotation)[0] if get_origin(annotation) is tuple else annotation)


def accepted_values(info: FieldInfo) -> str:
    """The accepted values of a field, in words."""
    for accepts in info.metadata:
        if isinstance(accepts, Accepts):
            return accepts.words
    if names := choices(info):
        return f"one of {', '.join(names)}"
    plain = {bool: "true or false", str: "text", int: "an integer", float: "a number"}
    words = plain.get(info.annotation, str(info.annotation))  # type: ignore[call-overload]
    bounds = [f"above {bound.gt}" for bound in info.metadata if isinstance(bound, Gt)]
    bounds += [f"of at least {bound.ge:.12g}" for bound in info.metadata if isinstance(bound, Ge)]  # type: ignore[str-bytes-safe]
    bounds += [f"below {bound.lt:.12g}" for bound in info.metadata if isinstance(bound, Lt)]  # type: ignore[str-bytes-safe]
    bounds += [f"at most {bound.le:.12g}" for bound in info.metadata if isinstance(bound, Le) and bound.le != LARGEST]  # type: ignore[str-bytes-safe]
    return " ".join([words, " and ".join(bounds)]).strip()


def choices(info: FieldInfo) -> list[str]:
    """The names that a field accepts, without the empty one; an empty list for a field that takes other values."""
    return list(filter(None, get_args(info.annotation))) if get_origin(info.annotation) is Literal else []


def unknown_name(name: str, config_type: type[Config] = Config) -> str:
    """The message for an unknown section or field, with the most similar name."""
    sections = sections_of(config_type)
    section, dot, field = name.partition(".")
    # Only the field's name is compared: a common section would make any two names similar.
    every = {key.partition(".")[2]: key for key in fields_of(config_type)}
    if not dot and name in sections:
        example = next(iter(sections[name].model_fields))
        return f"{name} is a section; name one of its fields, such as {name}.{example}"
    if other := other_names().get(field or name):
        return f"unknown field {name}{_question(other)}"
    if not dot:
        near = _question(every.get(name) or _nearest(name, sections))
        return f"unknown section {name}{near}; sections are {', '.join(sections)}"
    elsewhere = every.get(_nearest(field, every, cutoff=0.8), "")
    if section not in sections:
        return f"unknown section {section} in {name}{_question(elsewhere or _nearest(section, sections))}"
    own = sections[section].model_fields
    here = "" if field in every else _nearest(field, own)
    near = _question(f"{section}.{here}" if here else elsewhere)
    return f"unknown field {name}{near}" if near else f"unknown field {name}; {section} has {', '.join(own)}"


@cache
def other_names() -> dict[str, str]:
    """The fields of ours by the names that other frameworks give them; a similar name may mean something else."""
    table = yaml.safe_load((Path(__file__).parent / "other_names.yaml").read_text(encoding="utf-8"))
    return {other: name for name, others in table.items() for other in others.split()}


def _question(name: str) -> str:
    return f"; did you mean {name}?" if name else ""


def _nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of `words`; empty when none is similar."""
    return next(iter(get_close_matches(word, list(words), n=1, cutoff=cutoff)), "")
