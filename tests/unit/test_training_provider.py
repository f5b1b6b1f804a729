"""Names of model providers, under which another command can import them."""

import pickle
import runpy
import sys
from functools import partial

import pytest
import torch
from torch import nn

from megatron_lite.errors import ConfigError
from megatron_lite.model.build import get_model, param_table
from megatron_lite.mpu import groups
from megatron_lite.named_functions import NamedFunction
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import Shard
from megatron_lite.training.provider import build_chunks, function_name
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


def marked(shape: tuple[int, ...], **attributes: object) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


class MarkedLayer(nn.Module):
    """Parameters as Megatron-LM's code marks them, on one of two tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        by_row = {"tensor_model_parallel": True, "partition_dim": 1}
        fused = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 3}
        self.qkv, self.dense, self.norm = marked((6, 4), **fused), marked((4, 2), **by_row), marked((4,))
        self.partial = marked((4,), sequence_parallel=True)


def test_parameters_with_megatrons_attributes_get_their_shards():
    """A shard that counts as replicated would be counted twice in the gradient norm, and saved as the full tensor. A
    norm with the gradient of its rank's part of the sequence would become another one on each rank."""
    ctx = ParallelContext.at(Grid(tp=2), 0)
    groups.register(ctx)
    config = tiny_config("gpt", parallel__sequence="true", parallel__tensor=2)

    def provider(pre_process: bool, post_process: bool) -> nn.Module:
        assert pre_process and post_process
        return MarkedLayer()

    (chunk,) = build_chunks(provider, config, ctx, None, torch.float64)  # type: ignore[arg-type]
    groups.unregister()
    table = param_table([chunk])
    assert (table["qkv"].shape, table["qkv"].shard, table["qkv"].decay) == ((12, 4), Shard(0, (4, 4, 4)), True)
    assert (table["dense"].shape, table["dense"].shard) == ((4, 4), Shard(1))
    assert (table["norm"].shape, table["norm"].shard, table["norm"].decay) == ((4,), Shard(), False)
    assert [table[name].sequence_parallel for name in ("norm", "partial")] == [False, True]
    assert chunk.qkv.dtype == torch.float64
