"""safetensors files: the library reads them, and every byte is checked."""

import errno
import json
import os
import struct
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_lite.checkpoint import tensor_file
from megatron_lite.checkpoint.layout import CHUNK_BYTES, FileInfo, checksum
from megatron_lite.checkpoint.tensor_file import TensorFile, save_errors, write_tensors
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.files import sync_folder
from megatron_lite.parallel.dtypes import SAFETENSORS_DTYPES
from megatron_lite.parallel.waiting import current_wait
from tests.helpers.limits import files_of_at_most

TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.tensor([[1.5, float("nan")], [float("-inf"), -0.0]], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.25, dtype=torch.float64),
    "none": torch.zeros(0, 3),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "parameter": torch.nn.Parameter(torch.arange(7.0)),
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    plain = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*plain)


def test_every_dtype_and_shape_is_read_back_bit_for_bit(tmp_path):
    """Also by the safetensors library, so that other programs can open the files."""
    tensors = TENSORS | {name: torch.tensor([1, 0, 1]).to(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    path = tmp_path / "a.safetensors"
    info = write_tensors(path, tensors)
    ours, theirs = TensorFile(path, info).get_all(), load_file(path)
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(ours[name], tensor) and same_bits(theirs[name], tensor), name
    assert info.bytes == path.stat().st_size


def test_a_file_larger_than_its_flushes_is_complete(tmp_path, monkeypatch):
    """Chunks and background flushes must not lose or reorder bytes."""
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(tensor_file, "FLUSH_BYTES", 3000)
    synced, sizes = [], []
    real = os.fsync

    def fsync(descriptor):
        synced.append(threading.current_thread())
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    tensors = {str(n): torch.randn(n * 1001) for n in range(1, 12)}
    path = tmp_path / "a.safetensors"
    info = write_tensors(path, tensors)
    assert all(same_bits(TensorFile(path, info).get(name), tensor) for name, tensor in tensors.items())
    assert threading.main_thread() in synced and len(set(synced)) == 2
    assert sizes[-1] == info.bytes  # the disk has what is still in the file's buffer too


def test_an_error_of_a_background_flush_is_raised(tmp_path, monkeypatch):
    """An error lost with its thread would make the checkpoint look complete."""
    monkeypatch.setattr(tensor_file, "FLUSH_BYTES", 1000)

    def fail(descriptor):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="writing failed: Input/output error"):
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(4000)})


def test_a_read_error_of_the_disk_is_damage_and_a_lost_connection_is_not(tmp_path, monkeypatch):
    """After damage, a run resumes from the checkpoint before."""
    path = tmp_path / "a.safetensors"
    file = TensorFile(path, write_tensors(path, {"a": torch.zeros(10)}))
    for number, kind in ((errno.EIO, DamagedCheckpoint), (errno.ESTALE, CheckpointError)):

        def fail(*arguments, number=number, **options):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(tensor_file, "open_file", fail)
        with pytest.raises(CheckpointError, match=f"a.safetensors: cannot be read: {os.strerror(number)}") as caught:
            file.get("a")
        assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is listed in layout.json but missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 672 bytes, layout.json lists 673"),
        (lambda path: path.write_bytes(b""), "has 0 bytes, layout.json lists"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 674 bytes, layout.json lists 673"),
        (lambda path: flip(path, 20), "its header does not have the checksum in layout.json"),
        (lambda path: flip(path, 0), "its header does not have the checksum in layout.json"),
        (
            lambda path: flip(path, -1),
            "tensor bytes has checksum [0-9a-f]{8} from byte 0, not [0-9a-f]{8}",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read|bytes, layout.json lists"),
    ],
)
def test_the_error_of_a_damaged_file_names_the_path_and_the_remedy(tmp_path, damage, message):
    path = tmp_path / "a.safetensors"
    info = write_tensors(path, TENSORS)
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        TensorFile(path, info).get_all()
    assert str(caught.value).startswith(str(path)) and "write the iteration of another checkpoint" in str(caught.value)


