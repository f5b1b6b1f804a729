"""Readers of files of others: each element is read once, from bytes inside of the folder, and sizes are bounded."""

import contextlib
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import LAYOUT_FILE, checksum, dump_layout, read_layout
from megatron_lite.checkpoint.reshard import tile
from megatron_lite.checkpoint.tensor_file import write_tensors
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import codegeex, huggingface, megatron, native, safe_pickle, torch_dist
from megatron_lite.convert.distributed_files import METADATA, DistributedFiles
from megatron_lite.convert.driver import Request, convert
from megatron_lite.convert.safe_pickle import decode
from megatron_lite.errors import CheckpointError, DamagedCheckpoint, MegatronLiteError
from megatron_lite.evaluation.run import config_of as evaluated
from megatron_lite.generate.run import config_of, load_model
from megatron_lite.model.build import get_model
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from tests.helpers.cases import all_cases
from tests.helpers.checkpoints import listed
from tests.helpers.command import run_here
from tests.helpers.huggingface import llama
from tests.helpers.printed import unwrapped

WORDS = "embedding.word_embeddings.weight"
CODEGEEX = {"num_heads": 4}


def quiet(line: str) -> None:
    """Discards what `convert` prints."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One model in every format that has several files, by the name of its format."""
    root = tmp_path_factory.mktemp("formats")
    llama().save_pretrained(root / "huggingface", max_shard_size="20KB")
    convert(Request(root / "huggingface", root / "native", tensor=2), quiet)
    for name in ("megatron", "torch_dist"):
        layout = {"tensor": 2} if name == "megatron" else {}
        convert(Request(root / "native", root / name, target_format=name, **layout), quiet)
    fields = {**codegeex.KINDS, "mlp_dropout": False, "num_layers": 2, "hidden_size": 32, "num_heads": 4}
    model = ModelConfig(**fields, max_position_embeddings=16, vocab_size=64, padded_vocab_size=64)
    table = codegeex.full_table(model)
    tensors = {name: torch.randn(*meta.shape) for name, meta in table.items()}
    specs = {name: codegeex.Spec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    (root / "codegeex").mkdir()
    checkpoint = codegeex.Checkpoint(model, specs, tensors.__getitem__)
    codegeex.write(root / "codegeex", checkpoint, tensor=2, pipeline=1, progress=lambda _: None)
    return root


def read_all(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    formats = {"native": native, "huggingface": huggingface, "megatron": megatron, "torch_dist": torch_dist}
    found = {**formats, "codegeex": codegeex}[name].read(folder, CODEGEEX if name == "codegeex" else {})
    return {tensor: found.read(tensor) for tensor in found.tensors}


def edit_layout(folder: Path, change) -> None:
    """Change the content of a layout.json, with the right checksum."""
    newest = resolve(folder)
    content = json.loads(dump_layout(listed(read_layout(newest))))
    change(content)
    del content["crc32"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    (newest / LAYOUT_FILE).write_text(json.dumps({"crc32": checksum(text), **content}))


def edit_metadata(folder: Path, change) -> None:
    """Change the content of a .metadata."""
    file = next(folder.rglob(METADATA))
    content = pickle.loads(file.read_bytes())
    change(content)
    file.write_bytes(pickle.dumps(content))


def other_dtype(folder: Path) -> None:
    """The values would be rounded."""

    def change(content: dict) -> None:
        content["tensors"][WORDS]["values"]["weight"]["dtype"] = "BF16"

    edit_layout(folder, change)


def other_copy(folder: Path) -> None:
    """Of two tensor-parallel ranks, the second one has another norm; all checksums are right."""

    def change(content: dict) -> None:
        tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
        tensors["decoder.final_layernorm.weight"] *= -1
        content["files"][f"{file.parent.name}/{file.name}"] = write_tensors(file, tensors).model_dump()

    (file,) = folder.rglob("mp_rank_01/model.safetensors")
    edit_layout(folder, change)


def overlap(folder: Path) -> None:
    """Both slices of a tensor become those of the first rank; the number of elements stays."""

    def change(content: dict) -> None:
        pieces = content["tensors"][WORDS]["values"]["weight"]["pieces"]
        pieces[1] = pieces[0]

    edit_layout(folder, change)


def half_twice(metadata) -> None:
    found = metadata.state_dict_metadata[WORDS]
    rows, columns = found.size
    half = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((rows // 2, columns)))
    found.chunks[:] = [half, ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((rows - rows // 2, columns)))]


def same_place(metadata) -> None:
    """Two tensors of one shape are in the same bytes."""
    names = [
        f"decoder.layers.{n}"
        for n in ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    ]
    places = [next(index for index in metadata.storage_data if index.fqn == name) for name in names]
    metadata.storage_data[places[1]] = metadata.storage_data[places[0]]


def in_two_files(folder: Path) -> None:
    """A tensor of one file is in another one too, with other values."""
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    tensors = load_file(first)
    name = next(iter(load_file(second)))
    save_file(tensors | {name: load_file(second)[name] + 1}, first, {"format": "pt"})


def listed_twice(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    name, *_ = json.loads(index.read_text())["weight_map"]
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{"{name}": "a.safetensors",', 1))


def edit_header(folder: Path) -> None:
    """Two tensors of a file share their bytes; its size and its checksums are right."""
    newest = resolve(folder)
    file = newest / "mp_rank_00" / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    by_size: dict[int, list[str]] = {}
    for name in header.keys() - {"__metadata__"}:
        entry = header[name]
        by_size.setdefault(entry["data_offsets"][1] - entry["data_offsets"][0], []).append(name)
    first, second, *_ = next(names for names in by_size.values() if len(names) > 1)
    header[second]["data_offsets"] = header[first]["data_offsets"]
    header["__metadata__"][f"crc32.{second}"] = header["__metadata__"][f"crc32.{first}"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    file.write_bytes(data[:8] + text + data[8 + size :])

    def change(content: dict) -> None:
        info = content["files"]["mp_rank_00/model.safetensors"]
        info["header_crc32"] = checksum(data[:8] + text)

    edit_layout(folder, change)


def edit_rank(change, pattern: str = "mp_rank_01*"):
    """A damage: another content in the file of the second rank."""

    def damage(folder: Path) -> None:
        found = next(folder.rglob(pattern))
        file = found / "model_optim_rng.pt" if found.is_dir() else found
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)

    return damage


def record_twice(folder: Path) -> None:
    """torch.load takes DATA/0 and data/0 for one record."""
    with zipfile.ZipFile(next(folder.glob("mp_rank_00*")), "a") as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data/0"))
        archive.writestr(name.replace("data", "DATA"), bytes(archive.getinfo(name).file_size))


NOT_COVERED = {
    "native slices": ("native", overlap, "slices of weight of embedding.word_embeddings.weight overlap"),
    "native dtype": ("native", other_dtype, r"weight is torch.float32, layout.json lists BF16"),
    "native copies": ("native", other_copy, r"weight of decoder\.final_layernorm\.weight differs in .* have copies"),
    "native header": ("native", edit_header, "tensors overlap, or leave a gap"),
    "native rank": ("native", lambda folder: next(folder.rglob("mp_rank_01")).rename(folder / "x"), "missing"),
    "torch_dist chunks": ("torch_dist", lambda f: edit_metadata(f, half_twice), "which overlap or leave a gap"),
    "torch_dist bytes": ("torch_dist", lambda f: edit_metadata(f, same_place), "has two chunks in the same bytes"),
    "index, two files": ("huggingface", in_two_files, "which the index lists in another file"),
    "index, two entries": ("huggingface", listed_twice, "is in an object twice"),
    "megatron rank": ("megatron", lambda f: shutil.rmtree(next(f.rglob("mp_rank_00"))), "lacks mp_rank_00"),
    "megatron numbers": (
        "megatron",
        lambda f: next(f.rglob("mp_rank_01")).rename(next(f.rglob("mp_rank_01")).with_name(f"mp_rank_{10**18}")),
        "lacks mp_rank_01_000",
    ),
    "megatron iteration": (
        "megatron",
        edit_rank(lambda content: content.update(iteration=2)),
        r"mp_rank_01\S+: has iteration 2, but .* has 0; the files are not of one checkpoint",
    ),
    "megatron version": ("megatron", edit_rank(lambda c: c.update(checkpoint_version=0)), "checkpoint_version 0, but"),
    "megatron model": (
        "megatron",
        edit_rank(lambda content: setattr(content["args"], "swiglu", False)),
        "has activation gelu, but .* has swiglu",
    ),
    "megatron chunks": (
        "megatron",
        edit_rank(lambda content: content.update(model0=content["model"])),
        "has the models model, model0, but",
    ),
    "codegeex iteration": (
        "codegeex",
        edit_rank(lambda content: content.update(iteration=2)),
        "has iteration 2, but .* has None",
    ),
    "codegeex record": ("codegeex", record_twice, "is damaged, or not a file of torch.save"),
    "codegeex rank": ("codegeex", lambda f: next(f.glob("mp_rank_00*")).unlink(), "rank 00 is missing"),
}


@pytest.mark.parametrize("case", NOT_COVERED)
def test_each_element_is_read_once(saved, tmp_path, case):
    """The number of elements alone would let memory without values become weights."""
    name, damage, message = NOT_COVERED[case]
    folder = tmp_path / "src"
    shutil.copytree(saved / name, folder)
    assert read_all(name, folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read_all(name, folder)


def test_an_instruction_that_torch_load_refuses_is_refused():
    """DUP would let a file have other tensors here than there."""
    twice = b"\x80\x02K\x01" + pickle.DUP + b"\x86."
    assert pickle.loads(twice) == (1, 1)
    with pytest.raises((KeyError, pickle.UnpicklingError)):
        decode(twice, {})


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
NOT_READ = {
    "negated": (lambda tensor: torch._neg_view(tensor), "is damaged, or not a file of torch.save"),
    "integers": (lambda tensor: (tensor * 100).to(torch.int8), f"{QKV} is torch.int8; save its weights as float32"),
}


@pytest.mark.parametrize("case", NOT_READ)
def test_values_that_are_not_the_bytes_are_refused(saved, tmp_path, case):
    """torch.load negates a view; integers have their scale elsewhere. The bytes alone would be other weights."""
    change, message = NOT_READ[case]
    folder = tmp_path / "src"
    shutil.copytree(saved / "megatron", folder)
    for rank in ("00", "01"):
        edit_rank(lambda c: c["model"].update({QKV: change(c["model"][QKV])}), f"mp_rank_{rank}*")(folder)
    with pytest.raises(CheckpointError, match=message):
        read_all("megatron", folder)


def test_the_integers_of_every_format_are_refused(saved, tmp_path):
    """In one place, for formats that no reader above knows."""
    folder = tmp_path / "src"
    shutil.copytree(saved / "torch_dist", folder)
    place = next(folder.rglob(METADATA)).parent
    entries = pickle.loads((place / METADATA).read_bytes()).state_dict_metadata
    state = {name: torch.empty(entry.size) for name, entry in entries.items() if hasattr(entry, "size")}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    state = {name: (100 * value).to(torch.int8) if "linear_qkv" in name else value for name, value in state.items()}
    dcp.save(state, checkpoint_id=place, no_dist=True)
    with pytest.raises(CheckpointError, match=r"layernorm\.weight is torch\.int8, which is not a dtype of weights"):
        convert(Request(folder, tmp_path / "new"), quiet)
    assert not (tmp_path / "new").exists()


def test_different_copies_are_no_model(saved, tmp_path):
    """Each layout would take another one of them."""
    shutil.copytree(saved / "native", tmp_path / "src")
    other_copy(tmp_path / "src")
    for words in (["--verify"], [str(saved / "native")]):
        done = run_here("inspect", "src", *words, cwd=tmp_path)
        assert done.returncode == 1 and "have copies of it" in unwrapped(done.stderr)
    for read in (config_of, evaluated):
        with pytest.raises(CheckpointError, match="have copies of it; each layout would be another model"):
            read(resolve(tmp_path / "src"), 1)


def test_integers_beside_a_config_json_are_refused(saved, tmp_path):
    """A folder of torch.distributed.checkpoint may have names of Hugging Face."""
    shutil.copytree(saved / "huggingface", tmp_path / "src", ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {
        key: value for file in (saved / "huggingface").glob("*.safetensors") for key, value in load_file(file).items()
    }
    name = "model.layers.0.self_attn.q_proj.weight"
    dcp.save({**tensors, name: tensors[name].to(torch.int8)}, checkpoint_id=tmp_path / "src", no_dist=True)
    with pytest.raises(CheckpointError, match=rf"{name} has the unsupported dtype torch\.int8; save it as float32"):
        convert(Request(tmp_path / "src", tmp_path / "new"), quiet)


def test_overlapping_slices_are_not_loaded_by_a_run(saved, tmp_path):
    """A load by ranks plans its reads in another place than a conversion."""
    folder = tmp_path / "src"
    shutil.copytree(saved / "native", folder)
    overlap(folder)
    config = config_of(resolve(folder), 1)
    ctx, rng = initialize_megatron(config)
    with pytest.raises(CheckpointError, match=r"slices of weight of embedding\S+ overlap"):
        load_model(resolve(folder), config, ctx, rng, get_model)
    finalize_megatron()


def test_boxes_tile_where_each_element_is_in_one():
    """Against counting elements, for every pair of boxes in a matrix."""
    ranges = [(a, b) for a in range(3) for b in range(a, 3)]
    boxes = [(rows, columns) for rows in ranges for columns in ranges]
    last = ((1, 2), (0, 2))
    for first in boxes:
        for second in boxes:
            count = [[0, 0], [0, 0]]
            for rows, columns in (first, second, last):
                for row in range(*rows):
                    for column in range(*columns):
                        count[row][column] += 1
            assert tile([first, second, last], [((0, 2), (0, 2))]) == (count == [[1, 1], [1, 1]])


FILES = {
    "native": "checkpoints/iter_*/mp_rank_01/model.safetensors",
    "huggingface": "model-00002-*.safetensors",
    "megatron": "*/mp_rank_01",
    "torch_dist": "*/__0_0.distcp",
    "codegeex": "mp_rank_01*",
}


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_a_file_outside_of_the_folder_is_not_read(saved, tmp_path, name):
    """A folder of others could publish a private file of the user as weights. Inside of the folder links may lead."""
    folder, outside = tmp_path / "src", tmp_path / "outside"
    shutil.copytree(saved / name, folder)
    (file,) = folder.glob(FILES[name])
    inside = file.with_name(f"{file.name}.other") if name != "megatron" else folder / "other"
    if name not in ("native", "megatron"):
        file.rename(inside)
        file.symlink_to(inside.name)
        assert read_all(name, folder)
        inside.rename(outside)
        file.unlink()
    else:
        file.rename(outside)
    file.symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link to a file outside of"):
        read_all(name, folder)
    if not outside.is_dir():
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointError, match=r"is neither a file nor a folder|lacks|is missing"):
            read_all(name, folder)


def test_links_of_the_hubs_cache_are_read(saved, tmp_path):
    """A snapshot has links to blobs, which several snapshots share."""
    root = tmp_path / "models--a--b"
    snapshot = root / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted((saved / "huggingface").iterdir())):
        shutil.copy(file, root / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    got, want = read_all("huggingface", root), read_all("huggingface", saved / "huggingface")
    assert all(torch.equal(got[tensor], want[tensor]) for tensor in want)


def doubled(times: int) -> bytes:
    """Nested pairs of one tuple, as instructions."""
    return b")" + b"2\x86" * times


LONG = struct.pack("<Q", 1 << 33)
PICKLES = {
    "key of nested tuples": b"\x80\x02}" + doubled(64) + b"K\x01s.",
    "values of nested tuples": b"\x80\x02]" + doubled(64) + b"a.",
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "bytes": b"\x80\x04\x8e" + LONG + b".",
    "text": b"\x80\x04\x8d" + LONG + b".",
    "bytearray": b"\x80\x05\x96" + LONG + b".",
    "frame": b"\x80\x04\x95" + LONG + b".",
    "depth": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "arguments": b"\x80\x02ca\nb\n(" + b"N" * 20_000 + b"tq\x000" + b"cc\nd\nh\x00R0" * 20_000 + b".",
    "long keys": b"\x80\x02}q\x010(" + b"N" * 20_000 + b"tq\x000h\x01" + b"h\x00Ns" * 20_000 + b".",
    "long integer": b"\x80\x02\x8b\x00\x00\x00\x01.",
    "empty": b"",
}


def test_a_pickle_takes_time_and_memory_by_its_bytes(tmp_path, monkeypatch):
    """Each of these would take minutes or gigabytes in pickle itself."""
    monkeypatch.setattr(safe_pickle, "MAX_ITEMS", 1 << 15)
    with all_cases() as case:
        for name, data in PICKLES.items():
            (tmp_path / METADATA).write_bytes(data)
            problem = {"arguments": "more arguments", "long keys": "or a long one"}.get(name, "")
            with case(name), pytest.raises(DamagedCheckpoint, match=rf"\.metadata: is damaged .*{problem}"):
                DistributedFiles(tmp_path)


class Shadowed:
    """A dict whose state has the attribute `values`, as which a reader would call what the file gives."""

    def __init__(self, items: dict):
        self.items = items

    def __reduce__(self):
        from collections import OrderedDict

        return OrderedDict, (), {"values": list}, None, iter(self.items.items())


def test_attributes_of_a_pickle_are_left_out(saved, tmp_path):
    """A shadowed `values` would hide a file outside of the folder from its check."""
    folder = tmp_path / "src"
    shutil.copytree(saved / "torch_dist", folder)

    def change(metadata, file: str) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = file
        metadata.storage_data = Shadowed(metadata.storage_data)

    edit_metadata(folder, lambda metadata: change(metadata, "__0_0.distcp"))
    assert read_all("torch_dist", folder)
    next(folder.rglob("__0_0.distcp")).rename(tmp_path / "__0_0.distcp")
    for file in ("../__0_0.distcp", str(tmp_path / "__0_0.distcp"), "..", "", "a/../__0_0.distcp"):
        shutil.copy(saved / "torch_dist" / "release" / METADATA, next(folder.rglob(METADATA)))
        edit_metadata(folder, lambda metadata, file=file: change(metadata, file))
        with pytest.raises(CheckpointError, match=r"which is not a file of this folder|lacks|outside of|is damaged"):
            read_all("torch_dist", folder)


def test_objects_of_a_pickle_are_plain(saved):
    """A class of torch could have a `__setstate__` that does more than the reader knows."""
    content = decode((saved / "torch_dist" / "release" / METADATA).read_bytes(), {})
    assert type(content).__module__ == "megatron_lite.convert.safe_pickle"


NUMBERS = (10**12, 10**18, 10**400)
SIZES = [
    name
    for name, field in ModelConfig.model_fields.items()
    if field.annotation is int and name not in ("relative_max_distance",)
]


def test_no_stored_size_is_larger_than_the_files(saved, tmp_path):
    """A model of 10 ** 12 layers would be listed layer by layer, and never end."""
    folder = tmp_path / "native"
    shutil.copytree(saved / "native", folder)
    before = (resolve(folder) / LAYOUT_FILE).read_text()
    with all_cases() as case:
        for name in SIZES:
            for number in NUMBERS:
                edit_layout(
                    folder, lambda content, name=name, number=number: content["config"]["model"].update({name: number})
                )
                for read in (lambda: read_all("native", folder), lambda: config_of(resolve(folder), 1)):
                    with case("native", name, f"10**{len(str(number)) - 1}"):
                        outcome(read)
                (resolve(folder) / LAYOUT_FILE).write_text(before)
        config = json.loads((saved / "huggingface" / "config.json").read_text())
        folder = tmp_path / "hf"
        shutil.copytree(saved / "huggingface", folder)
        for name, value in config.items():
            if type(value) is int:
                for number in NUMBERS:
                    (folder / "config.json").write_text(json.dumps(config | {name: number}))
                    with case("huggingface", name, f"10**{len(str(number)) - 1}"):
                        outcome(lambda: huggingface.read(folder, {}))


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "ffn_hidden_size", "padded_vocab_size"])
def test_a_model_that_the_files_cannot_hold_is_not_built_for_texts(saved, tmp_path, name):
    """Its memory would be taken before the first tensor is compared."""
    folder = tmp_path / "src"
    shutil.copytree(saved / "native", folder)
    edit_layout(folder, lambda content: content["config"]["model"].update({name: 10**12}))
    for reads in (config_of, evaluated):
        with pytest.raises(CheckpointError, match=r"iter_\d+: describes [\d,]+ parameters, the files hold"):
            reads(resolve(folder), 1)


def outcome(read) -> None:
    """Read or refuse; any other error is a traceback."""
    with contextlib.suppress(MegatronLiteError):
        read()


def test_arguments_of_megatron_are_bounded(saved, tmp_path):
    folder = tmp_path / "src"
    shutil.copytree(saved / "megatron", folder)
    file = next(folder.rglob("mp_rank_00/*.pt"))
    content = torch.load(file, weights_only=False)
    with all_cases() as case:
        for name, value in vars(content["args"]).items():
            if type(value) is int:
                for number in (10**12, 10**18):
                    changed = type(content["args"])(**{**vars(content["args"]), name: number})
                    torch.save({**content, "args": changed}, file)
                    with case(name, number):
                        outcome(lambda: megatron.read(folder, {}))
