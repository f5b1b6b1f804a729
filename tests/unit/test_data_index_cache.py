"""Index arrays on disk: built once, written atomically, and rebuilt when damaged."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data import index_cache
from megatron_lite.data.index_cache import cached_arrays, trust_checksums
from megatron_lite.errors import DataError
from tests.helpers.limits import PATIENCE
from tests.helpers.unprivileged import open_folder, run_unprivileged

DIMS = {"a": 1, "b": 2}


class Builder:
    """Builds two arrays and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"a": np.arange(1000, dtype=np.uint32), "b": np.arange(6, dtype=np.int32).reshape(3, 2)}


def test_arrays_are_built_once_and_then_mapped(tmp_path):
    build = Builder()
    for _ in range(2):
        arrays = cached_arrays(tmp_path / "new" / "folder", "x", {"seed": 1}, DIMS, build)
    assert build.calls == 1
    assert isinstance(arrays["a"], np.memmap)
    for name, values in build().items():
        np.testing.assert_array_equal(arrays[name], values)
        assert arrays[name].dtype == values.dtype


def test_another_description_is_another_entry(tmp_path):
    """If seed 2 got the file of seed 1, the seed would do nothing."""
    build = Builder()
    cached_arrays(tmp_path, "x", {"seed": 1}, DIMS, build)
    cached_arrays(tmp_path, "x", {"seed": 2}, DIMS, build)
    assert build.calls == 2


def flip_a_byte(path: Path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path):
    path.write_bytes(b"")


@pytest.mark.parametrize("suffix", ["-a.npy", "-b.npy", ".json"])
@pytest.mark.parametrize("harm", [flip_a_byte, truncate, empty, Path.unlink])
def test_a_damaged_entry_is_rebuilt(tmp_path, suffix, harm):
    """A power failure can cause each of these. Training on them would raise no error."""
    build = Builder()
    cached_arrays(tmp_path, "x", {}, DIMS, build)
    (path,) = tmp_path.glob(f"*{suffix}")
    if suffix == ".json" and harm is flip_a_byte:
        harm = empty  # a flipped byte breaks the syntax or a checksum, as the other cases do
    harm(path)
    arrays = cached_arrays(tmp_path, "x", {}, DIMS, build)
    assert build.calls == 2
    np.testing.assert_array_equal(arrays["a"], np.arange(1000))


def test_trusted_arrays_are_mapped_unread_and_missing_ones_built(tmp_path, monkeypatch):
    """A rank that does not compare the checksums must not need them either, nor fail where its cache is another one."""
    build = Builder()
    cached_arrays(tmp_path, "x", {}, DIMS, build, trust_checksums)
    assert build.calls == 1
    monkeypatch.setattr(index_cache, "zlib", None)
    np.testing.assert_array_equal(cached_arrays(tmp_path, "x", {}, DIMS, build, trust_checksums)["a"], np.arange(1000))
    monkeypatch.undo()
    (path,) = tmp_path.glob("*-a.npy")
    truncate(path)
    np.testing.assert_array_equal(cached_arrays(tmp_path, "x", {}, DIMS, build, trust_checksums)["a"], np.arange(1000))
    assert build.calls == 2


def no_arrays(path: Path):
    path.write_text('{"crc32": {}}')


def no_checksums(path: Path):
    path.write_text('{"crc32": 5}')


def other_array(path: Path, values: np.ndarray):
    """With the right checksum."""
    (index,) = path.parent.glob("*.json")
    content = json.loads(index.read_text())
    content["crc32"]["a"] = zlib.crc32(np.ascontiguousarray(values).data)
    index.write_text(json.dumps(content))
    np.save(path, values, allow_pickle=False)


def pipe(path: Path):
    path.unlink()
    os.mkfifo(path)


