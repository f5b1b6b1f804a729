"""The statistics and differences of `inspect`, compared with plain arithmetic on full tensors."""

import math

import pytest
import torch

from megatron_lite.checkpoint.layout import Layout, read_layout
from megatron_lite.checkpoint.store import Opened
from megatron_lite.convert.examine import difference, names_and_kinds, statistics
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from tests.helpers.checkpoints import TABLE, contents, full_tensor, listed, one_process, save

FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"


def opened(root, version, **changes) -> Opened:
    folder = save(root, 1, one_process(), version=version, **changes)
    return Opened(folder, read_layout(folder))


def changed(version: int) -> dict:
    """Weights with one changed value, one NaN and one negative zero."""
    weights = contents(one_process(), version)["weights"]
    weights[FC2][1, 2] += 1.0
    weights[NORM][0] = math.nan
    return weights


def test_norm_and_number_of_non_finite_values(tmp_path):
    weights = contents(one_process(), 1)["weights"]
    weights[FC2][0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    with opened(tmp_path, 1, weights=weights) as checkpoint:
        found = statistics(checkpoint, FC2, "weight")
        rest = weights[FC2].double().flatten()[3:]
        assert found.not_finite == 3 and found.norm == pytest.approx(float(rest.norm()), rel=1e-12)
        moment = full_tensor(FC2, "exp_avg", 1, torch.float32).double()
        assert statistics(checkpoint, FC2, "exp_avg").norm == pytest.approx(float(moment.norm()), rel=1e-12)


def test_the_difference_of_equal_checkpoints_is_none_and_of_others_the_largest(tmp_path):
    with opened(tmp_path / "a", 1) as a, opened(tmp_path / "b", 1, weights=changed(1)) as b:
        found = {(name, kind): difference(a, b, name, kind) for name, kind in names_and_kinds(a.layout, b.layout)}
        assert len(found) == 4 * len(TABLE)
        differing = {key: value for key, value in found.items() if value.differing}
        assert differing.keys() == {(FC2, "weight"), (NORM, "weight")}
        assert differing[FC2, "weight"].differing == 1
        assert differing[FC2, "weight"].largest == pytest.approx(1.0, rel=0.01)
        assert differing[NORM, "weight"].largest == math.inf
        # NaN with the same bits is equal, also when another value differs
        both = changed(1)
        both[NORM][1] += 1.0
        with opened(tmp_path / "c", 1, weights=both) as c:
            nan_in_both = difference(b, c, NORM, "weight")
        assert nan_in_both.differing == 1 and nan_in_both.largest == pytest.approx(1.0, rel=0.01)
        assert difference(b, b, NORM, "weight").differing == 0


def test_tensors_of_only_one_checkpoint_are_reported(tmp_path):
    with opened(tmp_path / "a", 1) as a, opened(tmp_path / "b", 1, optimizer_state={}) as b:
        assert difference(a, b, FC2, "exp_avg") == "not in B"
        assert difference(b, a, "other", "weight") == "not in A and B"


def test_tensors_of_only_some_ranks_are_reported(tmp_path):
    """Local SGD saves such tensors; tensors that were not compared must not count as equal."""
    with opened(tmp_path / "a", 1) as a:
        content = listed(a.layout).model_dump()
        for stored in content["tensors"][FC2]["values"]["exp_avg"]["slices"]:
            stored["dp"] = 1
        with Opened(tmp_path / "a" / "iter_0000001", Layout.model_validate(content)) as b:
            assert difference(a, b, FC2, "exp_avg") == "not of the same data-parallel ranks in A and B"
        content["tensors"][FC2]["values"]["weight"]["slices"] = []
        with Opened(tmp_path / "a" / "iter_0000001", Layout.model_validate(content)) as b:
            assert difference(a, b, FC2, "weight") == "not of the same data-parallel ranks in A and B"
        content["tensors"][FC2]["values"]["exp_avg_sq"]["slices"][0]["end"] = 47
        with Opened(tmp_path / "a" / "iter_0000001", Layout.model_validate(content)) as b:
            assert difference(a, b, FC2, "exp_avg_sq") == "only 47 of 48 elements are in both"


def test_another_shape_is_reported(tmp_path):
    table = {**TABLE, FC2: TABLE["embedding.word_embeddings.weight"]}
    with (
        opened(tmp_path / "a", 1) as a,
        opened(tmp_path / "b", 1, table=table, **contents(one_process(), 1, table=table)) as b,
    ):
        assert difference(a, b, FC2, "weight") == (
            "[4, 12] split as Shard(dim=1, parts=()) in A, [8, 4] split as Shard(dim=0, parts=()) in B"
        )


def save_sharded(root, size: int) -> None:
    ctx = ParallelContext.create(Grid(tp=size), torch.device("cpu"), 60)
    save(root, 1, ctx, version=1, weights=changed_shard(ctx) if size == 4 else contents(ctx, 1)["weights"])


def changed_shard(ctx: ParallelContext) -> dict:
    weights = contents(ctx, 1)["weights"]
    if ctx.rank == 3:
        weights[FC2][1, 2] += 1.0
    return weights


def test_checkpoints_of_different_layouts_are_compared_value_by_value(ranks, tmp_path):
    for size in (2, 4):
        ranks(size, save_sharded, tmp_path / str(size), size)
    folders = [tmp_path / str(size) / "iter_0000001" for size in (2, 4)]
    with Opened(folders[0], read_layout(folders[0])) as a, Opened(folders[1], read_layout(folders[1])) as b:
        found = {(name, kind): difference(a, b, name, kind) for name, kind in names_and_kinds(a.layout, b.layout)}
        assert {key for key, value in found.items() if value.differing} == {(FC2, "weight")}
        assert found[FC2, "weight"].differing == 1
        assert statistics(a, FC2, "exp_avg").norm == pytest.approx(statistics(b, FC2, "exp_avg").norm, rel=1e-12)
