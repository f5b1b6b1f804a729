"""`megatron-lite config`: all settings of a run, as text, as Markdown or as a JSON schema for editors.

All three come from the types, defaults and texts of `config/schema.py`.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_lite.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PAGE = """\
# Configuration

All settings of a run, with their defaults. `megatron-lite config --reference` writes this page from
`megatron_lite/config/schema.py`. A YAML file has the sections below, and
`section.field=value` on the command line overrides it. Errors name the file and the line.
`megatron-lite pretrain --config FILE --dry-run` prints the value of every field.

With the line `# yaml-language-server: $schema=schema.json` at the top of a YAML file, an editor that has a YAML
language server completes and describes the fields. `megatron-lite config --schema > schema.json` writes that file.
"""


def config(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION[.FIELD]]...", help="Sections or fields to describe.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a config, for editors.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Print all fields as a Markdown page.")] = False,
) -> None:
    """Describe the settings of a run: all sections, or the fields of some of them."""
    if sum(map(bool, (names, schema, reference))) > 1:
        raise ConfigError("give names, --schema or --reference; not more than one of them")
    if schema:
        text = json_schema()
    elif reference:
        text = reference_page()
    else:
        text = "\n".join(described(name) for name in names) if names else described_sections()
    typer.echo(text, nl=False)


def described_sections() -> str:
    """A line for each section."""
    from megatron_lite.config.load import SECTIONS

    width = max(map(len, SECTIONS))
    return "".join(f"{name:<{width}}  {first_line(section)}\n" for name, section in SECTIONS.items())


def described(name: str) -> str:
    """The text of a section with all its fields, or of one field. Raises ConfigError for an unknown name."""
    from megatron_lite.config.load import FIELDS, SECTIONS, unknown_name

    if name in FIELDS:
        return _field_text(name, FIELDS[name])
    if name not in SECTIONS:
        raise ConfigError(unknown_name(name))
    fields = [_field_text(f"{name}.{field}", info) for field, info in SECTIONS[name].model_fields.items()]
    return f"{name}: {_paragraphs(SECTIONS[name])}\n\n".replace("`", "") + "\n".join(fields)


def _field_text(name: str, info: "FieldInfo") -> str:
    from megatron_lite.config.load import accepted_values

    return f"{name}={_default(info)}    {accepted_values(info)}\n    {_text(info).replace('`', '')}\n"


def reference_page() -> str:
    """A Markdown page with a table for each section."""
    from megatron_lite.config.load import SECTIONS, accepted_values

    parts = [PAGE]
    for name, section in SECTIONS.items():
        parts.append(f"\n## {name}\n\n{_paragraphs(section)}\n\n| field | default | values | |\n|---|---|---|---|\n")
        for field, info in section.model_fields.items():
            default = f"`{_default(info)}`" if _default(info) else "empty"
            parts.append(f"| `{field}` | {default} | {accepted_values(info)} | {_text(info)} |\n")
    return "".join(parts)


def json_schema() -> str:
    """The JSON schema of a YAML file."""
    import json

    from megatron_lite.config.schema import Config

    return json.dumps(_without_titles(Config.model_json_schema()), indent=1) + "\n"


def _without_titles(value: Any) -> Any:
    """The schema without pydantic's titles, which repeat the names of the fields."""
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_titles(item) for key, item in value.items() if key != "title"}
    return value


def _paragraphs(section: type) -> str:
    from inspect import getdoc

    return getdoc(section) or ""


def first_line(section: type) -> str:
    """The first line of a section's text, without the backquotes of Markdown."""
    return _paragraphs(section).partition("\n")[0].replace("`", "")


def _default(info: "FieldInfo") -> str:
    """The default value as a YAML file has it; an empty text for one that is empty."""
    from megatron_lite.config.yaml_file import show_value

    return "" if info.default is None else show_value(info.default).strip("'")


def _text(info: "FieldInfo") -> str:
    """The description of a field on one line."""
    return " ".join((info.description or "").split())
