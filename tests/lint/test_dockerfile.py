"""The Dockerfile, as far as it can be checked without an engine: what it copies, installs from, and runs as."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = "make .venv/.installed-base"


def instructions() -> list[tuple[str, str]]:
    """Every instruction and the rest of its line, without comments, continued lines joined."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", "")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line]


def split_at_install() -> tuple[list[tuple[str, str]], str, list[tuple[str, str]]]:
    """The instructions before the one that installs the dependencies, its command, and those after it."""
    all_of_them = instructions()
    (index,) = [at for at, (name, rest) in enumerate(all_of_them) if name == "RUN" and INSTALL in rest]
    return all_of_them[:index], all_of_them[index][1], all_of_them[index + 1 :]


def copied(part: list[tuple[str, str]]) -> list[tuple[Path, str]]:
    """Every source of a COPY and where it goes, below WORKDIR."""
    pairs = []
    for name, rest in part:
        if name == "COPY":
            *sources, target = rest.split()
            pairs += [(ROOT / source, target + source if target.endswith("/") else target) for source in sources]
    return pairs


def files_below(path: Path) -> list[str]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return [str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts]


def is_left_out(path: str) -> bool:
    """Whether .dockerignore keeps `path` from the builder: a pattern matches it, or a folder that it is in."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        pattern = re.escape(line.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.match(f"{pattern}(/|$)", path):
            ignored = not line.startswith("!")
    return ignored


def lay_out(folder: Path, part: list[tuple[str, str]]) -> None:
    """Does the COPYs as a builder does; all files get the time of now, as in a fresh checkout."""
    for source, target in copied(part):
        if source.is_dir():
            shutil.copytree(source, folder / target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copyfile(source, folder / target)


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")}
    words = ("make", "--no-print-directory", *words)
    return subprocess.run(words, cwd=folder, env=kept, capture_output=True, text=True)


def run_install(folder: Path, device: str) -> subprocess.CompletedProcess[str]:
    """The RUN that installs, with a `make` that prints the index it was given and a Python that does nothing."""
    for stub, script in {"bin/make": 'echo "$PIP_EXTRA_INDEX_URL"; echo "$@"', ".venv/bin/python": "true"}.items():
        (folder / stub).parent.mkdir(parents=True)
        (folder / stub).write_text(f"#!/bin/sh\n{script}\n")
        (folder / stub).chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "DEVICE": device}
    _, command, _ = split_at_install()
    return subprocess.run(["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)


def test_every_file_that_is_copied_exists_and_reaches_the_builder():
    """A pattern such as **/data in .dockerignore would leave out megatron_lite/data, and the build would succeed."""
    files = {str(source): files_below(source) for source, _ in copied(instructions())}
    assert [source for source, found in files.items() if not found] == []  # missing, or empty
    assert [file for found in files.values() for file in found if is_left_out(file)] == []


def test_what_a_checkout_has_beside_the_sources_does_not_reach_the_builder():
    """And the matching above is not one that leaves nothing out."""
    beside = (
        ".git/config",
        ".venv/bin/python",
        "runs/gpt/config.yaml",
        "megatron_lite/data/__pycache__/loader.pyc",
    )
    assert [path for path in beside if not is_left_out(path)] == []


def test_make_installs_from_what_is_copied_and_then_has_nothing_left_to_install(tmp_path):
    """A prerequisite that is not copied breaks the build; one copied again after the installation makes
    `make quickstart` install once more, as a user who may not."""
    before, _, after = split_at_install()
    lay_out(tmp_path, before)
    assert "pip install -q -e . -c constraints.txt" in make(tmp_path, "-n", ".venv/.installed-base").stdout
    hour_ago = (tmp_path / "Makefile").stat().st_mtime - 3600
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(tmp_path / name, (hour_ago, hour_ago))
    (tmp_path / ".venv").mkdir()
    for name in (".made", ".installed-base"):
        (tmp_path / ".venv" / name).touch()
        os.utime(tmp_path / ".venv" / name, (hour_ago, hour_ago))
    lay_out(tmp_path, after)
    assert make(tmp_path, "-n", "quickstart").stdout == ".venv/bin/python tools/quickstart.py\n"
    for name in ("tools/quickstart.py", "configs/quickstart.yaml", "megatron_lite/__main__.py", "launch.sh"):
        assert (tmp_path / name).is_file()


def test_the_package_can_be_installed_before_its_sources_are_copied(tmp_path):
    """Metadata that is read from a source, such as the version, would end the build."""
    before, install, _ = split_at_install()
    assert "mkdir megatron_lite && touch megatron_lite/__init__.py README.md" in install
    lay_out(tmp_path, before)
    (tmp_path / "megatron_lite").mkdir()
    for name in ("megatron_lite/__init__.py", "README.md"):
        (tmp_path / name).touch()
    code = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_editable('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("megatron_lite-")


def test_no_source_is_copied_before_the_dependencies_are_installed():
    """Otherwise every change to a source would download torch again."""
    before, _, _ = split_at_install()
    assert {target for _, target in copied(before)} <= {
        "./Makefile",
        "./pyproject.toml",
        "./constraints.txt",
        "./LICENSE",
        "./NOTICE",
    }


@pytest.mark.parametrize("device, build", [("cpu", "cpu"), ("cuda", r"cu\d+")])
def test_each_device_installs_from_the_index_of_its_torch(tmp_path, device, build):
    done = run_install(tmp_path, device)
    assert done.returncode == 0, done.stderr
    index, target = done.stdout.splitlines()
    assert re.fullmatch(f"https://download.pytorch.org/whl/{build}", index)
    assert f"make {target}" == INSTALL


def test_another_device_ends_the_build_and_the_default_is_cpu(tmp_path):
    done = run_install(tmp_path, "gpu")
    assert (done.returncode, done.stderr) == (2, "DEVICE is 'gpu'; it wants cpu or cuda\n")
    assert ("ARG", "DEVICE=cpu") in split_at_install()[0]


def test_the_pinned_torch_admits_every_build():
    """torch==2.13.0+cpu could not be installed for a GPU, nor from PyPI."""
    pins = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(pins) == 1
    assert re.fullmatch(r"[\d.]+", pins[0])


def test_commands_run_as_a_user_who_may_write_runs_and_nothing_else():
    """As root, a hole in what reads a checkpoint would be one in the machine."""
    done = instructions()
    assert [name for name, _ in done if name in ("USER", "RUN", "COPY")][-1] == "USER"
    user = [rest for name, rest in done if name == "USER"][-1]
    workdir = [rest for name, rest in done if name == "WORKDIR"][-1]
    commands = " ".join(rest for name, rest in done if name == "RUN")
    added = re.search(r"useradd --uid (\d+) .*?(\w+)\s+&&", commands)
    assert added is not None
    assert user in added.groups()
    assert user not in ("0", "root")
    assert f"--owner {added[2]} --group {added[2]} {workdir}/runs" in commands
