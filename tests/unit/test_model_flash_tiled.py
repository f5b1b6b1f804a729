"""FlashAttention in tiles: results against the dense reference, dropout, bytes, and what is never allocated."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.model.flash_tiled import (
    A100_BYTES,
    Sizes,
    TileGrid,
    Traffic,
    tiled_attention,
    tiled_attention_v1,
)
from megatron_lite.model.masks import CAUSAL, Mask
from tests.helpers.command import ROOT
from tests.helpers.masks import attention_inputs, hashed_dropout, make_mask, masks_and_sizes, mixed

VERSIONS = {1: tiled_attention_v1, 2: tiled_attention}
FULL = Mask(causal=False)
QUIET = {"dropout": 0.0, "softcap": 0.0}
CPU = torch.device("cpu")


def dense_attention(query, key, value, *, mask, scale, softcap, kept=1.0, bias=0.0):
    """All scores at once. `kept` is the factor of each probability that dropout draws."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = scale * query @ key.mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = mask.dense(query.shape[2], key.shape[2], CPU)
    scores = (scores + bias).masked_fill(~visible, -torch.inf)
    empty = ~visible.any(dim=-1, keepdim=True)
    probabilities = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    return (probabilities * kept) @ value, scores.logsumexp(dim=-1).detach()


def with_gradients(attend, leaves, grad, **options):
    """Output, log-sum-exp and the gradients of query, key, value and, where there is one, the bias."""
    out, lse = attend(*leaves[:3], **options, **dict(zip(["bias"], leaves[3:], strict=False)))
    return out, lse, *torch.autograd.grad(out, leaves, grad)


def fast_bytes(rows, leaves):
    """The fast memory in which a tile of keys has this many rows."""
    return 4 * rows * leaves[0].shape[-1] * leaves[0].element_size()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("version", VERSIONS)
@given(
    sizes=masks_and_sizes(max_length=70),
    softcap=st.sampled_from([0.0, 2.0]),
    rows=st.sampled_from([16, 23, 40, 256]),
    is_strided=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_tiles_give_the_dense_result(version, dtype, sizes, softcap, rows, is_strided):
    """All masks and compositions, ragged lengths, groups, head sizes and tile sizes; 16 is the smallest tile."""
    mask = make_mask(
        sizes["kinds"], batch=sizes["batch"], length=sizes["length"], seed=sizes["seed"], window=sizes["window"]
    )
    names = ("batch", "length", "groups", "head_size", "seed")
    *leaves, grad = attention_inputs(**{name: sizes[name] for name in names}, dtype=dtype)
    if is_strided:  # [s, b, n, d] in memory
        leaves = [x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_() for x in leaves]
    options = {"mask": mask, "scale": 0.3, "softcap": softcap}
    got = with_gradients(VERSIONS[version], leaves, grad, dropout=0.0, fast_bytes=fast_bytes(rows, leaves), **options)
    want = with_gradients(dense_attention, leaves, grad, **options)
    assert_close(got, want, rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kinds", [(), ("lengths",)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 50), (37, 80), (80, 37)])
def test_the_number_of_keys_may_differ_from_that_of_queries(version, kinds, num_queries, num_keys):
    """T_r and T_c differ then, and a loop over the wrong tiles would leave some out."""
    mask = make_mask(kinds, batch=2, length=num_keys)
    query, _, _, grad = attention_inputs(2, num_queries, 4, 8, seed=0, dtype=torch.float64)
    _, key, value, _ = attention_inputs(2, num_keys, 2, 8, seed=1, dtype=torch.float64)
    leaves, options = [query, key, value], {"mask": mask, "scale": 0.3}
    got = with_gradients(VERSIONS[version], leaves, grad, fast_bytes=1, **QUIET, **options)
    assert_close(got, with_gradients(dense_attention, leaves, grad, softcap=0.0, **options), rtol=0, atol=1e-10)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float16, 0.0), (torch.bfloat16, 0.0), (torch.bfloat16, 2.0)])
