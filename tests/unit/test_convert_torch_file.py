"""Files of torch.save are read as torch reads them, but without running code in them; damage is an error that names it.

tests/unit/test_convert_safe_pickle.py has the pickles that would run code.
"""

import argparse
import os
import signal
import struct
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.convert import megatron
from megatron_lite.convert.megatron_args import args_for
from megatron_lite.convert.safe_pickle import StoredTensor
from megatron_lite.convert.torch_file import TorchFile, _keep
from megatron_lite.errors import CheckpointError
from tests.helpers.limits import PATIENCE
from tests.helpers.model_runs import random_weights, tiny
from tests.helpers.models_in_memory import assert_identical
from tests.helpers.torch_files import DTYPES, FORMATS, save_file, storage_of, tensor_of, tensors_of


@pytest.mark.parametrize("form", FORMATS)
def test_tensors_equal_those_that_torch_saved(tmp_path, form):
    base = torch.randn(6, 8)
    tensors = {str(dtype): (base * 40).to(dtype) for dtype in (*DTYPES, torch.int8, torch.uint8, torch.bool)}
    tensors |= {
        "view": base[2:4],
        "columns": base[:, 1:5],
        "transposed": base.t(),
        "one_row": base[3:4],
        "empty": base[:0],
        "nothing": torch.empty(0, 3),
    }
    content = {"nested": {"in.dots": {**tensors}, "parameter": torch.nn.Parameter(base)}, "list": [1], "text": "x"}
    want = {f"nested.in.dots.{name}": tensor for name, tensor in tensors.items()} | {"nested.parameter": base}
    path = save_file(tmp_path / "a.pt", content, form)
    assert_identical(tensors_of(path), want)
    assert TorchFile(path).content["text"] == "x"


def test_objects_of_classes_are_read_without_their_code(tmp_path):
    namespace = argparse.Namespace(rank=1, nested=argparse.Namespace(deeper=2), dtype=torch.float32)
    state = {
        "args": namespace,
        "rng": np.random.get_state(),
        "cuda": [torch.get_rng_state()],
        "enum": signal.SIGTERM,
        "set": {1, 2},
        "size": torch.Size([2, 3]),
    }
    content = TorchFile(save_file(tmp_path / "a.pt", state)).content
    assert content["args"]["rank"] == 1 and content["args"]["nested"] == {"deeper": 2}
    assert content["size"] == (2, 3) and isinstance(content["cuda"][0], StoredTensor)
    assert type(content["args"]["dtype"]).__name__ == "type" and not isinstance(content["enum"], int)


