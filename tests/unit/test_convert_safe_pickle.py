"""Pickles of untrusted files run no code, take no unlimited time and allocate no unlimited memory."""

import argparse
import copyreg
import os
import pickle
import random
import sys
import zipfile
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.convert import codegeex, safe_pickle
from megatron_lite.convert.torch_file import TorchFile, flatten
from megatron_lite.errors import CheckpointError
from tests.helpers.cases import all_cases
from tests.helpers.torch_files import FORMATS, storage_of, tensor_of

HERE = __name__


class Calls:
    """An object that pickles as a call of a function."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args, state) if state is not None else (function, args)

    def __reduce__(self):
        return self.reduced


class CallsWithNames:
    """An object that pickles as NEWOBJ_EX, a call of a class with keyword arguments."""

    def __new__(cls, *, path=None):
        if path:
            touch(path)
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"path": self.path}


class Setter:
    """An object with slots, and a state that would set them."""

    __slots__ = ("value",)


class TouchesFromState:
    """An object whose `__setstate__` is controlled by the file."""

    def __setstate__(self, state):
        touch(state)


def touch(path):
    """The code that must not run."""
    Path(path).touch()


def pickled(value, protocol=2):
    return pickle.dumps({"model": {"w": value}}, protocol=protocol)


def with_state(state):
    """A pickle that sets the state of an object by BUILD."""
    touches = pickle.dumps(TouchesFromState(), protocol=2)
    return touches[:-1] + pickle.dumps(state, protocol=2)[2:-1] + b"b."


def text(value):
    """A string in pickle's newer protocols."""
    data = value.encode()
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data


def stack_global(module, name):
    """A global name, in which newer protocols follow dots."""
    return text(module) + text(name) + pickle.STACK_GLOBAL