def test_16_bit_results_are_the_exact_ones_rounded(version, dtype, softcap):
    """Inputs and results are rounded to 16 bits and everything between is fp32. The rounded O also enters D, so
    gradients get a second rounding. With accumulators in 16 bits, errors would grow with the number of tiles."""
    *leaves, grad = attention_inputs(2, 150, 2, 16, seed=0, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = {"mask": CAUSAL, "scale": 0.25, "softcap": softcap}
    got = with_gradients(VERSIONS[version], leaves, grad, dropout=0.0, fast_bytes=1, **options)
    want = with_gradients(dense_attention, exact, grad.double(), **options)
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype, dtype, dtype]
    assert_close(got[1].double(), want[1], rtol=0, atol=1e-5)
    for ours, reference in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        assert_close(ours.double(), reference, rtol=0, atol=torch.finfo(dtype).eps * reference.abs().max().item())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_query_without_keys_has_zeros_and_no_nan(version):
    """exp(-inf - -inf) is nan, and one nan in dK would end a training."""
    mask = Mask(causal=False, lengths=torch.tensor([0, 20]))
    *leaves, grad = attention_inputs(2, 40, 2, 8, seed=0, dtype=torch.float32)
    out, lse, *gradients = with_gradients(VERSIONS[version], leaves, grad, mask=mask, scale=0.3, fast_bytes=1, **QUIET)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert all((x[0] == 0).all() for x in gradients)
    assert lse[1].isfinite().all() and all(x.isfinite().all() for x in gradients)
    # The window leaves no key to queries far behind the padding, in tiles that other queries need.
    mask = Mask(window=3, lengths=torch.tensor([3, 40]))
    out, lse, *gradients = with_gradients(VERSIONS[version], leaves, grad, mask=mask, scale=0.3, fast_bytes=1, **QUIET)
    assert (out[0, :, 5:] == 0).all() and (lse[0, :, 5:] == -torch.inf).all() and lse[0, :, :5].isfinite().all()
    assert all(x.isfinite().all() and (x[0, :, 5:] == 0).all() for x in gradients)


@pytest.mark.parametrize("version", VERSIONS)
def test_large_scores_do_not_overflow(version):
    """exp(88) is the largest in fp32, so the maximum must be subtracted, also when it changes between tiles."""
    *leaves, grad = attention_inputs(1, 60, 2, 8, seed=0, dtype=torch.float64)
    leaves = [x.detach().requires_grad_() for x in leaves]
    options = {"mask": CAUSAL, "scale": 300.0}
    got = with_gradients(VERSIONS[version], leaves, grad, fast_bytes=1, **QUIET, **options)
    assert_close(got, with_gradients(dense_attention, leaves, grad, softcap=0.0, **options), rtol=1e-10, atol=1e-10)
    small = [x.detach().float().requires_grad_() for x in leaves]
    out, lse, *gradients = with_gradients(VERSIONS[version], small, grad.float(), fast_bytes=1, **QUIET, **options)
    assert lse.max() > 500 and all(x.isfinite().all() for x in (out, lse, *gradients))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_derivative_is_an_error(version):
    """Backward is written by hand, and autograd would differentiate it wrongly."""
    query, key, value, _ = attention_inputs(1, 20, 2, 8, seed=0, dtype=torch.float64)
    out, lse = VERSIONS[version](query, key, value, mask=CAUSAL, scale=0.3, **QUIET)
    (gradient,) = torch.autograd.grad((out**2).sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    assert not lse.requires_grad


def kept_factors(attend, *, rows, seed, dropout=0.3, batch=2, length=48):
    """Z of a full mask: with equal scores and an identity as value, out is Z / length."""
    query, key = torch.zeros(batch, 4, length, length), torch.zeros(batch, 2, length, length)
    value = torch.eye(length).expand(batch, 2, length, length)
    torch.manual_seed(seed)
    options = {"mask": FULL, "scale": 1.0, "softcap": 0.0, "fast_bytes": fast_bytes(rows, [query])}
    return length * attend(query, key, value, dropout=dropout, **options)[0]


def test_the_kept_probabilities_do_not_depend_on_version_and_tiles():
    """Backward visits tiles in another order, and a resumed run may have other tiles."""
    want = kept_factors(tiled_attention, rows=256, seed=5) > 0.5
    for version, rows in ((1, 16), (1, 23), (2, 16), (2, 17), (2, 40)):
        assert torch.equal(kept_factors(VERSIONS[version], rows=rows, seed=5) > 0.5, want)
    assert not torch.equal(kept_factors(tiled_attention, rows=256, seed=6) > 0.5, want)


def test_the_kept_probabilities_are_those_of_the_hash_in_integers():
    """Another hash would change runs with dropout when they resume under a new version, or on another device."""
    kept = kept_factors(tiled_attention, rows=16, seed=3, batch=2) > 0.5
    torch.manual_seed(3)
    seed = int(torch.randint(2**32, ()))
    for head, query, key in ((0, 0, 0), (1, 47, 2), (3, 20, 47), (7, 9, 30), (7, 9, 31), (7, 10, 31), (6, 10, 31)):
        hashed = mixed(mixed(mixed(head ^ seed) ^ query) ^ mixed(key))
        assert kept[head // 4, head % 4, query, key] == (hashed >= int(0.3 * 2**32))


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_positions_are_independent(dropout):
    """Bounds are six standard errors of means and of correlations, of which there are some hundreds."""
    factors = kept_factors(tiled_attention, rows=64, seed=0, dropout=dropout, batch=3, length=96)
    kept = factors > 0.5
    assert_close(factors, kept / (1 - dropout))
    kept, keep = kept.double(), 1 - dropout
    deviation = (keep * dropout) ** 0.5
    for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)):  # all, then a head, a key, a query
        count = math.prod(kept.shape[axis] for axis in axes)
        assert ((kept.mean(axes) - keep).abs() < 6 * deviation / count**0.5).all()
    normal = (kept - keep) / deviation
    for axis in range(4):
        for shift in (1, 2):
            products = normal * normal.roll(shift, axis)
            assert abs(products.mean()) < 6 / products.numel() ** 0.5


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("kinds", "softcap"), [((), 0.0), (("causal", "documents"), 2.0)])
def test_with_dropout_results_are_those_of_the_reference_with_the_same_kept_matrix(version, kinds, softcap):
    """If backward drew another matrix, losses would be right and gradients wrong. Its tiles are computed from the
    seed alone: draws between forward and backward, and other tiles, do not matter."""
    length, mask = 48, make_mask(kinds, batch=2, length=48)
    kept = (kept_factors(VERSIONS[version], rows=48, seed=7) > 0.5).double() / 0.7
    *leaves, grad = attention_inputs(2, length, 2, 8, seed=0, dtype=torch.float64)
    options = {"mask": mask, "scale": 0.3, "softcap": softcap}
    want = with_gradients(dense_attention, leaves, grad, kept=kept, **options)
    torch.manual_seed(7)
    out, lse = VERSIONS[version](*leaves, dropout=0.3, fast_bytes=1, **options)
    torch.rand(3)
    assert_close((out, lse, *torch.autograd.grad(out, leaves, grad)), want, rtol=0, atol=1e-10)