def archived(path, entries, method=zipfile.ZIP_STORED):
    """A zip archive of these entries."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in {**entries, "a/version": b"3"}.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    "tensor, message",
    [
        ((0, (4,), (1,)), ""),
        ((1, (4,), (1,)), r"a tensor of shape \[4\] is larger than its storage"),
        ((0, (1000000, 4), (0, 1)), "is larger than its storage"),  # a file of a few bytes would fill the memory
        ((0, (-1,), (1,)), "a tensor's shape is not of natural numbers"),
        ((0, (4, 1), (1,)), "a tensor has no storage, or no shape"),
    ],
)
def test_a_tensor_outside_its_storage_is_an_error(tmp_path, tensor, message):
    """The bytes beside it in the file would be read as its values."""
    values = np.arange(4, dtype=np.float32).tobytes()
    path = archived(tmp_path / "a.pt", {"a/data.pkl": tensor_of(storage_of(4), *tensor) + b".", "a/data/0": values})
    if not message:
        assert TorchFile(path).content.tensor.tolist() == [0, 1, 2, 3]
        return
    with pytest.raises(CheckpointError, match=message):
        TorchFile(path)


def test_a_storage_with_two_sizes_has_the_first(tmp_path):
    """torch would enlarge the storage for the second tensor."""
    tensors = [tensor_of(storage_of(numel), 0, (numel,), (1,)) for numel in (2, 4)]
    path = archived(tmp_path / "a.pt", {"a/data.pkl": b"(" + b"".join(tensors) + b"l.", "a/data/0": bytes(16)})
    with pytest.raises(CheckpointError, match=r"a tensor of shape \[4\] is larger than its storage"):
        TorchFile(path)


def test_big_endian_values_are_read(tmp_path):
    content = {"a/data.pkl": tensor_of(storage_of(3), 0, (3,), (1,)) + b".", "a/byteorder": b"big"}
    path = archived(tmp_path / "a.pt", {**content, "a/data/0": np.arange(3, dtype=">f4").tobytes()})
    assert TorchFile(path).content.tensor.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "entries, method, message",
    [
        ({"a/data.pkl": storage_of(4) + b"."}, zipfile.ZIP_STORED, "has 16 bytes, the file has 0"),
        ({"a/data.pkl": storage_of(4) + b".", "a/data/0": bytes(15)}, zipfile.ZIP_STORED, "has 16 bytes, .* has 15"),
        ({"a/data.pkl": storage_of(4) + b".", "a/data/0": bytes(16)}, zipfile.ZIP_DEFLATED, "uncompressed bytes"),
        ({"a/data.pkl": b"N.", "a/byteorder": b"middle"}, zipfile.ZIP_STORED, "Unknown endianness type"),
        ({"a/other": b""}, zipfile.ZIP_STORED, "locating file data.pkl: file not found"),
        ({"a/data.pkl": storage_of(4, "QUInt8Storage") + b"."}, zipfile.ZIP_STORED, "has an unknown dtype"),
        ({"a/data.pkl": storage_of(4, "UntypedStorage") + b"."}, zipfile.ZIP_STORED, "has an unknown dtype"),
        ({"a/data.pkl": storage_of(4, view="I1\n") + b"."}, zipfile.ZIP_STORED, "is not a plain storage"),
        ({"a/data.pkl": b"N.", "a/constants.pkl": b"N."}, zipfile.ZIP_STORED, "is an archive of TorchScript"),
    ],
)
def test_an_archive_that_torch_would_not_write_is_an_error(tmp_path, entries, method, message):
    path = archived(tmp_path / "a.pt", entries, method)
    with pytest.raises(CheckpointError, match=message) as raised:
        TorchFile(path)
    assert str(raised.value).startswith(f"{path}: is damaged, or not a file of torch.save")
    assert str(raised.value).endswith("fetch it again")


def test_torch_cannot_run_a_program_of_torchscript(tmp_path):
    """torch.load passes such an archive to torch.jit.load, which reads no file with this `map_location`."""
    path = archived(tmp_path / "a.pt", {"a/data.pkl": b"N.", "a/constants.pkl": b"N."})
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="map_location should be"):
        torch.load(path, _keep, weights_only=False)


def test_a_record_outside_the_file_is_an_error(tmp_path):
    """The sizes of records in an archive can be wrong."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/version", b"3")
        archive.writestr("a/data.pkl", storage_of(1 << 20) + b".")
        archive.writestr("a/data/0", bytes(16))
        archive.getinfo("a/data/0").file_size = 1 << 22
    with pytest.raises(CheckpointError, match="record a/data/0 is not 4,194,304 uncompressed bytes of the file"):
        TorchFile(path)


def test_an_archive_with_two_directories_is_an_error(tmp_path):
    """zipfile would check one directory, and torch would read the other: a compressed record that fills the memory."""
    first = archived(tmp_path / "first.pt", {"a/data.pkl": b"\x80\x02" + b"N0" * 10000 + b"N."}, zipfile.ZIP_DEFLATED)
    second = archived(tmp_path / "second.pt", {"a/data.pkl": b"N."})
    hidden, shown = first.read_bytes(), second.read_bytes()
    (start,) = struct.unpack_from("<I", hidden, len(hidden) - 6)
    path = tmp_path / "a.pt"
    path.write_bytes(hidden + shown[:-6] + struct.pack("<IH", start, 0))
    with pytest.raises(CheckpointError, match="its directory is not at the end"):
        TorchFile(path)


@pytest.mark.parametrize("form", FORMATS)
def test_storages_with_more_bytes_than_the_file_are_an_error(tmp_path, form):
    """A file of a few bytes would reserve terabytes."""
    if form == "zip":
        path = archived(tmp_path / "a.pt", {"a/data.pkl": storage_of(1 << 40) + b".", "a/data/0": bytes(16)})
    else:
        path = save_file(tmp_path / "a.pt", {"a": torch.ones(4), "b": torch.ones(4)}, form)
        data = path.read_bytes()
        assert data.count(b"K\x04N") == 2  # four elements, and no view
        path.write_bytes(data.replace(b"K\x04N", b"J\x00\x00\x00\x40N"))
    with pytest.raises(CheckpointError, match=r"storage .* bytes, the file has .* for it"):
        TorchFile(path)


