"""torch's files: read as torch reads them, but without running what is in them, and without their size in memory."""

import argparse
import os
import pickle
import signal
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.convert import codegeex, megatron, safe_pickle, torch_file
from megatron_lite.convert.megatron_args import args_for
from megatron_lite.convert.safe_pickle import StoredTensor
from megatron_lite.convert.torch_file import TorchFile, flatten
from megatron_lite.errors import CheckpointError
from tests.helpers.model_runs import random_weights, tiny
from tests.helpers.models_in_memory import assert_identical

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
FORMATS = {"zip": True, "legacy": False}


def saved(path, content, form="zip"):
    torch.save(content, path, _use_new_zipfile_serialization=FORMATS[form])
    return path


def tensors_of(path):
    """Every tensor of the file, read."""
    file = TorchFile(path)
    read = {}
    for name, tensor in flatten(file.content, path).items():
        read[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        file.fill(read[name], tensor)
    return read


@pytest.mark.parametrize("form", FORMATS)
def test_tensors_are_those_that_torch_saved(tmp_path, form):
    base = torch.randn(6, 8)
    tensors = {str(dtype): (base * 40).to(dtype) for dtype in (*DTYPES, torch.int8, torch.uint8, torch.bool)}
    tensors |= {
        "view": base[2:4],
        "columns": base[:, 1:5],
        "transposed": base.t(),
        "one_row": base[3:4],
        "empty": base[:0],
    }
    content = {"nested": {"in.dots": {**tensors}, "parameter": torch.nn.Parameter(base)}, "list": [1], "text": "x"}
    want = {f"nested.in.dots.{name}": tensor for name, tensor in tensors.items()} | {"nested.parameter": base}
    path = saved(tmp_path / "a.pt", content, form)
    assert_identical(tensors_of(path), want)
    assert TorchFile(path).content["text"] == "x"


@pytest.mark.parametrize("form", FORMATS)
def test_large_tensors_are_read_in_runs(tmp_path, monkeypatch, form):
    """A run that is put into the wrong place, or left out."""
    monkeypatch.setattr(torch_file, "CHUNK_BYTES", 100)
    tensors = {"a": torch.randn(7, 9), "b": torch.randn(301), "wide": torch.randn(2, 3, 50)}
    path = saved(tmp_path / "a.pt", tensors, form)
    assert_identical(tensors_of(path), tensors)
    file = TorchFile(path)
    for name, tensor in tensors.items():
        wider = torch.empty(tensor.shape, dtype=torch.float64)
        beside = torch.empty((*tensor.shape[:-1], tensor.shape[-1] + 1))[..., 1:]
        for target in (wider, beside):
            file.fill(target, file.content[name])
            assert torch.equal(target.float(), tensor)
    stored = file.content["a"]
    assert file.equals(stored, tensors["a"]) and not file.equals(stored, tensors["a"] + torch.eye(7, 9)[6:] * 0.1)


def test_what_is_not_a_tensor_or_plain_is_read_without_its_code(tmp_path):
    class_of_megatron = argparse.Namespace(rank=1, nested=argparse.Namespace(deeper=2), dtype=torch.float32)
    state = {
        "args": class_of_megatron,
        "rng": np.random.get_state(),
        "cuda": [torch.get_rng_state()],
        "enum": signal.SIGTERM,
        "set": {1, 2},
        "size": torch.Size([2, 3]),
    }
    content = TorchFile(saved(tmp_path / "a.pt", state)).content
    assert content["args"]["rank"] == 1 and content["args"]["nested"] == {"deeper": 2}
    assert content["size"] == (2, 3) and isinstance(content["cuda"][0], StoredTensor)
    assert type(content["args"]["dtype"]).__name__ == "type" and not isinstance(content["enum"], int)


class Calls:
    """Pickles as a call of the function."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args, state) if state is not None else (function, args)

    def __reduce__(self):
        return self.reduced


class Setter:
    """Has slots, and a state that would set them."""

    __slots__ = ("value",)


def touch(path):
    Path(path).touch()


def hostile_pickles(marker):
    """What would create the marker if pickle had its way."""
    command = f"import pathlib; pathlib.Path({marker!r}).touch()"
    protocol_2 = {
        "system": Calls(os.system, f"touch {marker}"),
        "eval": Calls(eval, f"__import__('pathlib').Path({marker!r}).touch()"),
        "exec": Calls(exec, command),
        "own function": Calls(touch, marker),
        "load from bytes": Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(exec, command))),
        "state of an object": Calls(Setter, state=(None, {"value": Calls(exec, command)})),
    }
    made = {name: pickle.dumps({"model": {"w": value}}, protocol=2) for name, value in protocol_2.items()}
    made["getattr chain"] = (
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(S'touch " + marker.encode() + b"'\ntR."
    )
    made["old instruction for an instance"] = f"(S'touch {marker}'\nios\nsystem\n.".encode()
    made["old instruction for an object"] = f"(cos\nsystem\nS'touch {marker}'\no.".encode()
    made["module that is imported"] = b"chostile_module\nthing\n."
    made["state of a function"] = b"ctorch._utils\n_rebuild_tensor_v2\n}S'__doc__'\nS'changed'\nsb."
    made["state of a class"] = b"cargparse\nNamespace\n(N}S'__doc__'\nS'changed'\nstb."
    made["extension"] = b"\x80\x02\x82\x01."
    return made


def with_pickle(path, data, form):
    """A file of torch whose content is this pickle."""
    if form == "legacy":
        head = pickle.dumps(torch.serialization.MAGIC_NUMBER, 2) + pickle.dumps(1001, 2)
        head += pickle.dumps({"little_endian": True}, 2)
        path.write_bytes(head + data + pickle.dumps([], 2))
        return path
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return path


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", hostile_pickles("x"))
def test_nothing_in_a_file_runs(tmp_path, monkeypatch, name, form):
    """A checkpoint from somewhere must not be able to do anything to who reads it."""
    marker = tmp_path / "marker"
    (tmp_path / "hostile_module.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = hostile_pickles(str(marker))[name]
    path = with_pickle(tmp_path / "a.pt", data, form)
    try:
        content = TorchFile(path).content
        assert not flatten(content, path)
    except CheckpointError as error:
        assert "is damaged, or no file of torch.save" in str(error)
    with pytest.raises(CheckpointError):
        codegeex.read(path, {})
    assert not codegeex.recognise(path)
    assert not marker.exists() and "hostile_module" not in sys.modules
    assert argparse.Namespace.__doc__ != "changed"


def test_the_hostile_pickles_are_hostile(tmp_path):
    """They do what they say where pickle has its way, or the test above would show nothing."""
    marker = tmp_path / "marker"
    for name in ("system", "eval", "exec", "getattr chain", "own function", "old instruction for an instance"):
        pickle.loads(hostile_pickles(str(marker))[name])
        assert marker.exists(), name
        marker.unlink()


@pytest.mark.parametrize(
    "data, message",
    [
        (b"\x80\x02cos\nsystem\n)R)R.", "'Inert' object is not callable"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}S'a'\nI1\nsb.", "it would change a function"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "KeyError: 150"),  # asks for a terabyte
        (b"\x80\x02\x8b\x01\x00\x00\x00\x07.", "KeyError: 139"),  # an integer of any size
        (b"\x80\x02r\xff\xff\xff\xff.", "IndexError"),  # for four billion places
        (b"ctorch._utils\n_rebuild_tensor_v2\n(NI0\n(I2\nt(I1\ntI00\nNtR.", "a tensor's description is no such"),
        (b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI-1\ntQ.", "is not a plain storage"),
        (b"", "EOFError"),
    ],
)
def test_a_pickle_that_goes_wrong_is_a_damaged_file(tmp_path, data, message):
    path = with_pickle(tmp_path / "a.pt", data, "zip")
    with pytest.raises(CheckpointError, match=message):
        TorchFile(path)


def storage_of(numel, kind="FloatStorage", view="", key="0"):
    """A persistent id of a storage, in pickle's oldest protocol with a binary instruction."""
    return f"(S'storage'\nctorch\n{kind}\nS'{key}'\nS'cpu'\nI{numel}\n{view}tQ".encode()


@pytest.mark.parametrize(
    "tensor, message",
    [
        ((0, (4,), (1,)), ""),
        ((1, (4,), (1,)), r"a tensor of shape \[4\] is larger than its storage"),
        ((0, (1000000, 4), (0, 1)), "is larger than its storage"),  # a file of a few bytes would fill the memory
        ((0, (-1,), (1,)), "a tensor's description is no such"),
        ((0, (4, 1), (1,)), "zip"),
    ],
)
def test_a_tensor_must_lie_in_its_storage(tmp_path, tensor, message):
    """Or what is beside it in the file would be read for its numbers."""
    offset, shape, stride = tensor

    def tuple_of(numbers):
        return b"(" + b"".join(f"I{number}\n".encode() for number in numbers) + b"t"

    data = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage_of(4) + f"I{offset}\n".encode()
    data += tuple_of(shape) + tuple_of(stride) + b"I00\nNtR."
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/data/0", np.arange(4, dtype=np.float32).tobytes())
    if not message:
        target = torch.empty(4)
        TorchFile(path).fill(target, TorchFile(path).content)
        assert target.tolist() == [0, 1, 2, 3]
        return
    with pytest.raises(CheckpointError, match=message):
        TorchFile(path)


@pytest.mark.parametrize(
    "entries, method, message",
    [
        ({"a/data.pkl": storage_of(4) + b"."}, zipfile.ZIP_STORED, "KeyError: 'a/data/0'"),
        ({"a/data.pkl": storage_of(4) + b".", "a/data/0": bytes(15)}, zipfile.ZIP_STORED, "is not 16 plain bytes"),
        ({"a/data.pkl": storage_of(4) + b".", "a/data/0": bytes(16)}, zipfile.ZIP_DEFLATED, "plain bytes"),
        ({"a/data.pkl": b"N.", "a/byteorder": b"big"}, zipfile.ZIP_STORED, "its numbers are big-endian"),
        ({"a/other": b""}, zipfile.ZIP_STORED, "StopIteration"),
        ({"a/data.pkl": storage_of(4, "QUInt8Storage") + b"."}, zipfile.ZIP_STORED, "has an unknown number format"),
        ({"a/data.pkl": storage_of(4, view="I1\n") + b"."}, zipfile.ZIP_STORED, "is not a plain storage"),
    ],
)
def test_an_archive_that_is_not_as_torch_writes_it_is_said(tmp_path, entries, method, message):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match=message):
        TorchFile(path)


