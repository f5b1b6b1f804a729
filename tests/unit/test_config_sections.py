"""Config sections of a script: read, checked and saved like the built-in ones."""

from typing import Literal

import pytest
from pydantic import NonNegativeFloat

from megatron_lite.config.load import dump_config, load_config
from megatron_lite.config.schema import Config, Section
from megatron_lite.errors import ConfigError
from megatron_lite.training.checkpointing import changes_line


class Penalty(Section):
    """A penalty."""

    weight: NonNegativeFloat = 1e-4
    """Factor."""
    kind: Literal["square", "absolute"] = "square"
    """Form."""


class Mine(Config):
    penalty: Penalty = Penalty()


def test_a_custom_section_is_read_from_file_and_command_line(tmp_path):
    """Its values would otherwise be module constants, which config.yaml does not record."""
    (tmp_path / "c.yaml").write_text("penalty: {weight: 0.5, kind: absolute}\noptim: {lr: 0.1}\n")
    config = load_config(tmp_path / "c.yaml", ["penalty.weight=0.25"], Mine)
    assert (config.penalty.weight, config.penalty.kind, config.optim.lr) == (0.25, "absolute", 0.1)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml", [], Mine) == config


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
