"""Config sections of a script: read, checked and saved like the built-in ones."""

from typing import Literal

import pytest
from pydantic import NonNegativeFloat

from megatron_lite.config.load import dump_config, dump_settings, load_config
from megatron_lite.config.schema import Config, Section
from megatron_lite.errors import ConfigError
from megatron_lite.plan.resume_lines import changes_line


class Penalty(Section):
    """A penalty."""

    weight: NonNegativeFloat = 1e-4
    """Factor."""
    kind: Literal["square", "absolute"] = "square"
    """Form."""


class Mine(Config):
    penalty: Penalty = Penalty()


def test_a_custom_section_is_read_from_file_and_command_line(tmp_path):
    """Its values would otherwise be module constants, which the run's files do not record."""
    (tmp_path / "c.yaml").write_text("penalty: {weight: 0.5, kind: absolute}\noptim: {lr: 0.1}\n")
    config = load_config(tmp_path / "c.yaml", ["penalty.weight=0.25"], Mine)
    assert (config.penalty.weight, config.penalty.kind, config.optim.lr) == (0.25, "absolute", 0.1)
    for dump in (dump_config, dump_settings):
        (tmp_path / "again.yaml").write_text(dump(config))
        assert load_config(tmp_path / "again.yaml", [], Mine) == config
    assert "weight: 0.25" in dump_settings(config)


class Named(Section):
    """A section with a field that a script must give."""

    name: str
    """Any."""


class WithNamed(Config):
    penalty: Penalty = Penalty(weight=3.0)
    named: Named


def test_settings_have_a_field_without_a_default_and_one_whose_section_changes_the_default(tmp_path):
    """`load_config` fills fields from the section's class, not from the object in the config's class."""
    config = WithNamed(named=Named(name="a"))
    (tmp_path / "c.yaml").write_text(dump_settings(config))
    assert (tmp_path / "c.yaml").read_text() == "penalty:\n  weight: 3.0\nnamed:\n  name: a\n"
    assert load_config(tmp_path / "c.yaml", [], WithNamed) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("penalty.weight=-1", "penalty.weight is -1; it must be a number of at least 0"),
        ("penalty.kind=cubic", "penalty.kind is 'cubic'; it must be one of square, absolute"),
        ("penalty.weights=1", "unknown field penalty.weights; did you mean penalty.weight?"),
        ("penalties.weight=1", "unknown section penalties in penalties.weight; did you mean penalty.weight?"),
    ],
)
def test_mistakes_in_a_custom_section_are_explained(override, message):
    with pytest.raises(ConfigError) as raised:
        load_config(None, [override], Mine)
    assert str(raised.value) == f"command line: {message}"


def test_a_resumed_run_prints_changes_of_a_custom_section():
    before, after = (load_config(None, [f"penalty.weight={weight}"], Mine) for weight in (0.5, 0.25))
    assert changes_line(before, after) == "changed since that checkpoint: penalty.weight 0.5 -> 0.25"