def test_a_record_must_lie_in_the_file(tmp_path):
    """What the archive says of its records' sizes is as little to be trusted as all else."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", storage_of(1 << 20) + b".")
        archive.writestr("a/data/0", bytes(16))
        archive.getinfo("a/data/0").file_size = 1 << 22
    with pytest.raises(CheckpointError, match="record data/0 reaches past the end of the file"):
        TorchFile(path)


def test_dicts_in_themselves_are_refused(tmp_path):
    content: dict = {"model": {}}
    content["model"]["again"] = content
    with pytest.raises(CheckpointError, match="its containers nest more than 100 deep, or repeat each other"):
        tensors_of(saved(tmp_path / "a.pt", content))
    content = {"model": (shared := {"w": 1}), "again": shared}
    with pytest.raises(CheckpointError, match="is a dict that is elsewhere in it too"):
        tensors_of(saved(tmp_path / "a.pt", content))
    with pytest.raises(CheckpointError, match=r"has two tensors a.b"):
        tensors_of(saved(tmp_path / "a.pt", {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}))


def doubled(times: int, container: type) -> Any:
    """A few bytes of pickle whose hash, comparison or text takes 2 ** times steps."""
    found = container()
    for _ in range(times):
        found = container((found, found))
    return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: {doubled(16, tuple): 1}, "a key of a dict is a tuple of tuples"),
        (lambda: {"args": {((1, 2), 3): 1}}, "a key of a dict is a tuple of tuples"),
        (lambda: Calls(OrderedDict, [(doubled(16, tuple), 1)]), "a key of a dict is a tuple of tuples"),
        (lambda: Calls(argparse.Namespace, state={doubled(16, tuple): 1}), "a key of a dict is a tuple of tuples"),
        (lambda: {"iteration": doubled(16, tuple)}, "its containers nest more than 100 deep, or repeat each other"),
        (lambda: {"args": {"x": doubled(16, list)}}, "its containers nest more than 100 deep, or repeat each other"),
        (lambda: doubled(101, lambda pair=(): list(pair[:1])), "its containers nest more than 100 deep"),
    ],
)
def test_a_small_file_that_would_take_forever_is_refused(tmp_path, monkeypatch, make, message, form):
    """A hash of nested tuples, or a message with nested lists in it, would keep the command busy for days."""
    monkeypatch.setattr(safe_pickle, "MAX_ITEMS", 1 << 15)
    path = with_pickle(tmp_path / "a.pt", pickle.dumps(make(), protocol=2), form)
    with pytest.raises(CheckpointError, match=message):
        TorchFile(path)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_keys_and_sets_that_torch_files_have_are_read(tmp_path, protocol):
    """Megatron-LM's distributed optimizer has tuples of dtypes as keys; newer protocols have sets of their own."""
    content = {None: 1, 2: "a", ("x", 3): {True: 0.5}, "sets": [{1, 2}, frozenset({(1, (2, 3))})]}
    found = TorchFile(with_pickle(tmp_path / "a.pt", pickle.dumps(content, protocol), "zip")).content
    assert len(found.pop("sets")) == 2
    assert found == {None: 1, 2: "a", ("x", 3): {True: 0.5}}