def test_reading_a_slice_checks_only_the_chunks_of_that_slice(tmp_path, monkeypatch):
    """Otherwise each of many ranks would read the full tensor to use a small slice."""
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    path, values = tmp_path / "a.safetensors", torch.arange(100.0)
    info = write_tensors(path, {"a": values})
    assert len(TensorFile(path, info).checksums("a")) == 7
    flip(path, -1)
    flip(path, info.bytes - 400 + 70)
    file = TensorFile(path, info)
    assert torch.equal(file.read("a", 100, 0, 16), values[:16])
    assert torch.equal(file.read("a", 100, 37, 96), values[37:96])
    for start, end, place in ((15, 17, 64), (96, 97, 384)):
        with pytest.raises(DamagedCheckpoint, match=f"tensor a has checksum .* from byte {place}, "):
            file.read("a", 100, start, end)
    with pytest.raises(DamagedCheckpoint, match=r"tensor a has 100 elements, layout\.json lists 99. Restore a copy"):
        file.read("a", 99, 0, 1)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"null", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b'{"b": {}}', b"\xff", b"[" * 100_000]
    + [
        json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
        for dtype, shape, offsets in [
            ("F8", [2], [0, 8]),
            ("F32", [3], [0, 8]),
            ("F32", [-1, 2, 0], [0, 8]),
            ("F32", "x", [0, 8]),
            ("F32", [2], [0]),
            ("F32", [2], [-4, 4]),
            ("F32", [2], [0, 1 << 40]),
            ("F32", [2], [8, 0]),
            ("F32", [2], ["0", "8"]),
            ("F64", [500_000], [0, 4_000_000]),
        ]
    ],
)
def test_a_wrong_header_with_a_correct_checksum_is_damage(tmp_path, header):
    """A forged header must give no other error and no values from outside of the file."""
    path = tmp_path / "a.safetensors"
    full_header = struct.pack("<Q", len(header)) + header
    path.write_bytes(full_header + bytes(8))
    info = FileInfo(bytes=len(full_header) + 8, header_crc32=checksum(full_header), crc32={"a": (checksum(bytes(8)),)})
    with pytest.raises(DamagedCheckpoint, match=r"header and layout\.json differ"):
        TensorFile(path, info).get("a")


def flip(path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 64
    path.write_bytes(data)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10_000), value=st.integers(1, 255), truncate=st.booleans())
def test_any_damage_to_the_file_is_an_error(tmp_path_factory, place, value, truncate):
    """Any changed byte and any truncation give a CheckpointError."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    info = write_tensors(path, TENSORS)
    data = bytearray(path.read_bytes())
    place %= len(data)
    if truncate:
        del data[place:]
    else:
        data[place] ^= value
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        TensorFile(path, info).get_all()


def test_a_failed_write_to_the_disk_is_an_error(tmp_path):
    """The limit on file sizes makes a large write fail in the middle."""
    message = r"a.safetensors: writing failed: File too large"
    with files_of_at_most(1 << 20), pytest.raises(CheckpointError, match=message):
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1 << 20)})


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device. Free some space, lower checkpoint.keep, or write to another disk"),
        (errno.EDQUOT, "Disk quota exceeded. Free some of your quota"),
        (errno.EACCES, "Permission denied. Give this user write permission there"),
        (errno.EPERM, "Operation not permitted. Give this user write permission there"),
        (errno.EROFS, "Read-only file system. The file system is read-only; write elsewhere"),
        (errno.ENOENT, "No such file or directory. Every rank must see the same run.dir"),
        (errno.EIO, "Input/output error. Check the disk, or write to another one"),
    ],
)
def test_errors_of_the_system_name_the_remedy(tmp_path, number, advice):
    with pytest.raises(CheckpointError, match=advice) as caught, save_errors("writing", tmp_path):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith(f"{tmp_path}: writing failed: ")


def test_file_systems_that_cannot_sync_folders_are_tolerated(tmp_path, monkeypatch):
    """Some network file systems return EINVAL; other errors are raised."""

    def fail(number):
        def fsync(descriptor):
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_data_starts_at_a_multiple_of_64_bytes(tmp_path):
    """The mapped tensors are then aligned for names of any length."""
    path = tmp_path / "a.safetensors"
    for length in range(1, 70):
        write_tensors(path, {"x" * length: torch.ones(2)})
        with path.open("rb") as file:
            assert (8 + int.from_bytes(file.read(8), "little")) % 64 == 0
        with safe_open(path, framework="pt") as file:
            assert file.get_tensor("x" * length).tolist() == [1, 1]


def test_writing_is_counted_as_progress(tmp_path):
    """Otherwise the watchdog would take a large file on a slow disk for a hang."""
    _, before = current_wait()
    write_tensors(tmp_path / "file", {"a": torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8).view(torch.float32)})
    assert current_wait()[1] >= before + 3