def test_a_tar_archive_is_an_error_and_not_extracted(tmp_path, monkeypatch):
    """torch extracts tar archives of its first versions, and would follow a link in them."""
    legacy = save_file(tmp_path / "legacy.pt", {}, "legacy").read_bytes()[:15]  # the magic number, as a file name
    data = BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("x" * len(legacy), "storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    path = tmp_path / "a.pt"
    path.write_bytes(data.getvalue())
    monkeypatch.setattr(tarfile.TarFile, "extract", lambda *args, **kwargs: pytest.fail("torch extracts the archive"))
    with pytest.raises(CheckpointError, match=r"is damaged, or not a file of torch.save"):
        TorchFile(path)


def test_repeated_dicts_and_names_are_errors(tmp_path):
    content: dict = {"model": {}}
    content["model"]["again"] = content
    with pytest.raises(CheckpointError, match="its containers nest more than 100 deep, or repeat each other"):
        tensors_of(save_file(tmp_path / "a.pt", content))
    content = {"model": (shared := {"w": 1}), "again": shared}
    with pytest.raises(CheckpointError, match="the dict again is in the file more than once"):
        tensors_of(save_file(tmp_path / "a.pt", content))
    with pytest.raises(CheckpointError, match=r"has two tensors a.b"):
        tensors_of(save_file(tmp_path / "a.pt", {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}))


def test_every_storage_of_an_old_file_has_values(tmp_path):
    """torch leaves the memory of a storage outside the list of keys uninitialized."""
    path = save_file(tmp_path / "a.pt", {"a": torch.ones(4)}, "legacy")
    keys = path.read_bytes().rindex(b"\x80\x02]")
    path.write_bytes(path.read_bytes()[:keys] + b"\x80\x02].")
    with pytest.raises(CheckpointError, match="the keys of its storages are not those of its tensors"):
        TorchFile(path)


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_is_missing_or_shrinks_is_an_error(tmp_path, form):
    """Reading a mapped file past its end kills the process."""
    with pytest.raises(CheckpointError, match=r"a.pt: cannot be read: No such file"):
        TorchFile(tmp_path / "a.pt")
    path = save_file(tmp_path / "a.pt", {"a": torch.ones(1000)}, form)
    file = TorchFile(path)
    file.check_size()
    os.truncate(path, 900)
    with pytest.raises(CheckpointError, match=r"a.pt: had \d,\d+ bytes and has 900 now"):
        file.check_size()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        file.check_size()


@pytest.fixture(scope="module")
def intact_files(tmp_path_factory):
    """The bytes of checkpoints in each form, and their readers."""
    config = tiny(hidden_size=8, num_heads=2, vocab_size=5, padded_vocab_size=8, max_position_embeddings=3)
    weights = random_weights(config, torch.float16)
    args = args_for(config.model, tensor=1, pipeline=1, iteration=1, dtype=torch.float16)
    place = tmp_path_factory.mktemp("fuzz") / "mp_rank_00"
    place.mkdir()
    content = {"args": args, "checkpoint_version": 3.0, "model": weights, "rng": np.random.get_state()[2:]}
    files = {}
    for form in FORMATS:
        args.padded_vocab_size = args.make_vocab_size_divisible_by = 8
        files[form] = save_file(place / f"{form}.pt", content, form).read_bytes()
    return place, files


def read_everything(place):
    """Read all tensors of a Megatron checkpoint."""
    checkpoint = megatron.read(place.parent, {})
    for name in checkpoint.tensors:
        checkpoint.read(name)


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_a_damaged_checkpoint_is_an_error_or_has_other_values(intact_files, form, data):
    """Flipped bits or truncation must give no traceback and allocate no unlimited memory."""
    place, files = intact_files
    damaged = bytearray(files[form])
    # The structure is in the first and the last bytes, the values between them.
    for _ in range(data.draw(st.integers(0, 3), "flips")):
        near_end = data.draw(st.booleans())
        where = data.draw(st.integers(0, 6000))
        where = len(damaged) - 1 - where if near_end else where
        damaged[where % len(damaged)] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    (place / "model_optim_rng.pt").write_bytes(damaged)
    try:
        read_everything(place)
    except CheckpointError as error:
        assert str(place.parent) in str(error)


def test_the_undamaged_checkpoints_are_read(intact_files):
    place, files = intact_files
    for data in files.values():
        (place / "model_optim_rng.pt").write_bytes(data)
        read_everything(place)


FUZZ = """
import sys
from pathlib import Path
from tests.helpers.torch_files import peak_of, read_damaged_copies
folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
read_damaged_copies(folder, range(first, first + 20))
before = peak_of("VmPeak")
print(read_damaged_copies(folder, range(first, last)))
print(peak_of("VmPeak") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is known on Linux alone")
@pytest.mark.parametrize("first, last", [(0, 400), pytest.param(400, 20_000, marks=pytest.mark.soak)])
def test_a_damaged_file_has_its_tensors_or_is_an_error(tmp_path, first, last):
    """Damage must not crash the process, raise another error, allocate unlimited memory or change tensors."""
    command = [sys.executable, "-c", FUZZ, str(tmp_path), str(first), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    read, grown = map(int, done.stdout.split())
    assert 0.02 * (last - first) < read < 1.5 * (last - first)
    assert grown < 64 << 20