def hostile_pickles(marker):
    """Pickles that create the marker file when pickle loads them."""
    command = f"import pathlib; pathlib.Path({marker!r}).touch()"
    expression = f"__import__('pathlib').Path({marker!r}).touch()"
    with_names = CallsWithNames()
    with_names.path = marker
    # A file that torch.load itself would read.
    inner = Path(f"{marker}.inner.pt")
    inner.write_bytes(with_head(pickle.dumps(Calls(exec, command), protocol=2)))
    one_argument = text(marker) + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP
    one_command = text(f"touch {marker}") + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP
    touch_name = f"c{HERE}\ntouch\n"
    return {
        "system": pickled(Calls(os.system, f"touch {marker}")),
        "eval": pickled(Calls(eval, expression)),
        "exec": pickled(Calls(exec, command)),
        "own function": pickled(Calls(touch, marker)),
        "load from bytes": pickled(Calls(torch.storage._load_from_bytes, inner.read_bytes())),
        "torch.load": pickled(Calls(partial(torch.load, weights_only=False), str(inner))),
        "call in the arguments of a call": pickled(Calls(list, [Calls(dict, [("a", Calls(exec, command))])])),
        "call in a key": pickle.dumps({Calls(exec, command): 1}, protocol=2),
        "state of an object": pickled(Calls(Setter, state=(None, {"value": Calls(exec, command)}))),
        "state that an object sets": with_state(marker),
        "keyword arguments": pickled(with_names, protocol=4),
        "getattr chain": (
            b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(S'touch "
            + marker.encode()
            + b"'\ntR."
        ),
        "INST": f"(S'touch {marker}'\nios\nsystem\n.".encode(),
        "OBJ": f"(cos\nsystem\nS'touch {marker}'\no.".encode(),
        "INST in a dict": f"(S'model'\n(S'{marker}'\ni{HERE}\ntouch\nd.".encode(),
        "OBJ of a class in a list": f"(({touch_name}S'{marker}'\nol.".encode(),
        "name with dots": b"\x80\x04" + stack_global(HERE, "Path.home.__func__.__globals__.get"),
        "function behind dots": b"\x80\x04" + stack_global(HERE, "os.path.os.system") + one_command,
        "allowed module with dots": b"\x80\x04" + stack_global("torch", "os.system") + one_command,
        "storage with dots": b"\x80\x04" + stack_global("torch", "storage.FloatStorage.__init__.__globals__") + b".",
        "extension": b"\x80\x02\x82\xf1" + one_argument,
        "extension of two bytes": b"\x80\x02\x83\xf1\x00" + one_argument,
        "module that is imported": b"chostile_module\nthing\n.",
        "state of a function": b"ctorch._utils\n_rebuild_tensor_v2\n}S'__doc__'\nS'changed'\nsb.",
        "state of a class": b"cargparse\nNamespace\n(N}S'__doc__'\nS'changed'\nstb.",
        "state of a dict class": b"ccollections\nOrderedDict\n}S'__doc__'\nS'changed'\nsb.",
        "state of a tensor": tensor_of(storage_of(0), 0, (0,), (1,)) + b"}S'tensor'\nS'changed'\nsb.",
        "state of a storage type": b"ctorch\nFloatStorage\n}S'_dtype'\nS'changed'\nsb.",
        "source of a module": f"(S'module'\n{touch_name}S'{marker}'\nS'changed'\ntQ.".encode(),
    }


# Those that act as soon as pickle loads them.
ACTIVE = (
    "system",
    "eval",
    "exec",
    "own function",
    "load from bytes",
    "torch.load",
    "call in the arguments of a call",
    "call in a key",
    "state of an object",
    "state that an object sets",
    "keyword arguments",
    "getattr chain",
    "INST",
    "OBJ",
    "INST in a dict",
    "OBJ of a class in a list",
    "function behind dots",
    "allowed module with dots",
    "extension",
    "extension of two bytes",
)


def with_head(data, keys=()):
    """A file in the format before torch 1.6 with this pickle."""
    parts = (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(part, 2) for part in parts) + data + pickle.dumps(list(keys), 2)


def with_pickle(path, data, form):
    """A torch file with this pickle."""
    if form == "legacy":
        path.write_bytes(with_head(data))
        return path
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", bytes(4096))
    return path


@pytest.fixture
def extension():
    """`touch` under an extension code that pickle has already resolved."""
    copyreg.add_extension(HERE, "touch", 0xF1)
    pickle.loads(b"\x80\x02\x82\xf1.")
    yield
    copyreg.remove_extension(HERE, "touch", 0xF1)
    copyreg._extension_cache.pop(0xF1, None)  # type: ignore[attr-defined]


def test_no_code_of_a_file_runs(tmp_path, monkeypatch, extension):
    """A checkpoint from the internet could take over the computer of its reader."""
    marker = tmp_path / "marker"
    (tmp_path / "hostile_module.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    documented = (argparse.Namespace, OrderedDict, safe_pickle.Namespace, safe_pickle.Dict, safe_pickle._tensor)
    with all_cases() as case:
        for number, (name, data) in enumerate(hostile_pickles(str(marker)).items()):
            for form in FORMATS:
                path = with_pickle(tmp_path / f"{number}-{form}.pt", data, form)
                with case(name, form):
                    read_without_effect(path)
                    assert not marker.exists() and "hostile_module" not in sys.modules
                    assert "changed" not in [each.__doc__ for each in documented]
                marker.unlink(missing_ok=True)
                sys.modules.pop("hostile_module", None)


def read_without_effect(path):
    """A file without tensors or with an error, and no checkpoint of CodeGeeX."""
    try:
        content = TorchFile(path).content
        assert not flatten(content, path)
    except CheckpointError as error:
        assert "is damaged, or not a file of torch.save" in str(error)
    with pytest.raises(CheckpointError):
        codegeex.read(path, {})
    assert not codegeex.recognise(path)


def test_a_hostile_pickle_runs_code_in_pickle_itself(tmp_path, extension):
    """Harmless pickles would make the test above meaningless."""
    marker = tmp_path / "marker"
    hostile = hostile_pickles(str(marker))
    with all_cases() as case:
        for name in ACTIVE:
            with case(name):
                with suppress(TypeError):  # the result of the call is not a key, or not an item
                    pickle.loads(hostile[name])
                assert marker.exists()
            marker.unlink(missing_ok=True)


def test_methods_of_tensors_cannot_be_called(tmp_path):
    """ADDITEMS calls `add` of a tensor, which could allocate the product of two sizes; SETITEM assigns to it."""
    column, row = (tensor_of(storage_of(1000), 0, *sizes) for sizes in (((1000, 1), (1, 1)), ((1, 1000), (1, 1))))
    for data in (
        column + b"(" + row + b"\x90.",
        column + b"I0\n" + row + b"s.",
        column + b"(" + row + b"e.",
        b"ccollections\nOrderedDict\n(" + column + b"tR.",
        storage_of(1000) + b"I0\nI1\ns.",
    ):
        path = with_pickle(tmp_path / "a.pt", data, "zip")
        with pytest.raises(CheckpointError, match=r"not a file of torch.save \((Attribute|Type)Error"):
            TorchFile(path)


def random_pickle(draw, marker):
    """A sequence of instructions that look up, call and change objects, most of them in a valid order."""
    names = [(HERE, "touch")] * 12 + [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
    ]
    names += [(HERE, "Setter"), (HERE, "TouchesFromState"), *safe_pickle.ALLOWED, ("torch", "FloatStorage")]
    strings = [marker] * 6 + [f"touch {marker}", f"__import__('pathlib').Path({marker!r}).touch()", "touch", "0"]
    tensor = tensor_of(storage_of(4), 0, (4,), (1,))

    def global_name():
        module, name = draw.choice(names)
        return draw.choice([f"c{module}\n{name}\n".encode(), stack_global(module, name)])

    def value(depth=0):
        if depth > 3 or draw.random() < 0.3:
            return text(draw.choice(strings))
        arguments = b"".join(value(depth + 1) for _ in range(draw.choice([0, 1, 1, 1, 2])))
        module, name = draw.choice(names)
        return draw.choice(
            [
                lambda: tensor,
                lambda: storage_of(4),
                global_name,
                lambda: global_name() + b"(" + arguments + b"tR",
                lambda: global_name() + b"(" + arguments + b"t\x81",
                lambda: global_name() + b"(" + arguments + b"t}\x92",
                lambda: b"(" + global_name() + arguments + b"o",
                lambda: b"(" + arguments + f"i{module}\n{name}\n".encode(),
                lambda: value(depth + 1) + value(depth + 1) + b"b",
                lambda: value(depth + 1) + text("__setstate__") + value(depth + 1) + b"s",
                lambda: value(depth + 1) + b"(" + arguments + draw.choice([b"e", b"u", b"\x90"]),
                lambda: b"(" + arguments + draw.choice([b"t", b"l", b"\x91"]),
                lambda: b"}" + text("model") + value(depth + 1) + b"s",
                lambda: b"\x82\xf1",
                lambda: value(depth + 1) + b"Q",
                lambda: value(depth + 1) + b"0" + value(depth + 1),
                lambda: bytes([draw.randrange(256)]),
            ]
        )()

    return b"\x80\x04" + value() + value() + b"\x86."


class Trusting(pickle._Unpickler):  # type: ignore[name-defined]
    """Python's own unpickler."""

    def persistent_load(self, pid):
        return torch.zeros(4)._typed_storage()


def test_random_pickles_run_code_in_pickle_itself(tmp_path, extension, monkeypatch):
    """Harmless pickles would make the test below meaningless."""
    monkeypatch.chdir(tmp_path)  # for files of other names
    marker = tmp_path / "marker"
    ran = 0
    for seed in range(300):
        with suppress(Exception):
            Trusting(BytesIO(random_pickle(random.Random(seed), str(marker)))).load()
        ran += marker.exists()
        marker.unlink(missing_ok=True)
    assert ran > 5


@pytest.mark.parametrize("first, last", [(0, 300), pytest.param(300, 20_000, marks=pytest.mark.soak)])
def test_no_random_pickle_runs_code(tmp_path, extension, first, last):
    """Instructions could reach a function in a way that the list of examples lacks."""
    marker = tmp_path / "marker"
    read = 0
    for seed in range(first, last):
        data = random_pickle(random.Random(seed), str(marker))
        for form in FORMATS:
            path = with_pickle(tmp_path / "a.pt", data, form)
            try:
                flatten(TorchFile(path).content, path)
                read += 1
            except CheckpointError as error:
                assert str(error).startswith(f"{path}: ")
        assert not marker.exists(), seed
    assert read > 0.05 * (last - first)
    assert "changed" not in str(safe_pickle.Dict.__doc__)


def test_an_invalid_pickle_is_a_damaged_file(tmp_path):
    """Any other error would be a traceback without the name of the file."""
    invalid = [
        (b"\x80\x02cos\nsystem\n)R)R.", "'Inert' object is not callable"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}S'a'\nI1\nsb.", "it would change a function"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "KeyError: 150"),  # allocates a terabyte
        (b"\x80\x02\x8b\x01\x00\x00\x00\x07.", "KeyError: 139"),  # an integer of any size
        (b"\x80\x02r\xff\xff\xff\xff.", "IndexError"),  # memo index of four billion
        (b"ctorch._utils\n_rebuild_tensor_v2\n(NI0\n(I2\nt(I1\ntI00\nNtR.", "a tensor has no storage, or no shape"),
        (b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI-1\ntQ.", "is not a plain storage"),
        (b"Pname\n.", "KeyError: 80"),
        (b"", "EOFError"),
    ]
    with all_cases() as case:
        for number, (data, message) in enumerate(invalid):
            for form in FORMATS:
                path = with_pickle(tmp_path / f"{number}-{form}.pt", data, form)
                if form == "legacy" and not data:
                    path.write_bytes(path.read_bytes().removesuffix(pickle.dumps([], 2)))
                with case(data, form), pytest.raises(CheckpointError, match=message):
                    TorchFile(path)


def doubled(times: int, container: type) -> Any:
    """A few bytes of pickle whose hash, comparison or text takes 2 ** times steps."""
    found = container()
    for _ in range(times):
        found = container((found, found))
    return found


def test_a_small_file_that_would_take_unlimited_time_is_an_error(tmp_path, monkeypatch):
    """A hash of nested tuples, or a message with nested lists in it, would keep the command busy for days."""
    monkeypatch.setattr(safe_pickle, "MAX_ITEMS", 1 << 15)
    key = "a key of a dict is a tuple of tuples"
    nested = "its containers nest more than 100 deep"
    repeated = f"{nested}, or repeat each other"
    small = {
        "key": (lambda: {doubled(16, tuple): 1}, key),
        "small key": (lambda: {"args": {((1, 2), 3): 1}}, key),
        "key of an OrderedDict": (lambda: Calls(OrderedDict, [(doubled(16, tuple), 1)]), key),
        "key of a state": (lambda: Calls(argparse.Namespace, state={doubled(16, tuple): 1}), key),
        "repeated tuples": (lambda: {"iteration": doubled(16, tuple)}, repeated),
        "repeated lists": (lambda: {"args": {"x": doubled(16, list)}}, repeated),
        "nested lists": (lambda: doubled(101, lambda pair=(): list(pair[:1])), nested),
    }
    with all_cases() as case:
        for name, (make, message) in small.items():
            for form in FORMATS:
                path = with_pickle(tmp_path / f"{name}-{form}.pt", pickle.dumps(make(), protocol=2), form)
                with case(name, form), pytest.raises(CheckpointError, match=message):
                    TorchFile(path)


def test_keys_and_sets_of_torch_files_are_read(tmp_path):
    """Megatron-LM's distributed optimizer has tuples of dtypes as keys; newer protocols have instructions for sets."""
    content = {None: 1, 2: "a", ("x", 3): {True: 0.5}, "sets": [{1, 2}, frozenset({(1, (2, 3))})]}
    for protocol in (0, 2, 4):
        path = with_pickle(tmp_path / f"{protocol}.pt", pickle.dumps(content, protocol), "zip")
        found = TorchFile(path).content
        assert len(found.pop("sets")) == 2, protocol
        assert found == {None: 1, 2: "a", ("x", 3): {True: 0.5}}, protocol


def test_the_key_of_a_storage_must_be_a_string(tmp_path):
    """The text or the hash of another key could take unlimited time."""
    nested = pickle.dumps(doubled(30, tuple), protocol=2)[2:-1]
    data = b"(S'storage'\nctorch\nFloatStorage\n" + nested + b"S'cpu'\nI1\ntQ."
    with pytest.raises(CheckpointError, match="a storage has no name"):
        TorchFile(with_pickle(tmp_path / "a.pt", data, "zip"))
    legacy = with_pickle(tmp_path / "b.pt", pickle.dumps({}, 2), "legacy")
    legacy.write_bytes(legacy.read_bytes().removesuffix(pickle.dumps([], 2)) + pickle.dumps([1], 2))
    with pytest.raises(CheckpointError, match="the keys of its storages are not those of its tensors"):
        TorchFile(legacy)