def test_the_key_of_a_storage_is_a_string(tmp_path):
    """Of what else it could be, the message or the hash would take forever."""
    nested = pickle.dumps(doubled(30, tuple), protocol=2)[2:-1]
    data = b"(S'storage'\nctorch\nFloatStorage\n" + nested + b"S'cpu'\nI1\ntQ."
    with pytest.raises(CheckpointError, match="a storage has no name"):
        TorchFile(with_pickle(tmp_path / "a.pt", data, "zip"))
    legacy = with_pickle(tmp_path / "b.pt", pickle.dumps({}, 2), "legacy")
    legacy.write_bytes(legacy.read_bytes().removesuffix(pickle.dumps([], 2)) + pickle.dumps([1], 2))
    with pytest.raises(CheckpointError, match="the key of a storage is not a string"):
        TorchFile(legacy)


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_is_missing_or_shrinks_is_said(tmp_path, form):
    with pytest.raises(CheckpointError, match=r"a.pt: cannot be read: No such file"):
        TorchFile(tmp_path / "a.pt")
    path = saved(tmp_path / "a.pt", {"a": torch.ones(1000)}, form)
    file = TorchFile(path)
    os.truncate(path, 900)
    with pytest.raises(CheckpointError, match=r"cannot be read: it ends .* bytes early; it changed while it was read"):
        file.fill(torch.empty(1000), file.content["a"])
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        file.fill(torch.empty(1000), file.content["a"])


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    """The bytes of checkpoints in each form, and how each is read."""
    config = tiny(hidden_size=8, num_heads=2, vocab_size=5, padded_vocab_size=8, max_position_embeddings=3)
    weights = random_weights(config, torch.float16)
    args = args_for(config.model, tensor=1, pipeline=1, iteration=1, dtype=torch.float16)
    place = tmp_path_factory.mktemp("fuzz") / "mp_rank_00"
    place.mkdir()
    content = {"args": args, "checkpoint_version": 3.0, "model": weights, "rng": np.random.get_state()[2:]}
    files = {}
    for form in FORMATS:
        args.padded_vocab_size = args.make_vocab_size_divisible_by = 8
        files[form] = saved(place / f"{form}.pt", content, form).read_bytes()
    return place, files


def read_everything(place):
    """All of a Megatron checkpoint."""
    checkpoint = megatron.read(place.parent, {})
    for name in checkpoint.tensors:
        checkpoint.read(name)


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_any_damage_is_an_error_of_the_checkpoint_or_other_numbers(whole_files, form, data):
    """A traceback, or endless memory, where bits have flipped or a copy was cut off."""
    place, files = whole_files
    spoilt = bytearray(files[form])
    # Where the structure is, not the numbers: the first and the last bytes, and pickled names.
    for _ in range(data.draw(st.integers(0, 3), "flips")):
        near_end = data.draw(st.booleans())
        where = data.draw(st.integers(0, 6000))
        where = len(spoilt) - 1 - where if near_end else where
        spoilt[where % len(spoilt)] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        spoilt = spoilt[: data.draw(st.integers(0, len(spoilt)))]
    (place / "model_optim_rng.pt").write_bytes(spoilt)
    try:
        read_everything(place)
    except CheckpointError as error:
        assert str(place.parent) in str(error)


def test_the_whole_file_of_the_test_above_is_read(whole_files):
    place, files = whole_files
    for data in files.values():
        (place / "model_optim_rng.pt").write_bytes(data)
        read_everything(place)
