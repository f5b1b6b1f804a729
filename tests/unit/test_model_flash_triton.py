"""FlashAttention in Triton: results of the interpreter against the dense reference in fp64, errors, and compilation."""

import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.errors import ConfigError
from megatron_lite.model.flash_tiled import tiled_attention
from tests.helpers import interpreted_models, parity
from tests.helpers.triton_cases import (
    Case,
    compiled,
    interpreted,
    reference,
    skip_where_the_interpreter_fails,
    with_gradients,
)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

# Tiles are small where a case needs several of all kinds: full ones, and ones on the left and on the right.
MASKS = {
    "full": Case(()),
    "causal": Case(("causal",), length=100),
    "window": Case(("window",), length=100, window=40),
    "causal window": Case(("causal", "window"), length=100, window=60, tiles=(16, 32)),
    "narrow window": Case(("causal", "window"), window=3),
    "lengths": Case(("lengths",), batch=3, lengths=(70, 41, 0)),
    "causal lengths": Case(("causal", "lengths"), batch=2, lengths=(50, 1)),
    "window lengths": Case(("causal", "window", "lengths"), batch=2, window=9, lengths=(20, 60)),
    "documents": Case(("documents",), batch=2),
    "causal documents": Case(("causal", "documents"), batch=2),
    "all conditions": Case(("causal", "window", "lengths", "documents"), batch=2, heads=2, window=5, lengths=(40, 70)),
}
SHAPES = {
    "2 groups of 2 heads": Case(heads=4, groups=2),
    "as many groups as heads": Case(heads=3, groups=3),
    "1 query": Case((), length=1, num_keys=50),
    "fewer queries": Case((), length=37, num_keys=100, heads=2),
    "more queries": Case(("lengths",), length=100, num_keys=37, batch=2, lengths=(20, 37)),
    "tokens fill the tiles": Case(length=96),
    "head size 40": Case(head_size=40),
    "head size 64, tiles of the table": Case(length=130, head_size=64, tiles=None),
    "head size 80": Case(length=150, head_size=80, tiles=(64, 64)),
    "head size 128": Case(length=150, head_size=128, tiles=(64, 64)),
    "head size 256": Case(length=150, head_size=256, tiles=(64, 64)),
    "512 tokens": Case(("causal", "documents"), length=512, head_size=64, tiles=(128, 64)),
}
LAYOUTS = {layout: Case(length=40, batch=2, heads=2, layout=layout) for layout in ("fused", "transposed", "expanded")}
SOFTCAPS = {
    "softcap": Case(softcap=1.5),
    "large softcap": Case(softcap=50.0),
    "saturated softcap": Case(("lengths",), softcap=0.5, scale=3.0, batch=2, lengths=(0, 70)),
}
PARTS = {
    "causal in 2 parts": Case(heads=4, groups=2, parts=2),
    "documents and a window in 3 parts": Case(("causal", "window", "documents"), batch=2, softcap=1.5, parts=3),
}
BIASES = {
    "a bias for all rows": Case(heads=4, groups=2, batch=2, bias=(1, 4, 70)),
    "a bias for each row": Case(("lengths",), batch=2, heads=2, bias=(2, 2, 70), lengths=(70, 33)),
    "a vector for each row": Case(("causal", "window"), batch=2, heads=2, softcap=1.5, bias=(2, 1, 1)),
    "a vector for each head": Case(("causal", "documents"), batch=2, heads=4, groups=2, bias=(1, 4, 1)),
    "a bias of fewer queries": Case((), length=37, num_keys=100, heads=2, bias=(1, 2, 37)),
}
DROPOUTS = {
    "dropout": Case(heads=4, groups=2, batch=2, dropout=0.3),
    "dropout of fewer queries": Case((), length=37, num_keys=100, heads=2, dropout=0.6, tiles=(16, 64)),
    "dropout and a bias": replace(MASKS["all conditions"], softcap=1.5, dropout=0.1, bias=(1, 2, 70), tiles=(64, 16)),
}
FP32 = MASKS | SHAPES | LAYOUTS | SOFTCAPS | PARTS | BIASES | DROPOUTS
FP16 = {
    f"{name} fp16": replace(FP32[name], dtype=torch.float16)
    for name in (
        *("causal", "all conditions", "2 groups of 2 heads", "head size 80", "head size 256", "softcap"),
        "dropout and a bias",
    )
} | {"tiles of the table fp16": Case(length=300, head_size=128, tiles=None, dtype=torch.float16)}
OTHERS = {
    "causal again": FP32["causal"],
    "2 groups of 2 heads again": FP32["2 groups of 2 heads"],
    "large scores": Case(scale=300.0),
    "bf16": Case(dtype=torch.bfloat16),
}
CASES = FP32 | FP16 | OTHERS
# Another case has the same masks, layout or dtype with other sizes.
IN_SOAK = {
    *("narrow window", "documents", "as many groups as heads", "head size 40", "head size 128", "large softcap"),
    *("all conditions fp16", "2 groups of 2 heads fp16", "head size 80 fp16", "2 groups of 2 heads again"),
}


