"""The rules of slices in layout.json: exact, small at any number of ranks, and bounded in the files of others too."""

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.checkpoint.layout import FileInfo, Layout, Rule, TensorLayout, Value, dump_layout, parse_layout
from megatron_lite.checkpoint.reshard import find_moves, rectangles
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import Shard

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    f"mp_rank_00/{kind}_dp_{dp:03d}.safetensors": {"bytes": 9, "header_crc32": "0" * 8}
    for kind in ("model", "optimizer")
    for dp in range(40)
}


def layout_with(rule: dict, shape: tuple[int, ...], dp: int = 40) -> Layout:
    """A layout of one tensor, `a`, whose weight has this rule."""
    values = {"weight": Value(dtype="F32", rules=(Rule(**rule),))}
    tensors = {"a": TensorLayout(shape=shape, shard=Shard(), values=values)}
    rest = {"iteration": 1, "saved_at": "", "state": {}, "config": {}}
    return Layout.model_validate({**rest, "grid": Grid(dp=dp), "tensors": tensors, "files": FILES})


@given(numel=st.integers(1, 60), chunk=st.integers(2, 70), shift=st.integers(0, 19), data=st.data())
def test_the_slices_of_a_rule_are_the_shard_and_a_reader_gets_those_that_it_wants(numel, chunk, shift, data):
    """An element without a slice could not be resumed; slices that no reader wants cost time each."""
    layout = layout_with({"pp": 0, "tp": (0, 1), "chunk": chunk, "shift": shift}, (numel,))
    slices = list(layout.slices("a", "weight"))
    assert [at for each in slices for at in range(each.start, each.end)] == list(range(numel))
    for each in slices:  # as the engine has defined it
        number = int(each.file.split("_dp_")[1][:3])
        assert each.start == max(0, number * chunk - shift) and each.end == min(numel, (number + 1) * chunk - shift)
    start = data.draw(st.integers(0, numel - 1))
    end = data.draw(st.integers(start + 1, numel))
    (target,) = rectangles((numel,), Shard(), 0, 1, start, end)
    moves = find_moves(layout, "a", "weight", [target], tp=0, pp=0, dp=0)
    wanted = [each for each in slices if each.start < end and start < each.end]
    assert [move.stored for move in moves] == wanted
    assert sum(move.target.numel for move in moves) == end - start


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"tp": (0, 2)}, "slices of tp 0 to 2, pp 0, outside of the grid"),
        ({"tp": (0, 0)}, "slices of tp 0 to 0, pp 0, outside of the grid"),
        ({"pp": 1}, "slices of tp 0 to 1, pp 1, outside of the grid"),
        ({"chunk": 1}, "slices of dp 0 to 1000000000000, outside of the grid"),
        ({"chunk": 10**12, "shift": 10**30}, "slices of dp 10+ to 10+1, outside of the grid"),
        ({"dp": (0, 1 << 60)}, "slices of dp 0 to .* outside of the grid"),
        ({"dp": (0, 2), "chunk": 10**12}, "slices of dp 0 to 1, outside of the grid"),
        ({"dp": (0, 1 << 38)}, "a is in mp_rank_00/model_dp_274877906943.safetensors, which is not described"),
        ({}, "a is in mp_rank_00/model.safetensors, which is not described"),
    ],
)
def test_a_rule_outside_of_the_grid_or_of_the_files_is_an_error(rule, message):
    """A few digits could otherwise make a reader list slices for years."""
    with pytest.raises(ValueError, match=message):
        layout_with({"pp": 0, "tp": (0, 1), **rule}, (10**12,), dp=1 << 39)


def test_a_rule_has_at_most_as_many_slices_as_there_are_files():
    """The author of layout.json may have named its first and last file."""
    ends = {f"mp_rank_00/model_dp_{at:03d}.safetensors": FileInfo(bytes=9, header_crc32="0" * 8) for at in (0, 10**9)}
    layout = layout_with({"pp": 0, "tp": (0, 1), "chunk": 9}, (90,), dp=1 << 39)
    rule = Rule(pp=0, tp=(0, 1), chunk=1)
    tensor = TensorLayout(shape=(10**9 + 1,), shard=Shard(), values={"weight": Value(dtype="F32", rules=(rule,))})
    with pytest.raises(ValueError, match="a is in more files, which is not described"):
        Layout.model_validate(dict(layout) | {"tensors": {"a": tensor}, "files": ends})


@pytest.mark.parametrize(("dp", "megabytes"), [(512, 5), (4096, 10)])
def test_the_layout_of_70b_under_fsdp_is_small(dp, megabytes):
    """Every rank reads it at a resume: 203 MB and 9 s with a list of the slices of 512 ranks."""
    text = dump_layout(runpy.run_path(str(ROOT / "benchmarks" / "layout_json.py"))["layout_of_70b"](dp))
    assert len(text) < megabytes * 1e6
    layout = parse_layout(text.encode(), Path("layout.json"))
    assert len(list(layout.slices("decoder.layers.0.mlp.linear_fc2.weight", "weight"))) == dp
