"""Written torch files: torch reads them, and writing keeps one tensor in memory."""

import argparse
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.convert import torch_file
from megatron_lite.convert.torch_file import TorchWriter
from megatron_lite.errors import CheckpointError
from tests.helpers.limits import PATIENCE, files_of_at_most
from tests.helpers.models_in_memory import assert_identical
from tests.helpers.torch_files import DTYPES, tensors_of


def reserved(tensors):
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def test_torch_reads_written_files(tmp_path, monkeypatch):
    """Tensors in any order, other objects beside them, and torch's strictest reader."""
    monkeypatch.setattr(torch_file, "CHUNK_BYTES", 64)
    tensors = {str(dtype): (torch.randn(5, 7) * 40).to(dtype) for dtype in DTYPES}
    path = tmp_path / "ä b.pt"
    with TorchWriter(path, {"model": {"of.it": reserved(tensors)}, "iteration": 3}) as writer:
        for name in reversed(tensors):
            writer.write(f"model.of.it.{name}", tensors[name].t().contiguous().t())
        writer.close()
    for options in ({"mmap": True}, {"mmap": False}):
        content = torch.load(path, weights_only=True, map_location="cpu", **options)
        assert_identical(content["model"]["of.it"], tensors)
        assert content["iteration"] == 3
    assert_identical(tensors_of(path), {f"model.of.it.{name}": tensor for name, tensor in tensors.items()})


def test_a_namespace_is_written_as_megatron_reads_it(tmp_path):
    with TorchWriter(tmp_path / "a.pt", {"args": argparse.Namespace(a=1, dtype=torch.bfloat16)}) as writer:
        writer.close()
    args = torch.load(tmp_path / "a.pt", weights_only=False)["args"]
    assert args == argparse.Namespace(a=1, dtype=torch.bfloat16)


def test_a_missing_tensor_is_an_error(tmp_path):
    with TorchWriter(tmp_path / "a.pt", {"a": torch.empty(3), "b": torch.empty(3)}) as writer:
        writer.write("a", torch.ones(3))
        with pytest.raises(AssertionError, match="1 tensors did not come"):
            writer.close()
        with pytest.raises(AssertionError):
            writer.write("b", torch.ones(4))


def test_a_file_that_cannot_be_created_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no/a.pt: writing failed: No such file or directory"):
        TorchWriter(tmp_path / "no" / "a.pt", {"a": torch.empty(3)})


def test_a_file_that_exceeds_the_size_limit_is_an_error(tmp_path):
    """torch 2.8 raises no error then and leaves a truncated file."""
    message = r"a.pt: writing failed: torch cannot lay out a file of this size"
    with files_of_at_most(1 << 16), pytest.raises(CheckpointError, match=message):
        TorchWriter(tmp_path / "a.pt", {"a": torch.empty(1 << 20)})


def test_a_full_disk_is_an_error(tmp_path):
    class Full:
        def seek(self, where):
            pass

        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self):
            pass

    with TorchWriter(tmp_path / "a.pt", {"a": torch.empty(3)}) as writer:
        writer._file.close()
        writer._file = Full()  # type: ignore[assignment]
        with pytest.raises(CheckpointError, match=r"a.pt: writing failed: No space left on device. Free some space"):
            writer.write("a", torch.ones(3))


MEASURED = """
import sys, threading, torch
from pathlib import Path
from megatron_lite.convert import megatron
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.recipe import Checkpoint, full_table
from megatron_lite.checkpoint.tensor_file import Spec

peak, finished = 0, threading.Event()

def sample():
    global peak
    text = Path("/proc/self/status").read_text()
    peak = max(peak, int(text.split("RssAnon:")[1].split()[0]) << 10)

def watch():
    while not finished.wait(0.0005):
        sample()

model = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, vocab_size=24000, tie_embeddings=False)
table = full_table(model)
model_of_ones = Checkpoint(
    model, {n: Spec(torch.float32, m.shape) for n, m in table.items()}, lambda n: torch.ones(table[n].shape)
)
path = Path(sys.argv[2])
(path / "small").mkdir(parents=True)
small = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=8)
tiny = Checkpoint(small, {n: Spec(torch.float32, m.shape) for n, m in full_table(small).items()},
                  lambda n: torch.ones(full_table(small)[n].shape))
megatron.write(path / "small", tiny, tensor=2, pipeline=1, progress=lambda count: None)
sample()
before = peak
threading.Thread(target=watch, daemon=True).start()
if sys.argv[1] == "write":
    megatron.write(path, model_of_ones, tensor=2, pipeline=1, progress=lambda count: None)
else:
    checkpoint = megatron.read(path, {})
    for name in checkpoint.tensors:
        full = checkpoint.read(name)
        sample()
finished.set()
print(peak - before)
sizes = [torch.Size(m.shape).numel() * 4 for m in table.values()]
print(max(sizes), sum(sizes))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a process measures its memory on Linux alone")
def test_memory_stays_below_twice_the_largest_tensor(tmp_path):
    """A model that is read or built in full needs as much memory as its file has bytes.

    Pages of a mapped file do not count: the system drops them when it needs memory.
    """
    for what in ("write", "read"):
        command = [sys.executable, "-c", MEASURED, what, str(tmp_path / what)]
        if what == "read":
            (tmp_path / "write" / "release").rename(tmp_path / what)
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        peak, largest, total = map(int, done.stdout.split())
        assert total > 3.4 * largest
        assert 0.9 * largest < peak < 2 * largest, what
