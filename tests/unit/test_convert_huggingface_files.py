"""Files of Hugging Face models: one or many, safetensors or torch files, and errors for damaged ones."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_lite.convert import huggingface, huggingface_files
from megatron_lite.convert.driver import Request, convert
from megatron_lite.convert.huggingface import read, recognise
from megatron_lite.errors import CheckpointError, MegatronLiteError
from tests.helpers.huggingface import (
    assert_same_tensors,
    copy,
    gpt2,
    llama,
    tensors_of,
    transformers_without_warnings,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of one GPT-2 and one Llama, for tests to copy."""
    root = tmp_path_factory.mktemp("hf")
    gpt2().save_pretrained(root / "gpt2")
    llama().save_pretrained(root / "llama")
    return root


def test_several_files_are_read_and_written(saved, tmp_path):
    """Models of more than a few billion parameters have several files."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(saved / "llama")
    theirs.save_pretrained(tmp_path / "src", max_shard_size="20KB")
    assert len(list((tmp_path / "src").glob("*.safetensors"))) > 4
    (tmp_path / "out").mkdir()
    checkpoint = read(tmp_path / "src", {})
    written: list[int] = []
    huggingface.write(tmp_path / "out", checkpoint, tensor=1, pipeline=1, progress=written.append, shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "out" / file).stat().st_size < 40_000 for file in files)
    assert index["metadata"]["total_size"] == sum(written)
    assert_same_tensors(tmp_path / "out", saved / "llama")
    transformers_without_warnings(tmp_path / "out")


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_torch_files_are_read(saved, tmp_path, legacy, sharded):
    """Older models have no safetensors files."""
    folder = copy(saved / "gpt2", tmp_path / "src")
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    groups = {"a.bin": names[:9], "b.bin": names[9:]} if sharded else {"pytorch_model.bin": names}
    for file, names in groups.items():
        content = {name: tensors[name] for name in names}
        torch.save(content, folder / file, _use_new_zipfile_serialization=not legacy)
    if sharded:
        weight_map = {name: file for file, names in groups.items() for name in names}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    got, want = read(folder, {}), read(saved / "gpt2", {})
    assert got.tensors == want.tensors
    assert all(torch.equal(got.read(name), want.read(name)) for name in want.tensors)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_names_of_a_wrapped_model_are_read(saved, tmp_path, kind, wrapper):
    """torch.compile and data parallelism put their names before those of the model."""
    folder = copy(saved / kind, tmp_path / "src")
    save_file({wrapper + name: tensor for name, tensor in tensors_of(folder).items()}, folder / "model.safetensors")
    got, want = read(folder, {}), read(saved / kind, {})
    assert got.tensors == want.tensors
    assert all(torch.equal(got.read(name), want.read(name)) for name in want.tensors)


def test_verification_does_not_compare_with_random_weights(saved, tmp_path):
    """transformers does not read the names of a wrapped model, and fills it with random values."""
    folder = copy(saved / "llama", tmp_path / "src")
    save_file({f"_orig_mod.{name}": x for name, x in tensors_of(folder).items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"transformers does not find lm_head\.weight.*; leave out --verify"):
        convert(Request(folder, tmp_path / "out", verify=True), lambda line: None)


def test_names_of_wrapped_layers_are_read(saved, tmp_path):
    """Layers that are compiled, sharded or recomputed one by one."""
    folder = copy(saved / "llama", tmp_path / "src")
    parts = [
        ("layers.0.", "_orig_mod."),
        ("layers.1.", "_checkpoint_wrapped_module."),
        ("mlp.", "_fsdp_wrapped_module."),
    ]
    tensors = tensors_of(folder)
    for part, wrapper in parts:
        tensors = {name.replace(part, part + wrapper): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    assert read(folder, {}).tensors == read(saved / "llama", {}).tensors


def test_the_error_of_an_unknown_tensor_has_its_name_in_the_file(saved, tmp_path):
    """A name with the prefix of the family would not be found there."""
    folder = copy(saved / "llama", tmp_path / "src")
    tensors = {f"student.{name}": tensor for name, tensor in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: .*; unknown: student\.lm_head\.weight, student\.model\.embed"):
        read(folder, {})
    tensors = tensors_of(saved / "llama")
    wrong = {"_orig_mod.model.norm.weight": torch.ones(5), "model.norm.weight": None}
    save_file({name: x for name, x in {**tensors, **wrong}.items() if x is not None}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r" _orig_mod\.model\.norm\.weight is \[5\], expected \[32\]"):
        read(folder, {})


@pytest.mark.parametrize("keys", [["state_dict"], ["model"], ["module"], ["model_state_dict"], ["model", "state_dict"]])
def test_tensors_under_a_key_of_a_training_program_are_read(saved, tmp_path, keys):
    """Beside the tensors are an optimizer and counters, some of them tensors."""
    folder = copy(saved / "gpt2", tmp_path / "src")
    content = tensors_of(folder)
    for key in reversed(keys):
        counters = {"epoch": 3, "step": torch.tensor(7), "loss": torch.tensor(0.5), "rng": torch.get_rng_state()}
        content = {**counters, "optimizer": {"state": {0: torch.ones(2)}}, key: content}
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    got, want = read(folder, {}), read(saved / "gpt2", {})
    assert got.tensors == want.tensors
    assert all(torch.equal(got.read(name), want.read(name)) for name in want.tensors)


def test_a_torch_file_with_tensors_under_another_key_is_an_error_that_has_its_keys(saved, tmp_path):
    folder = copy(saved / "gpt2", tmp_path / "src")
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"net": tensors, "epoch": 3}, folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin: has no tensors, but net and epoch; save the tensors"
    ):
        read(folder, {})
    torch.save({"model": tensors, "state_dict": tensors}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: has model and state_dict, expected one of them"):
        read(folder, {})


@pytest.mark.parametrize("key", ["state_dict", "model", "module", "model_state_dict"])
def test_tensors_beside_a_key_of_a_training_program_are_an_error(saved, tmp_path, key):
    """transformers reads the tensors at the top, so those under the key would be another model."""
    folder = copy(saved / "gpt2", tmp_path / "src")
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for content in ({key: others, **tensors}, {"epoch": 3, key: {key: others, "x": torch.ones(1)}}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=rf"pytorch_model.bin: has .* beside {key}; save one of"):
            read(folder, {})


def damage(folder: Path, name: str) -> None:
    """Damage a folder in the named way."""
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    tensors = tensors_of(folder)
    if name == "no config":
        (folder / "config.json").unlink()
    elif name == "config is a list":
        (folder / "config.json").write_text("[]")
    elif name == "truncated config":
        (folder / "config.json").write_text('{"model_type": ')
    elif name == "truncated file":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif name in ("float8_e4m3fn", "int8"):
        save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].to(getattr(torch, name))}, weights)
    else:
        weights.rename(folder / "a.safetensors")
        places = {
            "outside": "../a.safetensors",
            "absolute": str(folder / "a.safetensors"),
            "null": "a\0.safetensors",
            "pickle": "a.bin",
            "number": 3,
            "missing file": "b.safetensors",
        }
        if name != "no weights":
            file = places.get(name, "a.safetensors")
            index.write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, "x"], file)}))
        if name == "no map":
            index.write_text("{}")


@pytest.mark.parametrize(
    "name, message",
    [
        ("no config", "config.json: cannot be read: No such file"),
        ("config is a list", "holds a list, expected a JSON object"),
        ("truncated config", "config.json: cannot be read as JSON"),
        ("truncated file", "model.safetensors: is damaged, or not a safetensors file"),
        ("float8_e4m3fn", r"lm_head.weight has the unsupported dtype F8_E4M3; save it as"),
        ("int8", r"lm_head.weight has the unsupported dtype I8; save it as"),
        ("outside", r"lists \S+ in '../a.safetensors', which is not a .safetensors file of this folder"),
        ("absolute", "which is not a .safetensors file of this folder"),
        ("null", "which is not a .safetensors file of this folder"),
        ("pickle", "in 'a.bin', which is not a .safetensors file of this folder"),
        ("number", "in 3, which is not a .safetensors file of this folder"),
        ("missing file", "b.safetensors: is missing, but the index lists tensors in it"),
        ("missing tensor", "a.safetensors: has no x, which the index lists"),
        ("no map", "has no weight_map from tensors to files"),
        ("no weights", r"has no weights; expected one of model.safetensors, model.safetensors.index.json"),
    ],
)
def test_broken_folders_are_an_error_that_names_the_file(saved, tmp_path, name, message):
    """Downloaded files can be damaged or malicious: an index must not name files outside its folder."""
    folder = copy(saved / "llama", tmp_path / "src")
    damage(folder, name)
    with pytest.raises(CheckpointError, match=message):
        read(folder, {})


def test_a_file_instead_of_a_folder_and_a_torch_file_without_tensors_are_errors(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: is not a folder; give the one of config.json"):
        read(saved / "gpt2" / "config.json", {})
    folder = copy(saved / "gpt2", tmp_path / "src")
    (folder / "model.safetensors").unlink()
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds list, expected tensors by name"):
        read(folder, {})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([10**20, -1, 0]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def fuzzed(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    for kind in ("gpt2", "llama"):
        copy(saved / kind, folder / kind)
    return folder


def read_or_fail_cleanly(folder: Path) -> None:
    """Read the folder; only errors of this package may occur."""
    recognise(folder)
    try:
        checkpoint = read(folder, {})
        for name in checkpoint.tensors:
            checkpoint.read(name)
    except MegatronLiteError as error:
        assert str(error)


@settings(max_examples=60)
@given(st.data())
def test_any_config_is_read_or_an_error(fuzzed, data):
    """Also sizes larger than any memory."""
    kind = data.draw(st.sampled_from(["gpt2", "llama"]))
    path = fuzzed / kind / "config.json"
    original = path.read_text()
    names = [*sorted(json.loads(original)), "rope_theta", "rope_scaling", "n_ctx", "x"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3))
    try:
        path.write_text(json.dumps(json.loads(original) | changes))
        read_or_fail_cleanly(fuzzed / kind)
    finally:
        path.write_text(original)


@settings(max_examples=60)
@given(st.data())
def test_any_bytes_in_a_header_or_an_index_are_read_or_an_error(fuzzed, data):
    """One byte or all of a header is changed, or an index is any JSON."""
    folder = fuzzed / "gpt2"
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    original = weights.read_bytes()
    length = 8 + int.from_bytes(original[:8], "little")
    try:
        if data.draw(st.booleans()):
            changed = bytearray(original)
            for place in data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=3)):
                changed[place] = data.draw(st.integers(0, 255))
            weights.write_bytes(changed)
        else:
            weights.rename(folder / "a.safetensors")
            files = values | st.just("a.safetensors")
            maps = st.dictionaries(st.sampled_from(["transformer.wte.weight", "x"]), files) | values
            index.write_text(json.dumps({"weight_map": data.draw(maps)}))
        read_or_fail_cleanly(folder)
    finally:
        index.unlink(missing_ok=True)
        (folder / "a.safetensors").unlink(missing_ok=True)
        weights.write_bytes(original)


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_large_tensors_are_read_in_blocks(tmp_path, monkeypatch, kind):
    """A block must not be skipped or copied to the wrong rows."""
    monkeypatch.setattr(huggingface_files, "BLOCK_BYTES", 100)
    tensors = {"a": torch.randn(7, 9), "b": torch.randn(301), "wide": torch.randn(2, 3, 50)}
    if kind == "safetensors":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "zip")
    files = huggingface_files.HuggingFaceFiles(tmp_path)
    for name, tensor in tensors.items():
        wider = torch.empty(tensor.shape, dtype=torch.float64)
        with_strides = torch.empty((*tensor.shape[:-1], tensor.shape[-1] + 1))[..., 1:]
        for target in (torch.empty(tensor.shape), wider, with_strides):
            files.fill(target, name)
            assert torch.equal(target.float(), tensor)
        assert files.equals(tensor, name)
        changed = tensor.clone()
        changed[-1] += 0.1
        assert not files.equals(changed, name)


def test_a_torch_file_that_shrinks_is_an_error(tmp_path):
    """Reading a mapped file past its end kills the process."""
    torch.save({"a": torch.ones(1000)}, tmp_path / "pytorch_model.bin")
    files = huggingface_files.HuggingFaceFiles(tmp_path)
    os.truncate(tmp_path / "pytorch_model.bin", 900)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: had \d,\d+ bytes and has 900 now"):
        files.fill(torch.empty(1000), "a")