def biases(*sizes, dtype=torch.float64):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(3), dtype=dtype).requires_grad_()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kinds", [(), ("causal", "window"), ("lengths",), ("causal", "documents")])
@pytest.mark.parametrize("sizes", [(2, 4, 45), (1, 4, 45), (2, 1, 1), (1, 4, 1), (1, 1, 1)])
def test_a_bias_and_its_gradient_are_those_of_the_reference(version, kinds, sizes):
    """Of rows, heads and queries that share a bias, a tile that is not added would train a wrong table."""
    length, mask = 45, make_mask(kinds, batch=2, length=45)
    *leaves, grad = attention_inputs(2, length, 2, 8, seed=0, dtype=torch.float64)
    leaves.append(biases(*sizes, length))
    options = {"mask": mask, "scale": 0.3, "softcap": 2.0}
    got = with_gradients(VERSIONS[version], leaves, grad, dropout=0.0, fast_bytes=1, **options)
    assert_close(got, with_gradients(dense_attention, leaves, grad, **options), rtol=0, atol=1e-10)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bias_has_fewer_queries_than_keys_and_dropout(version):
    """Cross attention; and P, which dropout changes, is not the one of the gradient of a bias."""
    query, _, _, grad = attention_inputs(2, 37, 4, 8, seed=0, dtype=torch.float64)
    _, key, value, _ = attention_inputs(2, 80, 2, 8, seed=1, dtype=torch.float64)
    leaves, options = [query, key, value, biases(1, 4, 37, 80)], {"mask": FULL, "scale": 0.3}
    torch.manual_seed(4)
    got = with_gradients(VERSIONS[version], leaves, grad, fast_bytes=1, dropout=0.3, softcap=0.0, **options)
    torch.manual_seed(4)
    kept = hashed_dropout(torch.ones(2, 4, 37, 80, dtype=torch.float64), 0.3, int(torch.randint(2**32, ())))
    want = with_gradients(dense_attention, leaves, grad, softcap=0.0, kept=kept, **options)
    assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("version", VERSIONS)
