"""Planted bugs: small wrong changes of the package, which tests should find.

Each file of `tests/mutants/` is one bug: its sentence, its file, the text to replace and the new text. They are chosen
by their harm to a user, not by what tests find: wrong values without an error, or a lost promise of the documents.
Source: DeMillo, Lipton and Sayward, Hints on Test Data Selection, Computer 11(4), 1978.
"""

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "mutants"
KEYS = {"breaks", "file", "old", "new"}


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    name: str  # of its YAML file
    breaks: str  # one sentence
    file: str  # relative to the checkout
    old: str  # full lines, without the last newline
    new: str


def planted() -> list[Mutant]:
    """All planted bugs, by name. Raises ValueError for a file with other keys than KEYS."""
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def _read(path: Path) -> Mutant:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = set(content) if isinstance(content, dict) else {type(content).__name__}
    if found != KEYS or not all(isinstance(value, str) and value for value in content.values()):
        raise ValueError(f"{path}: has {sorted(map(str, found))}; it needs a text for each of {sorted(KEYS)}")
    return Mutant(path.stem, *(content[key].removesuffix("\n") for key in ("breaks", "file", "old", "new")))


def apply(mutant: Mutant, root: Path) -> int:
    """Plant the bug in the copy of the checkout at `root`; returns the number, from 1, of the first changed line.

    Raises ValueError unless the text to replace occurs once.
    """
    path = root / mutant.file
    text = path.read_text(encoding="utf-8")
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has its old text {count} times; it must have it once")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    pairs = zip(mutant.old.splitlines(), mutant.new.splitlines(), strict=False)
    kept = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return text[: text.index(mutant.old)].count("\n") + 1 + kept
