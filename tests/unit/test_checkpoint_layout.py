"""layout.json: its content is read back exactly, and any damage is an error."""

import json
import math
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


def test_a_layout_is_read_back_exactly(folder):
    """Floats, shards with fused parts and the grid included."""
    layout = read_layout(folder)
    text = dump_layout(layout)
    assert parse_layout(text.encode(), folder) == layout
    assert layout.state["loss_scale"] == 0.1
    assert layout.tensors["decoder.layers.0.self_attention.linear_qkv.weight"].shard.parts == (8, 4, 4)
    line = next(line for line in text.splitlines() if "linear_fc2" in line)
    assert '"shape": [4, 12], "shard": {"dim": 1, "parts": [], "units": []}' in line


def test_checksums_equal_those_of_zlib():
    """Other programs can compute them, and older checkpoints contain them."""
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
            lambda text: text.replace(b'"version": 3', b'"version": 2', 1),
            "damaged or edited, its checksum is not",
        ),
        (lambda text: text.replace(b'"iteration": 1', b'"iteration": 2', 1), "its checksum is not"),
    ],
)
def test_the_error_of_a_damaged_layout_names_the_path_and_the_remedy(tmp_path, folder, damage, message):
    path = tmp_path / "layout.json"
    path.write_bytes(damage((folder / "layout.json").read_bytes()))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_layout(tmp_path)
    assert str(caught.value).startswith(str(path)) and "latest_checkpointed_iteration.txt" in str(caught.value)


def test_an_unknown_field_with_a_correct_checksum_is_not_damage(folder):
    """Another version wrote it, so renaming it as damaged would lose a good checkpoint."""
    text = json.loads(dump_layout(read_layout(folder)))
    text.pop("crc32")
    content = {**text, "surprise": 1}
    with pytest.raises(CheckpointError, match="not of this version") as caught:
        parse_layout(json.dumps({"crc32": content_checksum(content), **content}).encode(), folder / "layout.json")
    assert type(caught.value) is CheckpointError


def tensor(**changes) -> dict:
    """The description of a tensor in the checkpoint, with changes."""
    slice_ = {"file": "mp_rank_00/model.safetensors", "key": "a"}
    slice_ |= {"tp": 0, "pp": 0, "start": 0, "end": 32} | {
        key: changes.pop(key) for key in ("tp", "end") if key in changes
    }
    full = {"shape": [8, 4], "shard": {"dim": 0, "parts": [], "units": []}}
    return {**full, "values": {"weight": {"dtype": "BF16", "pieces": [slice_]}}, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "has format 'megatron_lite checkpoint', version 1; .* or a newer one"),
        ({"format": "other"}, "has format 'other', version 3"),
        ({"iteration": -1}, "iteration: Input should be greater than or equal to 0"),
        ({"files": {}}, "is in mp_rank_00/model.safetensors, which is not described"),
        ({"files": {"../../etc/passwd": {}}}, "files.*String should match pattern"),
        ({"tensors": {"a": {"shape": [1], "shard": {}, "values": {}}}}, "a has no weight"),
        (
            {"tensors": {"a": {"shape": [1], "shard": {}, "values": {"weight": {"dtype": "F8", "pieces": []}}}}},
            "weight of a has the dtype F8",
        ),
        ({"tensors": {"a": tensor(shape=[-1])}}, "tensors.a.shape.0: Input should be greater than or equal to 0"),
        ({"tensors": {"a": tensor(shard={"dim": 7, "parts": [], "units": []})}}, "there is no dim 7 in"),
        ({"tensors": {"a": tensor(shard={"dim": 0, "parts": [3]})}}, r"parts \(3,\) of dim 0 do not add up"),
        ({"tensors": {"a": tensor(shard={"dim": 0, "parts": [-8, 16]})}}, r"parts \(-8, 16\) of dim 0 do not add up"),
        ({"tensors": {"a": tensor(copy_of="\ud800")}}, "cannot be read as JSON .*surrogates"),
        ({"tensors": {"a": tensor(shard={"dim": 1, "units": [1]})}}, r"parts \(\) of dim 1 do not add up"),
        ({"tensors": {"a": tensor(tp=5)}}, "a has a slice of tp 5, pp 0, outside of the grid"),
        ({"tensors": {"a": tensor(end=33)}}, "a has elements 0 to 33, its shard has 32"),
        ({"tensors": {"a": tensor(copy_of="b")}}, "is a copy of b, which is not described"),
        ({"tensors": {"b": tensor()}}, "weight of b has the key a"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"origin": {"tokenizer": 7}}, "origin.tokenizer: Input should be a valid string"),
        ({"origin": {"model_provider": ["a"]}}, "origin.model_provider: Input should be a valid string"),
        ({"origin": {"token_ids": {"eos_token_id": "x"}}}, "origin.token_ids.eos_token_id"),
        ({"origin": {"init_version": "x"}}, "origin.init_version: Input should be a valid integer"),
        ({"origin": {"corpora": "x"}}, "origin.corpora: Input should be a valid list"),
        ({"origin": {"corpora": [{"idx": {}, "bin": {"bytes": 1}}]}}, "origin.corpora.0.idx.sequences: Field required"),
        ({"state": {"train": [1]}}, "state.train: Input should be a valid dictionary"),
        ({"state": {"adam_steps": -1}}, "state.adam_steps: Input should be greater than or equal to 0"),
        ({"state": {"loss_scaler": {"scale": "x"}}}, "state.loss_scaler.scale"),
        ({"state": {"loss_scaler": {"scale": 0}}}, "state.loss_scaler.scale: Input should be greater than 0"),
        ({"state": {"loss_scaler": {"clean_steps": math.nan}}}, "state.loss_scaler.clean_steps"),
    ],
)
def test_an_invalid_description_is_an_error(folder, changes, message):
    """A description with a correct checksum can still have unknown or inconsistent content."""
    text = json.loads(dump_layout(read_layout(folder)))
    text.pop("crc32")
    content = {**text, **changes}
    raw = json.dumps({"crc32": content_checksum(content), **content}).encode()
    with pytest.raises(CheckpointError, match=message):
        parse_layout(raw, folder / "layout.json")


