"""layout.json: what it says comes back, and no damage to it gets past the reader."""

import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpoint.layout import (
    checksum,
    content_checksum,
    dump_layout,
    iteration_of,
    mp_rank_folder,
    parse_layout,
    read_layout,
)
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.parallel.grid import Grid
from tests.helpers.checkpoints import one_process, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("layout"), 1, one_process())


def test_layout_survives_its_text(folder):
    """Floats, cuts with fused parts and the grid read back exactly."""
    layout = read_layout(folder)
    text = dump_layout(layout)
    assert parse_layout(text.encode(), folder) == layout
    assert layout.state["loss_scale"] == 0.1
    assert layout.tensors["decoder.layers.0.self_attention.linear_qkv.weight"].shard.parts == (8, 4, 4)
    line = next(line for line in text.splitlines() if "linear_fc2" in line)
    assert '"shape": [4, 12], "shard": {"dim": 1, "parts": []}' in line


def test_checksums_are_those_of_zlib():
    """Whoever reads the files without our code has it; so do checkpoints written before."""
    assert checksum(b"123456789") == "cbf43926"  # the check value of CRC-32/ISO-HDLC
    data = memoryview(bytes(range(256)) * 4097)
    for part in (data[:0], data[1:8], data[3:], data):
        assert checksum(part) == f"{zlib.crc32(part):08x}"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-40], "damaged, it cannot be read as JSON"),
        (lambda text: b"", "damaged, it cannot be read as JSON"),
        (lambda text: b"[" * 100_000, "damaged, it cannot be read as JSON"),
        (lambda text: b"\xff" + text, "damaged, it cannot be read as JSON"),
        (lambda text: b"[1, 2]", "does not describe a megatron_lite checkpoint, or damaged"),
        (lambda text: b'{"a": 1}', "does not describe a megatron_lite checkpoint, or damaged"),
        (
            lambda text: text.replace(b'"version": 2', b'"version": 3', 1),
            "damaged or edited, its content does not have its checksum",
        ),
        (lambda text: text.replace(b'"iteration": 1', b'"iteration": 2', 1), "does not have its checksum"),
    ],
)
def test_damage_is_told_with_the_path_and_what_to_do(tmp_path, folder, damage, message):
    """Each says which file it is and how to go on."""
    path = tmp_path / "layout.json"
    path.write_bytes(damage((folder / "layout.json").read_bytes()))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_layout(tmp_path)
    assert str(caught.value).startswith(str(path)) and "latest_checkpointed_iteration.txt" in str(caught.value)


def test_what_was_written_like_that_is_no_damage(folder):
    """Its checksum says so: it is another version's, and setting it aside would cost a good checkpoint."""
    text = json.loads(dump_layout(read_layout(folder)))
    text.pop("crc32")
    content = {**text, "surprise": 1}
    with pytest.raises(CheckpointError, match="so another version or an edit wrote it") as caught:
        parse_layout(json.dumps({"crc32": content_checksum(content), **content}).encode(), folder / "layout.json")
    assert type(caught.value) is CheckpointError


def tensor(**changes) -> dict:
    """The description of a tensor that is in the file, but for the changes."""
    piece = {"file": "mp_rank_00/model.safetensors", "key": "embedding.word_embeddings.weight"}
    piece |= {"tp": 0, "pp": 0, "start": 0, "end": 32} | {
        key: changes.pop(key) for key in ("tp", "end") if key in changes
    }
    whole = {"shape": [8, 4], "shard": {"dim": 0, "parts": []}}
    return {**whole, "values": {"weight": {"dtype": "BF16", "pieces": [piece]}}, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "has format 'megatron_lite checkpoint', version 1; .* or a newer one"),
        ({"format": "other"}, "has format 'other', version 2"),
        ({"iteration": -1}, "iteration: Input should be greater than or equal to 0"),
        ({"files": {}}, "is in mp_rank_00/model.safetensors, which is not described"),
        ({"files": {"../../etc/passwd": {}}}, "files.*String should match pattern"),
        ({"tensors": {"a": {"shape": [1], "shard": {}, "values": {}}}}, "a has no weight"),
        (
            {"tensors": {"a": {"shape": [1], "shard": {}, "values": {"weight": {"dtype": "F8", "pieces": []}}}}},
            "a has the unknown dtype F8",
        ),
        ({"tensors": {"a": tensor(shape=[-1])}}, "tensors.a.shape.0: Input should be greater than or equal to 0"),
        ({"tensors": {"a": tensor(shard={"dim": 7, "parts": []})}}, "there is no dim 7 in"),
        ({"tensors": {"a": tensor(shard={"dim": 0, "parts": [3]})}}, r"parts \(3,\) of dim 0 do not add up"),
        ({"tensors": {"a": tensor(tp=5)}}, "a has a slice of tp 5, pp 0, outside of the grid"),
        ({"tensors": {"a": tensor(end=33)}}, "a has elements 0 to 33, its shard has 32"),
        ({"tensors": {"a": tensor(copy_of="b")}}, "is a copy of b, which is not described"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
    ],
)
def test_what_this_version_cannot_use_is_refused(folder, changes, message):
    """A description with a valid checksum can still be one that we do not understand."""
    text = json.loads(dump_layout(read_layout(folder)))
    text.pop("crc32")
    content = {**text, **changes}
    raw = json.dumps({"crc32": content_checksum(content), **content}).encode()
    with pytest.raises(CheckpointError, match=message):
        parse_layout(raw, folder / "layout.json")


def test_a_folder_without_layout_is_foreign(tmp_path):
    """Megatron-LM's folders have the same names; with our files in them, it is one of ours that has lost it."""
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(CheckpointError, match=r"has no layout\.json, so it is not a checkpoint of megatron_lite"):
        read_layout(tmp_path)
    (tmp_path / "mp_rank_00" / "model.safetensors").touch()
    with pytest.raises(DamagedCheckpoint, match=r"has tensors but no layout\.json. Restore it from a copy"):
        read_layout(tmp_path)


def test_a_layout_that_cannot_be_opened_says_why(tmp_path):
    (tmp_path / "layout.json").mkdir()
    with pytest.raises(CheckpointError, match=r"layout\.json: cannot be read: Is a directory"):
        read_layout(tmp_path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_to_the_text_passes(folder, data):
    """Flipped, lost or added bytes: the same layout (whitespace changed) or a CheckpointError, never anything else."""
    text = bytearray((folder / "layout.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "delete"]))
        if kind == "flip":
            text[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut" and place:
            del text[place:]
        elif kind == "insert":
            text[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif len(text) > 1:
            del text[place]
    try:
        assert parse_layout(bytes(text), folder) == read_layout(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)


def test_folders_have_megatrons_names():
    """Scripts look for them."""
    assert mp_rank_folder(3, 0, Grid(tp=4)) == "mp_rank_03"
    assert mp_rank_folder(3, 12, Grid(tp=4, pp=16)) == "mp_rank_03_012"
    assert iteration_of("iter_0000100") == 100 and iteration_of("iter_12345678") == 12345678
    assert iteration_of("iter_100") is None and iteration_of(".new-iter_0000100") is None


def test_a_folder_under_the_name_of_another_iteration_is_refused(tmp_path):
    """The log would have the one iteration, and the counters the other."""
    folder = save(tmp_path, 4, one_process()).rename(tmp_path / "iter_0000006")
    with pytest.raises(CheckpointError) as caught:
        read_layout(folder)
    assert str(caught.value) == f"{folder}: holds iteration 4. Rename it to iter_0000004"
    assert read_layout(folder.rename(tmp_path / "copy")).iteration == 4
