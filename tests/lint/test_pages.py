"""README.md and the pages of docs/ name keys, files and public names that exist, and all their blocks can be tested."""

import re
from pathlib import Path

import yaml

from megatron_lite.config.load import FIELDS
from megatron_lite.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
DOCS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
ALL = {"README.md": (ROOT / "README.md").read_text(encoding="utf-8"), **DOCS}
EXTENDING = DOCS["docs/extending.md"]  # its blocks are diffs and sessions, which have rules of their own
PAGES = {name: text for name, text in ALL.items() if name != "docs/extending.md"}


def test_no_block_of_a_page_escapes_the_tests_without_a_reason():
    """A block with another name for its language, or an indented one, would never be run."""
    wrong = []
    for name, text in PAGES.items():
        wrong += [(name, block) for block in re.findall(r"^```(?:bash|shell|console|zsh|py)\b.*", text, flags=re.M)]
        wrong += [(name, block) for block in re.findall(r"^ +```(?:sh|python).*", text, flags=re.M)]
        reason = re.compile(r"not (run|compared): \S+ \S+|exit code [1-9]")
        comments = re.findall(r"<!-- (.*?) -->\n+```", text)
        wrong += [(name, comment) for comment in comments if not reason.match(comment)]
    assert wrong == []


def test_the_keys_that_a_page_names_exist():
    """A removed key on a page would mislead readers."""
    sections = "|".join(Config.model_fields)
    named = [
        (name, key)
        for name, text in PAGES.items()
        for key in re.findall(rf"`((?:{sections})\.[a-z0-9_]+)(?=[`:= ])", text)
        if not key.endswith((".onnx", ".py", ".safetensors"))
    ]
    assert len(named) > 100
    assert [(name, key) for name, key in named if key not in FIELDS] == []


def test_the_table_of_flags_names_most_keys():
    """The test of keys would pass for a page without its table."""
    page = DOCS["docs/from-megatron.md"]
    table = page[page.index("| Megatron-LM | megatron_lite |") : page.index("What differs on purpose")]
    assert len(set(re.findall(r"`([a-z]+\.[a-z0-9_]+)", table)) & set(FIELDS)) > 60


def test_the_files_and_pictures_that_a_page_names_exist():
    """A reader would look for them in vain."""
    elsewhere = ("runs/", "data/", "tools/checkpoint/")  # written by commands, or files of Megatron-LM
    missing = []
    for name, text in ALL.items():
        own = (ROOT / name).parent
        files = re.findall(r"`((?:\w+/)+\w+\.(?:py|md|sh|yaml))`", text)
        found = [
            file for file in files if any((folder / file).exists() for folder in (ROOT, ROOT / "megatron_lite", own))
        ]
        missing += [(name, file) for file in files if file not in found and not file.startswith(elsewhere)]
        pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
        missing += [(name, picture) for picture in pictures if not (own / picture).exists()]
    assert missing == []


def test_no_page_has_placeholders():
    lines = [(name, line) for name, text in PAGES.items() for line in text.splitlines()]
    assert [(name, line) for name, line in lines if re.search(r"@@|\bTODO\b|\bTBD\b|\bFIXME\b", line)] == []


def test_every_page_is_in_the_navigation_of_the_site():
    """A page that is not in the navigation is hard to find."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert {f"docs/{file}" for entry in navigation for file in entry.values()} == set(DOCS)


def test_the_page_about_extensions_has_a_recipe_for_each_kind():
    """The test that applies the recipes would pass for a page without them."""
    recipes = re.findall(r"^## (.*)", EXTENDING, flags=re.M)
    assert recipes == ["A model field", "A data-parallel engine", "A pipeline schedule", "A checkpoint format"]
