"""Names of model providers, under which another command can import them."""

import pickle
import runpy
import sys
from functools import partial

import pytest

from megatron_lite.errors import ConfigError
from megatron_lite.model.build import get_model
from megatron_lite.training.provider import NamedFunction, function_name
from tests.helpers.tiny import tiny_config


class CallableProvider:
    """A provider that is an object."""

    def __call__(self, *args, **options):
        return []


def test_the_built_in_model_is_recorded_without_a_name():
    """Otherwise every checkpoint of get_model would need --model. Given by name, get_model loads any checkpoint."""
    assert function_name(get_model) == ""
    assert function_name(partial(get_model, dtype=None)) == ""
    named = NamedFunction("megatron_lite.model.build:get_model")
    assert named.load() is get_model and function_name(named) == "megatron_lite.model.build:get_model"


def test_a_provider_is_named_by_its_module_or_as_on_the_command_line():
    assert function_name(CallableProvider()) == f"{__name__}:CallableProvider"
    assert function_name(partial(tiny_config, "gpt")) == "tests.helpers.tiny:tiny_config"
    assert NamedFunction(f"{__name__}:CallableProvider.__call__").load() is CallableProvider.__call__


def test_a_script_is_named_by_its_file(tmp_path, monkeypatch, capsys):
    """The path of a file below the current folder is relative, as a user types it."""
    (tmp_path / "project").mkdir()
    (tmp_path / "other").mkdir()
    script = tmp_path / "project" / "mine.py"
    script.write_text(
        "from megatron_lite.training.provider import function_name\n"
        "def build(): pass\n"
        "print(function_name(build), function_name(lambda: 1))\n"
    )
    for folder, name in (("project", "mine.py"), (".", "project/mine.py"), ("other", str(script))):
        monkeypatch.chdir(tmp_path / folder)
        runpy.run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out == f"{name}:build {name}:<lambda>\n"


def test_a_loaded_file_can_import_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "neighbour_of_mine.py").write_text("CHUNKS = ['a chunk']")
    (tmp_path / "folder" / "mine.py").write_text("import neighbour_of_mine as n\ndef build(**o): return n.CHUNKS\n")
    pickled = pickle.dumps(NamedFunction("folder/mine.py:build"))  # a launch pickles it, and each rank loads the file
    assert pickle.loads(pickled)() == ["a chunk"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py", "--model is 'mine.py'; give FILE.py:NAME or module:NAME"),
        ("nowhere.py:build", "--model is nowhere.py:build, but nowhere.py does not exist"),
        ("mine.py:built", "--model is mine.py:built: module .*mine.py' has no attribute 'built'"),
        ("mine.py:CHUNKS", "--model is mine.py:CHUNKS, of type list; give a function like get_model"),
        ("nothing_here:build", "--model is nothing_here:build: No module named 'nothing_here'"),
        (
            "starts.py:build",
            "--model is starts.py:build: its file starts a run while it is imported; put that under if __name__ == ",
        ),
    ],
)
def test_a_name_without_a_provider_is_a_config_error(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text("CHUNKS = []")
    (tmp_path / "starts.py").write_text("from megatron_lite import initialize_megatron\ninitialize_megatron(None)\n")
    with pytest.raises(ConfigError, match=message):
        NamedFunction(name).load()