FORGED = {
    "no arrays": (".json", no_arrays),
    "no checksums": (".json", no_checksums),
    "a scalar": ("-a.npy", lambda path: other_array(path, np.array(5))),
    "a matrix": ("-a.npy", lambda path: other_array(path, np.zeros((3, 2), dtype=np.int64))),
    "floats": ("-a.npy", lambda path: other_array(path, np.ones(1000))),
    "strings": ("-a.npy", lambda path: other_array(path, np.array(["a"] * 1000))),
    "bytes": ("-a.npy", lambda path: other_array(path, np.zeros(1000, dtype="V3"))),
    "a pipe": ("-a.npy", pipe),
    "a pipe as index": (".json", pipe),
}


@pytest.mark.parametrize("case", FORGED)
def test_an_entry_that_others_forged_is_rebuilt(tmp_path, case):
    """A corpus of others comes with the cache/ beside it; its checksums prove nothing."""
    suffix, forge = FORGED[case]
    build = Builder()
    cached_arrays(tmp_path, "x", {}, DIMS, build)
    (path,) = tmp_path.glob(f"*{suffix}")
    forge(path)
    if path.is_fifo():
        with pytest.raises(DataError, match=r"cannot be written .*data\.cache_dir"):
            cached_arrays(tmp_path, "x", {}, DIMS, build)
        path.unlink()
    np.testing.assert_array_equal(cached_arrays(tmp_path, "x", {}, DIMS, build)["a"], np.arange(1000))


def test_a_pipe_in_place_of_the_lock_is_not_waited_for(tmp_path):
    cached_arrays(tmp_path, "x", {}, DIMS, Builder())
    for path in tmp_path.iterdir():
        pipe(path) if path.suffix == ".lock" else path.unlink()
    with pytest.raises(DataError, match=r"cannot be written .*data\.cache_dir"):
        cached_arrays(tmp_path, "x", {}, DIMS, Builder())


RACE = """
import sys, time, numpy as np
from megatron_lite.data.index_cache import cached_arrays
def build():
    with open(sys.argv[1] + "/builds", "a") as file:
        file.write("x")
    time.sleep(0.3)
    return {"a": np.arange(100000)}
assert cached_arrays(sys.argv[1], "x", {}, {"a": 1}, build)["a"].sum() == 4999950000
"""


def test_processes_that_start_at_once_build_the_arrays_once(tmp_path):
    """All ranks of a machine open the data at the same time."""
    processes = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(timeout=PATIENCE) for process in processes] == [0] * 4
    assert (tmp_path / "builds").read_text() == "x"
    assert not list(tmp_path.glob(".new-*"))


def test_without_file_locks_the_entry_is_still_correct(tmp_path, monkeypatch):
    """Some network file systems have no locks."""

    def raise_no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", raise_no_locks)
    np.testing.assert_array_equal(cached_arrays(tmp_path, "x", {}, DIMS, Builder())["a"], np.arange(1000))


def test_the_error_of_a_path_below_a_file_names_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/cache: index cannot be written .*set data.cache_dir"):
        cached_arrays(tmp_path / "file" / "cache", "x", {}, DIMS, Builder())


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_the_error_of_a_folder_without_write_permission_names_it(mode):
    """The usual cause: another user owns the corpus, and the default cache is beside it."""
    with open_folder() as folder:
        (folder / "closed").mkdir(mode=mode)
        done = run_unprivileged(
            "import numpy\nfrom megatron_lite.data.index_cache import cached_arrays",
            f"cached_arrays('{folder}/closed/cache', 'x', {{}}, {{'a': 1}}, lambda: {{'a': numpy.arange(9)}})",
        )
    assert done.stdout == (
        f"DataError: {folder}/closed/cache: index cannot be written (Permission denied); set "
        "data.cache_dir to another folder\n"
    ), done.stderr


def test_a_full_disk_leaves_no_entry_behind(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match="No space left on device"):
        cached_arrays(tmp_path, "x", {}, DIMS, Builder())
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
