"""The recipes of docs/extending.md fit the current sources, and their commands print what the page shows."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import ROOT
from tests.helpers.limits import PATIENCE
from tests.helpers.pages import blocks, commands_from

RECIPES: dict[str, str] = dict(
    re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", (ROOT / "docs" / "extending.md").read_text(), flags=re.M)
)

SHORTEST = "A checkpoint format"  # the others are for `make soak`


def copy_sources(folder: Path) -> None:
    for name in ("megatron_lite", "tests", "configs", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def apply_diff(recipe: str, diff: str, folder: Path) -> None:
    """Apply the diff to the files in `folder`, one file at a time."""
    for part in re.split(r"^(?=--- a/)", diff, flags=re.M)[1:]:
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            input=part,
            cwd=folder,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},  # in a repository it could apply nothing
            capture_output=True,
            text=True,
        )
        name = part.split()[1].removeprefix("a/")
        assert done.returncode == 0, (
            f"docs/extending.md, {recipe!r}: the diff does not fit {name}; write it again ({done.stderr.strip()})"
        )


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name == SHORTEST else pytest.mark.soak) for name in RECIPES]
)
def test_a_recipe_fits_the_sources_and_prints_what_the_page_shows(tmp_path, recipe):
    """Its own tests run too: the field, engine or schedule must train to the weights of one process."""
    copy_sources(tmp_path)
    for source in blocks(RECIPES[recipe], "python"):
        path = tmp_path / source.split()[1]
        assert not path.exists()
        path.write_text(source.partition("\n")[2])
    changes = blocks(RECIPES[recipe], "diff")
    for diff in changes:
        apply_diff(recipe, diff, tmp_path)
    assert "--- a/megatron_lite/" in "".join(changes) and "--- a/tests/" in "".join(changes)
    env = commands_from(tmp_path, tmp_path / "bin")
    (console,) = blocks(RECIPES[recipe], "console")
    commands = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", console, flags=re.M)
    assert any("pytest" in command for command, _ in commands)
    for command, expected in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE
        )
        pattern = re.escape(expected).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, done.stdout), (
            f"docs/extending.md, {recipe!r}: {command}\n{done.stdout}{done.stderr}"
        )


def test_the_error_of_a_diff_that_does_not_fit_names_recipe_and_file(tmp_path):
    """A change of the sources must lead to the line of the page that it makes wrong."""
    (tmp_path / "first.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "second.py").write_text("a = 1\nchanged = 2\n")
    diff = "".join(
        f"--- a/{name}.py\n+++ b/{name}.py\n@@ -1,2 +1,2 @@\n a = 1\n-b = 2\n+b = 3\n" for name in ("first", "second")
    )
    with pytest.raises(
        AssertionError, match=r"extending.md, 'A field': the diff does not fit second.py; write it again"
    ):
        apply_diff("A field", diff, tmp_path)
    assert (tmp_path / "first.py").read_text() == "a = 1\nb = 3\n"
