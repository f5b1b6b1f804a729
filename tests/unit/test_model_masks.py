"""Masks as ranges of keys, against their definitions."""

import pytest
import torch
from hypothesis import given, strategies

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.model.masks import Mask
from tests.helpers.masks import make_mask, masks_and_sizes

CPU = torch.device("cpu")


def definition(mask: Mask, batch: int, length: int) -> torch.Tensor:
    """True where a query sees a key, [b, s, s], condition by condition."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.ones(batch, length, length, dtype=torch.bool)
    if mask.causal:
        seen &= key <= query
    if mask.window:
        seen &= (query - key).abs() < mask.window
    if mask.lengths is not None:
        seen &= key < mask.lengths[:, None, None]
    if mask.documents is not None:
        seen &= mask.documents[:, :, None] == mask.documents[:, None, :]
    return seen


@given(masks_and_sizes())
def test_the_ranges_of_a_mask_are_the_keys_that_all_conditions_allow(sizes):
    """Every implementation relies on the ranges, so a wrong one would be wrong everywhere alike."""
    batch, length = sizes["batch"], sizes["length"]
    mask = make_mask(sizes["kinds"], batch=batch, length=length, seed=sizes["seed"], window=sizes["window"])
    dense = mask.dense(length, length, CPU)[:, 0]
    assert torch.equal(dense.expand(batch, -1, -1), definition(mask, batch, length))
    first, end = mask.ranges(length, length, CPU)
    assert (first.diff(dim=1) >= 0).all() and (end.diff(dim=1) >= 0).all()


@given(masks_and_sizes())
def test_the_rectangles_of_a_mask_cover_exactly_the_keys_that_a_query_sees(sizes):
    """sdpa makes a call for each rectangle."""
    batch, length = sizes["batch"], sizes["length"]
    kinds = tuple(kind for kind in sizes["kinds"] if kind != "window")
    mask = make_mask(kinds, batch=batch, length=length, seed=sizes["seed"])
    rows = mask.rectangles(length, length, CPU)
    seen = torch.zeros(len(rows), length, length, dtype=torch.bool)
    for row, areas in enumerate(rows):
        assert [area.q0 for area in areas] + [length] == [0] + [area.q1 for area in areas]  # all queries, in order
        for q0, q1, k0, k1, causal in areas:
            block = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
            seen[row, q0:q1, k0:k1] = block.tril() if causal else block
            assert not causal or (q0, q1) == (k0, k1)
    assert torch.equal(seen.expand(batch, -1, -1), definition(mask, batch, length))


@given(masks_and_sizes(), strategies.integers(1, 4))
def test_a_part_of_a_mask_has_the_rows_and_columns_of_the_full_mask(sizes, count):
    """Ring attention computes parts, and generation computes the newest queries."""
    batch, length, seed = sizes["batch"], sizes["length"], sizes["seed"]
    mask = make_mask(sizes["kinds"], batch=batch, length=length, seed=seed, window=sizes["window"])
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randperm(length, generator=generator)[:count].sort().values.int() for _ in range(2))
    full = definition(mask, batch, length)
    some = mask.part(queries[None], keys)
    dense = some.dense(len(queries), len(keys), CPU)[:, 0].expand(batch, -1, -1)
    assert torch.equal(dense, full[:, queries.long()][:, :, keys.long()])
    assert torch.equal(mask.part(queries[None]).dense(len(queries), length, CPU)[:, 0].expand(batch, -1, -1),
                       full[:, queries.long()])  # fmt: skip
    if mask.window:
        return
    for row, areas in enumerate(some.rectangles(len(queries), len(keys), CPU)):
        seen = torch.zeros(len(queries), len(keys), dtype=torch.int)
        for q0, q1, k0, k1, causal in areas:
            block = torch.ones(q1 - q0, k1 - k0, dtype=torch.int)
            seen[q0:q1, k0:k1] += block.tril() if causal else block
        assert torch.equal(seen, dense[row].int())  # each pair once


def test_each_row_of_a_part_can_have_other_queries():
    """In a batch of texts of unequal length, the newest tokens have different positions."""
    mask = Mask(window=3).part(torch.tensor([[1], [4]], dtype=torch.int32))
    assert mask.dense(1, 5, CPU)[:, 0, 0].int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]
    assert mask.narrowed(2).dense(1, 5, CPU)[:, 0, 0].int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]


def test_a_window_of_a_mask_is_made_once():
    """Otherwise every layer would compute the ranges again."""
    mask = make_mask(("causal", "documents"), batch=2, length=9)
    assert mask.with_window(3) is mask.with_window(3) and mask.with_window(0) is mask
    assert mask.with_window(3).documents is mask.documents and mask.with_window(3).window == 3
    assert mask.ranges(9, 9, CPU) is mask.ranges(9, 9, CPU)


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        (Mask(), ("causal",)),
        (Mask(causal=False), ("full",)),
        (make_mask(("causal", "window", "documents", "lengths"), batch=1, length=3),
         ("causal", "window", "lengths", "documents")),
    ],
)  # fmt: skip
def test_a_mask_names_its_conditions(mask, kinds):
    """The check of an implementation and the start lines name them."""
    assert mask.kinds == kinds


def test_a_mask_keeps_only_its_newest_result():
    """The causal mask lives as long as the program, and generation has a length for every token."""
    mask = Mask()
    for length in range(1, 20):
        assert mask.ranges(length, length, CPU).end.shape == (1, length)
    assert len(mask._cache) == 1


def test_a_window_narrows_a_mask_and_never_widens_it():
    """A caller's window and that of a block both hold."""
    mask = Mask(window=4)
    assert [mask.narrowed(window).window for window in (0, 2, 4, 9)] == [4, 2, 4, 4]
    assert [Mask().narrowed(window).window for window in (0, 2)] == [0, 2]


def test_wrong_masks_are_reported():
    """A document number that comes back would join two documents silently."""
    with pytest.raises(DataError, match="document ids decrease along a sequence; number the documents of a row in"):
        Mask(documents=torch.tensor([[0, 1, 0]]))
    with pytest.raises(DataError, match="a mask with causal needs as many queries as keys; got 3 and 4"):
        Mask().ranges(3, 4, CPU)
    with pytest.raises(ConfigError, match="the window of a mask is -1; use 0 for none, or a positive number of keys"):
        Mask(window=-1)
    with pytest.raises(DataError, match="a batch has 3 rows, and its mask has document ids for 1; give all rows"):
        Mask(documents=torch.zeros(1, 4)).check_batch(3)
    with pytest.raises(DataError, match="a batch has 3 rows, and its mask has lengths for 2; give all rows"):
        Mask(lengths=torch.ones(2)).check_batch(3)
    with pytest.raises(DataError, match="a sequence has 4 tokens, and 3 document ids; give one for each"):
        Mask(documents=torch.tensor([[0, 1, 1]])).ranges(4, 4, CPU)
    assert Mask(causal=False).ranges(3, 4, CPU).end.tolist() == [[4, 4, 4]]