def test_the_error_of_a_folder_without_layout_distinguishes_damage_from_another_program(tmp_path):
    """Megatron-LM's folders have the same names. A folder with safetensors files has lost its layout.json."""
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(CheckpointError, match=r"has no layout\.json; import it with `megatron-lite convert`"):
        read_layout(tmp_path)
    (tmp_path / "mp_rank_00" / "model.safetensors").touch()
    with pytest.raises(DamagedCheckpoint, match=r"has tensors but no layout\.json. Restore a copy"):
        read_layout(tmp_path)


def test_the_error_of_a_layout_that_cannot_be_opened_names_the_reason(tmp_path):
    (tmp_path / "layout.json").mkdir()
    with pytest.raises(CheckpointError, match=r"layout\.json: cannot be read: Is a directory"):
        read_layout(tmp_path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_to_the_text_is_an_error(folder, data):
    """Flipped, deleted or inserted bytes give a CheckpointError, or the same layout if only whitespace changed."""
    text = bytearray((folder / "layout.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(["flip", "truncate", "insert", "delete"]))
        if kind == "flip":
            text[place] ^= data.draw(st.integers(1, 255))
        elif kind == "truncate" and place:
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
    """Scripts search for these names."""
    assert mp_rank_folder(3, 0, Grid(tp=4)) == "mp_rank_03"
    assert mp_rank_folder(3, 12, Grid(tp=4, pp=16)) == "mp_rank_03_012"
    assert iteration_of("iter_0000100") == 100 and iteration_of("iter_12345678") == 12345678
    assert iteration_of("iter_100") is None and iteration_of(".new-iter_0000100") is None


def test_a_folder_named_after_another_iteration_is_an_error(tmp_path):
    """The log and the counters would show different iterations."""
    folder = save(tmp_path, 4, one_process()).rename(tmp_path / "iter_0000006")
    with pytest.raises(CheckpointError) as caught:
        read_layout(folder)
    assert str(caught.value) == f"{folder}: is of another iteration. Rename it to iter_0000004"
    assert read_layout(folder.rename(tmp_path / "copy")).iteration == 4