def test_forward_draws_one_seed_and_only_with_dropout(version):
    """More draws would change the rest of a run with the model's attention."""
    *leaves, _ = attention_inputs(1, 40, 2, 8, seed=0, dtype=torch.float32)
    torch.manual_seed(0)
    torch.randint(2**32, ())
    after_one = torch.get_rng_state()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    VERSIONS[version](*leaves, mask=CAUSAL, scale=1.0, **QUIET)[0].sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    VERSIONS[version](*leaves, mask=CAUSAL, scale=1.0, dropout=0.2, softcap=0.0)[0].sum().backward()
    assert torch.equal(torch.get_rng_state(), after_one)


def measured(version, b, n, g, num_queries, num_keys, d, dtype, mask, memory):
    """Bytes of forward and of backward that the counter reports, and the sizes for the closed forms."""
    query = torch.zeros(b, n, num_queries, d, dtype=dtype, requires_grad=True)
    key, value = (torch.zeros(b, g, num_keys, d, dtype=dtype, requires_grad=True) for _ in range(2))
    traffic = Traffic()
    out, _ = VERSIONS[version](query, key, value, mask=mask, scale=1.0, fast_bytes=memory, traffic=traffic, **QUIET)
    forward = traffic.num_bytes
    out.backward(out)
    e = query.element_size()
    sizes = Sizes(num_queries, num_keys, d, r=n // g, e=e, a=max(e, 4), M=memory, causal=mask.causal)
    return (forward, traffic.num_bytes - forward), sizes


def closed_forms(version, sizes):
    return sizes.bytes_v1() if version == 1 else sizes.bytes_v2()


@pytest.mark.parametrize("version", VERSIONS)
@given(
    batch=st.integers(1, 2),
    groups=st.sampled_from([1, 2, 4]),
    lengths=st.tuples(st.integers(1, 130), st.integers(1, 130)),
    d=st.sampled_from([4, 10, 32]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    is_causal=st.booleans(),
    memory=st.integers(1, 20_000),
)
@settings(max_examples=80, deadline=None)
def test_the_counted_bytes_are_exactly_the_closed_form(version, batch, groups, lengths, d, dtype, is_causal, memory):
    """The table of the page on attention comes from the closed forms, and says what an algorithm really moves."""
    num_queries, num_keys = (lengths[0], lengths[0]) if is_causal else lengths
    mask = CAUSAL if is_causal else FULL
    counted, sizes = measured(version, batch, 4, groups, num_queries, num_keys, d, dtype, mask, memory)
    assert counted == tuple(batch * groups * moved for moved in closed_forms(version, sizes))


def slopes(memories, moved):
    """d log(bytes) / d log(M) between neighbouring sizes of fast memory."""
    logs = [(math.log(memory), math.log(count)) for memory, count in zip(memories, moved, strict=True)]
    return [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(logs)]


@pytest.mark.parametrize("version", VERSIONS)
def test_twice_the_fast_memory_halves_the_bytes(version):
    """The term N^2 d^2 / M of the papers. Terms that are linear in N make the slope smaller by about 1.4 / T_c in
    version 1, and T_c is 32 or more here."""
    memories = [16 * 1024, 32 * 1024]  # tiles of 32 and 64 rows, which divide N
    counted = [measured(version, 1, 1, 1, 2048, 2048, 64, torch.float16, FULL, memory)[0] for memory in memories]
    wide = [2**exponent for exponent in range(13, 18)]
    computed = [closed_forms(version, Sizes(16384, 16384, 64, 1, 2, 4, memory, False)) for memory in wide]
    for direction in range(2):
        found = slopes(memories, [both[direction] for both in counted])
        found += slopes(wide, [both[direction] for both in computed])
        assert found == pytest.approx([-1] * 5, abs=0.05)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_causal_mask_moves_about_half_of_the_bytes(version):
    """Of T x T tiles, T (T + 1) / 2 have a visible pair: 53% for 16 tiles, and linear terms add some."""
    (causal, _), (full, _) = (
        measured(version, 1, 1, 1, 512, 512, 32, torch.float16, mask, 4 * 32 * 32 * 2) for mask in (CAUSAL, FULL)
    )
    for direction in range(2):
        assert 0.53 < causal[direction] / full[direction] < 0.58


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["window", "documents"])
def test_bytes_of_windows_and_documents_grow_linearly(version, kind):
    """With a mask inside of tiles only, they would grow by a factor of four."""
    moved = []
    for length in (512, 1024):
        documents = (torch.arange(length) // 64)[None]
        mask = CAUSAL.with_window(64) if kind == "window" else Mask(documents=documents)
        counted, _ = measured(version, 1, 1, 1, length, length, 32, torch.float16, mask, 4 * 32 * 32 * 2)
        moved.append(counted)
    assert all(1.9 < moved[1][direction] / moved[0][direction] < 2.1 for direction in range(2))


def test_the_forward_of_version_2_moves_less_than_version_1_and_both_less_than_math():
    """Version 1 loads and stores O, l and m in every step; math stores and loads S and P."""
    for length in (512, 1024, 16384):
        sizes = Sizes(length, length, 64, r=1, e=2, a=4, M=A100_BYTES, causal=False)
        assert sizes.bytes_v2()[0] < sizes.bytes_v1()[0] < sizes.bytes_math()


def test_tile_sizes_are_those_of_the_papers():
    """B_c = ceil(M / 4d) and B_r = min(B_c, d) in version 1, M / 4d in version 2: 98,304 values are 384 rows of 256."""
    sizes = Sizes(1024, 1024, 64, r=1, e=2, a=4, M=A100_BYTES, causal=False)
    assert sizes.tiles(1) == (64, 384) and sizes.tiles(2) == (384, 384)
    assert sizes._replace(M=A100_BYTES + 1).tiles(1) == (64, 385)
    assert sizes._replace(M=A100_BYTES + 1).tiles(2) == (384, 384)
    assert sizes._replace(M=1, N_q=9).tiles(2) == (9, 16)


@given(masks_and_sizes(max_length=70), st.integers(1, 20), st.integers(1, 20))
@settings(deadline=None)
def test_a_skipped_tile_has_no_visible_pair_and_a_full_tile_has_all(sizes, B_r, B_c):
    """A tile that is skipped by mistake loses keys; a full one is not masked."""
    batch, length = sizes["batch"], sizes["length"]
    mask = make_mask(sizes["kinds"], batch=batch, length=length, seed=sizes["seed"], window=sizes["window"])
    grid, visible = TileGrid(mask, length, length, B_r, B_c, CPU), mask.dense(length, length, CPU)
    for i, rows in enumerate(grid.rows):
        for j, columns in enumerate(grid.columns):
            pairs, kind = visible[..., rows, columns], grid.kind(i, j)
            assert (kind == "full") == pairs.all()
            assert kind != "skipped" or not pairs.any()
            if "lengths" not in sizes["kinds"] and batch == 1:  # ranges of neighbours touch
                assert (kind == "skipped") == (not pairs.any())


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return result


@pytest.mark.parametrize("attend", [*VERSIONS.values(), dense_attention])
def test_only_the_reference_allocates_all_scores(attend):
    """600 tokens of head size 8: no tensor is larger than Q, which has 4,800 elements; all scores are 360,000."""
    *leaves, grad = attention_inputs(1, 600, 1, 8, seed=0, dtype=torch.float32, heads=1)
    options = {"mask": make_mask(("causal", "lengths"), batch=1, length=600), "scale": 0.3, "softcap": 2.0}
    if attend is not dense_attention:
        options |= {"dropout": 0.1, "fast_bytes": fast_bytes(64, leaves)}
    with LargestTensor() as seen:
        with_gradients(attend, leaves, grad, **options)
    if attend is dense_attention:
        assert seen.largest == 600 * 600
        return
    assert seen.largest == 600 * 8
    *leaves, grad = attention_inputs(3, 600, 1, 8, seed=0, dtype=torch.float32, heads=1)
    with LargestTensor() as seen:
        with_gradients(attend, [*leaves, biases(1, 1, 600, 600)], grad, **options | {"mask": CAUSAL})
    assert seen.largest == 600 * 600  # of the bias, which the three rows share


def test_the_picture_of_tiles_is_drawn(tmp_path):
    """The tool is no part of the package, so nothing else would notice that it breaks."""
    path = tmp_path / "tiles.svg"
    words = [sys.executable, "tools/draw_attention.py", "--out", str(path)]
    subprocess.run(words, cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)})
    assert path.read_text().count("<path") > 1000  # a shape for each of 4 x 256 tiles
