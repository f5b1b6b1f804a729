"""Every config field has a description, and the files that are generated from the fields are current."""

from pathlib import Path

from megatron_lite.cli.config import json_schema, reference_page
from megatron_lite.config.load import FIELDS

ROOT = Path(__file__).resolve().parents[2]


def test_every_field_has_a_description_of_one_or_two_sentences():
    """The description is the only text about a field, for --help, the editor and the reference.

    Write a text of 3 to 30 words, which ends with a full stop, under the field in `config/schema.py`.
    """
    texts = {name: (field.description or "").split() for name, field in FIELDS.items()}
    assert [name for name, words in texts.items() if not 3 <= len(words) <= 30] == []
    assert [name for name, words in texts.items() if not words[-1].endswith(".")] == []


def test_the_reference_page_and_the_schema_of_the_repository_are_current():
    """A stale page would describe defaults that no run has."""
    wanted = {"docs/configuration.md": reference_page(), "configs/schema.json": json_schema()}
    options = {"docs/configuration.md": "--reference", "configs/schema.json": "--schema"}
    stale = [name for name, text in wanted.items() if (ROOT / name).read_text(encoding="utf-8") != text]
    assert [f"run megatron-lite config {options[name]} > {name}" for name in stale] == []
