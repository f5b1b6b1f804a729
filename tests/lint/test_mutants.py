"""The planted bugs of `tests/mutants/` fit the sources."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.mutants import Mutant, planted

ROOT = Path(__file__).resolve().parents[2]
FEWEST, MOST_LINES = 40, 3


def violations(mutant: Mutant) -> Iterator[str]:
    """What is wrong with a planted bug."""
    breaks = mutant.breaks
    if not breaks[0].isupper() or not breaks.endswith(".") or ". " in breaks or "\n" in breaks:
        yield f"`breaks` is {breaks!r}, not one sentence"
    if not mutant.file.startswith("megatron_lite/") or not (ROOT / mutant.file).is_file():
        yield f"{mutant.file} is not a file of the package"
        return
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    if (count := text.count(mutant.old)) != 1:
        yield f"its old text occurs {count} times in {mutant.file}, not once"
    elif f"\n{mutant.old}\n" not in text:
        yield f"its old text is not full lines of {mutant.file}"
    for name, part in (("old", mutant.old), ("new", mutant.new)):
        if (lines := part.count("\n") + 1) > MOST_LINES:
            yield f"`{name}` has {lines} lines, more than {MOST_LINES}"
    if mutant.new == mutant.old:
        yield "`new` equals `old`"
    changed = text.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        try:
            ast.parse(changed)
        except SyntaxError as error:
            yield f"line {error.lineno} of the result: {error.msg}"
    elif (check := subprocess.run(["sh", "-n"], input=changed, capture_output=True, text=True)).returncode:
        yield f"the result is not a shell script: {check.stderr.strip()}"


def test_every_planted_bug_can_be_planted():
    """A bug that no longer fits its file would count as found, because applying it fails."""
    mutants = planted()
    found = [f"{mutant.name}: {problem}" for mutant in mutants for problem in violations(mutant)]
    if len(mutants) < FEWEST:
        found.append(f"there are {len(mutants)} planted bugs, fewer than {FEWEST}")
    assert not found, "\n".join(found)
