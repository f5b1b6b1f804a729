"""The JSON schema accepts what a config accepts, and `megatron-lite config` describes sections and fields."""

import json

import jsonschema
import pytest
import yaml
from jsonschema.validators import validator_for
from typer.testing import CliRunner

from megatron_lite.cli import app
from megatron_lite.cli.config import described, json_schema, reference_page
from megatron_lite.config.load import SECTIONS, dump_config, load_config
from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError
from tests.helpers.cases import all_cases
from tests.helpers.command import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> jsonschema.Validator:
    content = json.loads(json_schema())
    validator = validator_for(content)
    validator.check_schema(content)
    return validator(content)


def test_every_config_names_the_schema_and_satisfies_it(schema):
    """An editor would mark lines of a config that trains, or complete nothing."""
    with all_cases() as case:
        for path in CONFIGS:
            with case(path.name):
                first, _, _ = path.read_text().partition("\n")
                assert first == "# yaml-language-server: $schema=schema.json"
                # Read by load_config, because 3e-4 is a number in YAML 1.2 and text for PyYAML.
                schema.validate(load_config(path).model_dump(mode="json"))


def test_the_schema_refuses_what_a_config_refuses(schema):
    """An editor that accepts a wrong value would be worse than none."""
    wrong = [
        ("optim", "lrr", 1.0),
        ("optim", "lr", "fast"),
        ("optim", "lr", 0),
        ("train", "precision", "fp8"),
        ("data", "split", [1, 2]),
        ("train", "recompute", "full:0"),
    ]
    with all_cases() as case:
        for section, field, value in wrong:
            with case(section, field, value):
                with pytest.raises(jsonschema.ValidationError):
                    schema.validate({section: {field: value}})
                with pytest.raises(ConfigError):
                    load_config(None, [f"{section}.{field}={json.dumps(value)}"])


def test_the_schema_accepts_the_short_forms_that_a_config_accepts(schema):
    texts = ("data: {paths: one}", "data: {paths: [0.5, a, 0.5, b]}", "data: {split: '9,1,0'}")
    assert [text for text in texts if not schema.is_valid(yaml.safe_load(text))] == []


def test_the_schema_accepts_a_config_with_every_field(schema):
    schema.validate(yaml.safe_load(dump_config(Config())))


def run(*words):
    return CliRunner().invoke(app, ["config", *words])


def test_the_command_lists_sections_and_describes_fields():
    assert all(f"\n{name} " in f"\n{run().output}" for name in SECTIONS)
    assert run("optim.lr").output == "optim.lr=0.0003    a number above 0\n    Peak learning rate.\n"
    both = run("faults", "log.interval").output
    assert both == described("faults") + "\n" + described("log.interval")
    assert both.count("faults.") == len(SECTIONS["faults"].model_fields)
    assert "leaves all weights as they are" in " ".join(both.split())
    assert run("--schema").output == json_schema()
    assert run("--reference").output == reference_page()


def test_an_unknown_name_suggests_the_nearest_one():
    with pytest.raises(ConfigError, match=r"unknown field optim\.lrr; did you mean optim\.lr\?"):
        described("optim.lrr")
    with pytest.raises(ConfigError, match=r"unknown section optm; did you mean optim\?"):
        described("optm")


def test_two_kinds_of_output_at_once_are_an_error():
    result = run("optim", "--schema")
    assert result.exit_code != 0
    assert "give names, --schema or --reference" in str(result.exception)


@pytest.mark.parametrize("command", ["pretrain", "submit", "doctor"])
def test_the_help_of_a_command_that_takes_fields_lists_the_sections(command):
    text = " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())
    assert "`megatron-lite config SECTION` describes the fields" in text
    assert "optim AdamW with warmup and decay" in text


def test_the_help_of_other_commands_has_no_sections():
    assert "SECTION` describes" not in CliRunner().invoke(app, ["inspect", "--help"]).output