def named(names) -> list:
    """Parameters with these names, some of them for `make soak` only."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in IN_SOAK)) for name in names]


class Results:
    """The results by name. One process computes those of `make test`, another one those of `make soak` only."""

    def __init__(self, new_folder):
        self._new_folder, self._by_name = new_folder, {}

    def __getitem__(self, name):
        if name not in self._by_name:
            together = {other: CASES[other] for other in CASES if (other in IN_SOAK) == (name in IN_SOAK)}
            self._by_name |= interpreted(together, self._new_folder("triton"))
        return self._by_name[name]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    skip_where_the_interpreter_fails()
    return Results(tmp_path_factory.mktemp)


def reference_of(case):
    *leaves, grad = case.inputs()
    return reference(leaves, grad, dropout=case.dropout, **case.options())


@pytest.mark.parametrize("name", named(FP32))
def test_the_kernels_give_the_dense_result(results, name):
    """Output, log-sum-exp and gradients. Sums of up to 150 or 512 terms of order 1 round by 2e-6 in fp32.

    Gradients of a bias are sums over rows, heads and queries. Another dropout in backward, or one before the sum l,
    would change gradients by tenths.
    """
    got, want = results[name], reference_of(FP32[name])
    assert all(x.dtype == torch.float32 for x in got)
    assert_close([x.double() for x in got], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", named(FP16))
def test_fp16_results_are_the_exact_ones_rounded(results, name):
    """Kernels round P or dS, O, which enters D, and the results, each by half an eps of its size. With sums in fp16,
    errors would grow with the number of tiles. The log-sum-exp has no rounding to fp16."""
    got, want = results[name], reference_of(FP16[name])
    assert [x.dtype for x in got] == [torch.float16, torch.float32, *(len(got) - 2) * [torch.float16]]
    assert_close(got[1].double(), want[1], rtol=0, atol=1e-5)
    for ours, exact in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        assert_close(ours.double(), exact, rtol=0, atol=1.5 * 2**-10 * exact.abs().max().item())


@pytest.mark.parametrize(
    "name", ["causal", "all conditions", "2 groups of 2 heads", "more queries", "softcap", *DROPOUTS]
)
def test_the_kernels_and_the_tiled_loops_agree(results, name):
    """They are the same algorithm twice; a reader may compare them line by line. A seed keeps the same probabilities,
    in tiles of any size."""
    *leaves, grad = FP32[name].inputs()
    want = with_gradients(tiled_attention, leaves, grad, dropout=FP32[name].dropout, **FP32[name].options())
    assert_close(results[name], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["lengths", "window lengths", "saturated softcap"])
def test_a_query_without_keys_has_zeros_and_no_nan(results, name):
    """exp(-inf - -inf) is nan, and one nan in dK would end a training."""
    out, lse, *gradients = results[name]
    mask, (num_queries, num_keys) = FP32[name].mask(), (out.shape[2], gradients[1].shape[2])
    visible = mask.dense(num_queries, num_keys, torch.device("cpu"))[:, 0]
    without_keys, without_queries = ~visible.any(2), ~visible.any(1)
    assert without_keys.any() and without_queries.any()
    assert torch.equal(lse == -torch.inf, without_keys[:, None].expand_as(lse))
    for x, empty in zip((out, *gradients), [*2 * [without_keys], *2 * [without_queries]], strict=True):
        assert (x[empty[:, None].expand(x.shape[:3])] == 0).all() and x.isfinite().all()


@pytest.mark.parametrize("name", ["causal", pytest.param("2 groups of 2 heads", marks=pytest.mark.soak)])
def test_two_runs_give_the_same_bits(results, name):
    """Atomic additions would sum in another order each time."""
    assert all(torch.equal(x, y) for x, y in zip(results[name], results[f"{name} again"], strict=True))


def test_large_scores_do_not_overflow(results):
    """exp(88) is the largest in fp32, so the maximum must be subtracted, also when it changes between tiles."""
    out, lse, *gradients = results["large scores"]
    assert lse.max() > 500 and all(x.isfinite().all() for x in (out, lse, *gradients))
    want = reference_of(OTHERS["large scores"])
    assert_close(lse.double(), want[1], rtol=1e-6, atol=0)
    assert_close(out.double(), want[0], rtol=0, atol=1e-2)  # scores of 5,000 are rounded by 2e-4, and so is log P


def test_a_t5_trains_on_the_kernels(tmp_path):
    """Its blocks share one bias, cross attention has none, and padding hides keys: a gradient lost between them would
    change the second step. Rounding in fp32, and Adam's quotients of it, stay below 1e-5."""
    sizes = {"train__micro_batch_size": 2, "train__global_batch_size": 2, "model__head_dim": 16}
    got, want = interpreted_models.interpreted("t5", tmp_path, **sizes), parity.train("t5", "fp32", 2, **sizes)
    assert {name: value for name, value in parity.differences(got, want).items() if value > 1e-5} == {}


def test_the_interpreter_reports_bf16(results):
    """Its products in bf16 are wrong, without an error."""
    message = "model.attention is triton: Triton's interpreter computes wrong results in bf16; use math or tiled"
    assert results["bf16"].startswith(message)


def test_a_missing_triton_is_an_error_of_the_config(monkeypatch):
    """An ImportError would not name the option."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megatron_lite.model.flash_triton", raising=False)
    with pytest.raises(ConfigError, match=r"Python cannot import it; pip install triton, or choose another model\."):
        import_module("megatron_lite.model.flash_triton")


@pytest.mark.parametrize("bias", [(), (1, 4, 64)])
def test_the_kernels_compile_for_an_h100(tmp_path, bias):
    """The interpreter accepts Python that the compiler does not. More shared memory would not fit on smaller GPUs."""
    case = Case(length=64, head_size=128, heads=4, groups=2, dtype=torch.bfloat16, layout="fused")
    kernels = compiled(replace(case, bias=bias, dropout=0.1 if bias else 0.0, tiles=None), tmp_path)
    assert sorted(kernels) == ["_dbias"] * bool(bias) + ["_dk_dv", "_dq", "_forward"]
    for shared, ptx in kernels.values():
        assert 0 < shared <= 99 * 1024
        assert "wgmma.mma_async" in ptx  # the products run on tensor cores
