"""Ranks unpickle data from each other and nothing that runs code."""

import os
import pickle
from pathlib import Path

import pytest

from megatron_lite.checkpoint.layout import FileInfo
from megatron_lite.errors import DamagedCheckpoint
from megatron_lite.parallel.agreement import unpack
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import Shard
from megatron_lite.pipeline.actions import Action


def unpickled(pickled: bytes):
    return unpack(pickled)


@pytest.mark.parametrize(
    "value",
    [
        ("host", 1.5, None, {"lr": 3e-4, "paths": ["a", 2**70]}, {1}, b"bytes", True),
        (DamagedCheckpoint, "rank 0: damaged"),
        [
            Shard(0, (2, 3)),
            Grid(tp=2, cp=1, dp=1, pp=1),
            FileInfo(bytes=1, header_crc32="0" * 8, crc32={}),
            Action("F", 3),
        ],
        Path("runs/one"),
    ],
)
def test_data_of_ranks_is_unpickled(value):
    assert unpickled(pickle.dumps(value)) == value


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def pickle_of(module: str, name: str) -> bytes:
    """A pickle of `module.name`."""
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93."


@pytest.mark.parametrize(
    "module, name",
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("megatron_lite.launch.submit", "submit_job"),  # a function of this package
        ("megatron_lite.launch.submit", "subprocess.run"),
        ("megatron_lite.launch.agent", "Agent"),  # a class, but not of data
        ("megatron_lite.launch.rendezvous", "_NodeDesc"),  # data, but of another package
        ("pathlib", "os.system"),
        ("megatron_lite.errors", "no_such_name"),
    ],
)
def test_no_other_name_is_unpickled(module, name):
    with pytest.raises(pickle.UnpicklingError) as caught:
        unpickled(pickle_of(module, name))
    assert str(caught.value) == f"{module}.{name} is not a class that ranks send each other"


def test_an_object_that_runs_code_is_an_error(tmp_path):
    """Any process that can connect to the store can send such an object."""
    with pytest.raises(pickle.UnpicklingError):
        unpickled(pickle.dumps(Touch(tmp_path / "taken")))
    assert os.listdir(tmp_path) == []
