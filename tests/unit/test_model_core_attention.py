"""Every implementation of core attention that computes on this device against a loop over queries and the reference."""

import subprocess
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention as eager_flex
from torch.testing import assert_close

from megatron_lite.errors import ConfigError
from megatron_lite.model import core_attention
from megatron_lite.model.core_attention import (
    IMPLEMENTATIONS,
    _activate_flash,
    call_flash,
    call_flex,
    flash_attention,
    flex_attention,
    gpu_backends,
    math_attention,
    sdpa_attention,
    tiled_attention,
    triton_attention,
    with_fused_kernel,
)
from megatron_lite.model.masks import CAUSAL, Mask
from tests.helpers.masks import attention_inputs, loop_attention, make_mask, masks_and_sizes

QUIET = {"dropout": 0.0, "softcap": 0.0}
EXACT = {torch.float64: {"rtol": 0, "atol": 1e-10}, torch.float32: {"rtol": 0, "atol": 1e-5}}


def inputs(dtype=torch.float64, groups=2):
    return attention_inputs(3, 9, groups, 8, seed=0, dtype=dtype)[:3]


def with_gradients(attend, leaves, grad, **options):
    """Output, log-sum-exp and the gradients of query, key and value."""
    out, lse = attend(*leaves, **options)
    return out, lse, *torch.autograd.grad(out, leaves, grad)


@given(masks_and_sizes(max_length=12), st.sampled_from([0.0, 2.0]))
@settings(max_examples=40, deadline=None)
def test_the_reference_equals_a_loop_over_rows_heads_and_queries(sizes, softcap):
    """All other implementations are compared with the reference."""
    mask = make_mask(
        sizes["kinds"], batch=sizes["batch"], length=sizes["length"], seed=sizes["seed"], window=sizes["window"]
    )
    names = ("batch", "length", "groups", "head_size", "seed")
    *leaves, grad = attention_inputs(**{name: sizes[name] for name in names}, dtype=torch.float64)
    options = {"mask": mask, "scale": 0.3, "softcap": softcap}
    want = with_gradients(loop_attention, leaves, grad, **options) if mask.lengths is None else None
    got = with_gradients(math_attention, leaves, grad, dropout=0.0, **options)
    if want is None:  # a row without keys has no graph in the loop
        assert_close(got[:2], loop_attention(*leaves, **options), rtol=0, atol=1e-12)
        assert all(gradient.isfinite().all() for gradient in got[2:])
    else:
        assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", ["sdpa", "tiled"])
@given(sizes=masks_and_sizes(), softcap=st.sampled_from([0.0, 2.0]))
@settings(max_examples=60, deadline=None)
def test_an_implementation_equals_the_reference(name, dtype, sizes, softcap):
    """Output, log-sum-exp and all gradients, for masks, ragged lengths, groups and head sizes."""
    mask = make_mask(
        sizes["kinds"], batch=sizes["batch"], length=sizes["length"], seed=sizes["seed"], window=sizes["window"]
    )
    names = ("batch", "length", "groups", "head_size", "seed")
    *leaves, grad = attention_inputs(**{name: sizes[name] for name in names}, dtype=dtype)
    options = {"mask": mask, "scale": 0.3, "dropout": 0.0, "softcap": softcap if name == "tiled" else 0.0}
    out, lse, *gradients = with_gradients(IMPLEMENTATIONS[name], leaves, grad, **options)
    want_out, want_lse, *want_gradients = with_gradients(math_attention, leaves, grad, **options)
    assert_close([out, *gradients], [want_out, *want_gradients], **EXACT[dtype])
    assert (lse is None) == (name == "sdpa")
    if lse is not None:
        assert_close(lse, want_lse, **EXACT[dtype])


@pytest.mark.parametrize(
    ("kinds", "softcap"),
    [
        pytest.param(("causal",), 0.0, marks=pytest.mark.soak),  # each mask is compiled anew
        (("causal", "window", "documents"), 2.0),
        (("documents", "lengths"), 0.0),
        pytest.param((), 0.0, marks=pytest.mark.soak),
    ],
)
def test_flex_attention_equals_the_reference(kinds, softcap):
    """On the CPU torch compiles its forward only. 150 tokens are two blocks of 128, one of them ragged."""
    mask = make_mask(kinds, batch=2, length=150, window=40)
    query, key, value, _ = attention_inputs(2, 150, 2, 16, seed=0, dtype=torch.float32)
    with torch.no_grad():
        options = {"mask": mask, "scale": 0.25, "dropout": 0.0, "softcap": softcap}
        out, lse = flex_attention(query, key, value, **options)
        assert_close(out, math_attention(query, key, value, **options)[0], rtol=0, atol=1e-5)
    assert lse is None


@pytest.mark.parametrize("name", ["sdpa", "tiled"])
@pytest.mark.parametrize("kinds", [("causal",), ("causal", "documents"), ("lengths",)])
def test_no_tensor_of_all_scores_is_allocated(name, kinds):
    """1,100 tokens: above 1,024, only the reference may allocate s x s values."""
    length = 1100
    mask = make_mask(kinds, batch=1, length=length)
    *leaves, grad = attention_inputs(1, length, 1, 16, seed=0, dtype=torch.float32, heads=1)
    with LargestTensor() as seen:
        with_gradients(IMPLEMENTATIONS[name], leaves, grad, mask=mask, scale=0.25, **QUIET)
    assert length < seen.largest < length**2 / 4
    with LargestTensor() as seen:
        with_gradients(math_attention, leaves, grad, mask=mask, scale=0.25, **QUIET)
    assert seen.largest >= length**2


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return result


def test_the_reference_computes_its_softmax_in_fp32():
    """bf16 scores near 300 are multiples of 2, so probabilities would be off by factors."""
    query, key, value = (x.detach() for x in inputs(torch.bfloat16, groups=4))
    key = key + 37 * query.sign()
    options = {"mask": CAUSAL, "scale": 8**-0.5, **QUIET}
    want, _ = math_attention(query.float(), key.float(), value.float(), **options)
    got, lse = math_attention(query, key, value, **options)
    assert_close(got.float(), want, rtol=0, atol=0.35)
    assert got.dtype == torch.bfloat16 and lse.dtype == torch.float32


@pytest.mark.parametrize("length", [9, 513])
@pytest.mark.parametrize("attend", [sdpa_attention, tiled_attention])
@pytest.mark.parametrize(("dtype", "roundings"), [(torch.bfloat16, 3), (torch.float16, 3), (torch.float32, 32)])
def test_every_dtype_and_length_gives_the_exact_result_rounded(attend, dtype, roundings, length):
    """bf16 has separate code on some CPUs. 16-bit kernels round scores, probabilities and results but sum
    in fp32. In fp32, sums of up to 513 values round by about the square root of their number."""
    query, key, value = (torch.randn(2, 4, length, 8, generator=torch.manual_seed(i)).to(dtype) for i in range(3))
    leaves, exact = ([x.to(kind).requires_grad_() for x in (query, key, value)] for kind in (dtype, torch.float64))
    options = {"mask": CAUSAL, "scale": 8**-0.5, **QUIET}
    weight = torch.randn(query.shape, generator=torch.manual_seed(3)).to(dtype)
    got, _, *got_grads = with_gradients(attend, leaves, weight, **options)
    want, _, *want_grads = with_gradients(math_attention, exact, weight.double(), **options)
    eps = torch.finfo(dtype).eps
    for ours, reference in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert_close(ours.double(), reference, rtol=0, atol=roundings * eps * reference.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", [sdpa_attention, math_attention, tiled_attention])
def test_dropout_keeps_the_mean_of_the_output(attend, dtype):
    """With values of 1, the output is 1 without dropout and 1 on average with it. Bounds are five standard errors."""
    query = key = torch.zeros(8, 4, 64, 8, dtype=dtype)
    torch.manual_seed(0)
    out, _ = attend(query, key, torch.ones_like(query), mask=CAUSAL, scale=1.0, dropout=0.25, softcap=0.0)
    out = out[..., 0].float()
    count = torch.arange(1, 65)
    deviation = (1 / 3 / count).sqrt()  # of a mean of `count` values that are 4/3, or 0 with probability 1/4
    assert ((out - 1).mean((0, 1)).abs() < 5 * deviation / 32**0.5).all()
    assert (out[:, :, 1:].var((0, 1)) > 0).all()


LONG = {"query": torch.zeros(1, 1, 1025, 8), "key": torch.zeros(1, 1, 1025, 8), "value": torch.zeros(1, 1, 1025, 8)}
SHORT = {name: x[:, :, :8] for name, x in LONG.items()}


def call(attend, tensors, **changes):
    return attend(**tensors, **{"mask": CAUSAL, "scale": 1.0, **QUIET, **changes})


@pytest.mark.parametrize(
    ("attend", "tensors", "changes", "message"),
    [
        (sdpa_attention, LONG, {"mask": Mask(window=5)}, "is sdpa: a window needs a mask of s x s elements, which is "
         "made up to 1,024 tokens; got 1,025; use math or tiled"),
        (sdpa_attention, LONG, {"dropout": 0.1}, "is sdpa: with dropout torch's CPU kernel stores all scores, which is "
         "allowed up to 1,024 tokens; got 1,025; use math or tiled"),
        (sdpa_attention, SHORT, {"softcap": 1.0}, "is sdpa: torch's kernels have no softcap; use math or tiled or"),
        (flex_attention, SHORT, {"dropout": 0.1}, "is flex: flex_attention has no dropout, and it is 0.1; use math"),
        (flash_attention, SHORT, {}, r"Python cannot import flash_attn \(pip install flash-attn\) or flash_attn_inter"),
        (flash_attention, SHORT, {}, "it needs a GPU; FlashAttention computes in bf16 or fp16, not in fp32; use math"),
        (triton_attention, SHORT, {}, "need a head size of 16 to 256; it is 8; it needs a GPU"),
    ],
)  # fmt: skip
def test_a_call_that_an_implementation_cannot_compute_names_the_others(monkeypatch, attend, tensors, changes, message):
    """A silent slow path or a wrong mask would be worse than an error."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=message):
        call(attend, tensors, **changes)


def test_flex_attention_refuses_a_backward_on_the_cpu():
    """The message of torch, a NotImplementedError, names no other implementation."""
    *leaves, _ = attention_inputs(1, 8, 1, 8, seed=0, dtype=torch.float32)
    with pytest.raises(ConfigError, match="on a CPU flex_attention has no backward; use math or tiled"):
        flex_attention(*leaves, mask=CAUSAL, scale=1.0, **QUIET)


def test_a_missing_fused_kernel_is_an_error_with_torchs_reason():
    """On a GPU, torch would silently fall back to storing all scores. The CPU has no memory-efficient kernel either."""
    query = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ConfigError, match=r"torch has no fused kernel for it, .* all scores .*No viable backend"):
        with_fused_kernel(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query),
            [SDPBackend.EFFICIENT_ATTENTION],
        )
    with pytest.raises(RuntimeError, match="another"):
        with_fused_kernel(raise_another, [SDPBackend.MATH])


def raise_another():
    raise RuntimeError("another")


def test_the_backends_on_a_gpu_have_a_fixed_order_and_no_slow_path_for_long_sequences():
    """The order of torch depends on its version, and so would speed and the last bits."""
    names = [backend.name for backend in gpu_backends(torch.bfloat16, 1024)]
    assert names == ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    assert SDPBackend.MATH not in gpu_backends(torch.bfloat16, 1025)
    assert SDPBackend.MATH not in gpu_backends(torch.float32, 1025)
    assert SDPBackend.MATH in gpu_backends(torch.float64, 1025)  # torch has no other


def test_the_package_does_not_import_triton_for_other_implementations():
    """It is optional."""
    code = "import sys, megatron_lite.model.core_attention; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("dtype", "groups"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_keys_of_groups_are_repeated_on_a_gpu_where_no_fused_kernel_takes_groups(monkeypatch, dtype, groups):
    """Otherwise torch would store all scores, or 16-bit keys would take more memory than needed."""
    shapes = []
    monkeypatch.setattr(core_attention, "_sdpa", lambda query, key, value, **_: shapes.append((key.shape, value.shape)))
    with FakeTensorMode():
        query, key = (torch.empty(1, heads, 8, 16, dtype=dtype, device="cuda") for heads in (4, 2))
        sdpa_attention(query, key, key, mask=CAUSAL, scale=1.0, **QUIET)
    assert shapes == [((1, groups, 8, 16),) * 2]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("kinds", "softcap"),
    [(("causal",), 0.0), (("causal", "window", "documents"), 2.0), (("lengths", "documents"), 0.0), (("window",), 0.0)],
)
def test_flex_attention_returns_the_log_sum_exp_of_the_reference(kinds, softcap):
    """On a GPU, compiled flex_attention returns it; not compiled, it does so here too."""
    mask = make_mask(kinds, batch=2, length=150, window=40)
    *leaves, _ = attention_inputs(2, 150, 2, 16, seed=0, dtype=torch.float32)
    options = {"mask": mask, "scale": 0.25, "softcap": softcap}
    with torch.no_grad():
        got = call_flex(eager_flex, *leaves, with_lse=True, **options)
        assert_close(got, math_attention(*leaves, dropout=0.0, **options), rtol=0, atol=1e-5)


class FlashPackage(types.ModuleType):
    """The functions of flash-attn, with its meaning of each argument as documented, computed by a dense mask."""

    def flash_attn_func(
        self, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs
    ):
        places = torch.arange(q.shape[1])
        ids = torch.zeros_like(places)
        return self.result(
            q, k, v, places, ids, dropout_p, softmax_scale, causal, window_size, softcap, return_attn_probs
        )

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, deterministic, return_attn_probs,
    ):  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        ids = torch.arange(len(cu_seqlens_q) - 1).repeat_interleave(cu_seqlens_q.diff())
        places, tensors = torch.arange(len(ids)), (x[None] for x in (q, k, v))
        options = (dropout_p, softmax_scale, causal, window_size, softcap, return_attn_probs)
        result = self.result(*tensors, places, ids, *options)
        return (result[0][0], result[1][0], None) if return_attn_probs else result[0]

    def result(self, q, k, v, places, ids, dropout, scale, causal, window, softcap, probabilities):
        left, right = (float("inf") if side < 0 else side for side in window)
        distance = places[:, None] - places
        seen = (distance <= left) & (-distance <= (0 if causal else right)) & (ids[:, None] == ids)
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = math_attention(*heads, mask=Dense(seen), scale=scale, dropout=0.0, softcap=softcap)
        assert probabilities == (dropout == 0)
        return (out.transpose(1, 2), lse, None) if probabilities else out.transpose(1, 2)


class Dense(Mask):
    """A mask given as a tensor [s, s]."""

    def __init__(self, seen):
        super().__init__(causal=False)
        object.__setattr__(self, "seen", seen)

    def dense(self, num_queries, num_keys, device):
        return self.seen[None, None]


@pytest.fixture
def flash_package(monkeypatch):
    """flash-attn's functions in their place; it cannot be installed without a GPU."""
    package = FlashPackage("flash_attn.flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package)


@pytest.mark.parametrize(
    "kinds",
    [
        ("causal",),
        (),
        ("window",),
        ("causal", "window"),
        ("causal", "documents"),
        ("documents", "window"),
        ("documents",),
    ],
)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_arguments_for_flash_attn_mean_our_mask(flash_package, kinds, softcap):
    """Its window has the keys to the left and right without the query's own, and its documents are one sequence."""
    mask = make_mask(kinds, batch=2, length=20)
    *leaves, grad = attention_inputs(2, 20, 2, 8, seed=0, dtype=torch.float64)
    options = {"mask": mask, "scale": 0.3, "dropout": 0.0, "softcap": softcap}
    want = with_gradients(math_attention, leaves, grad, **options)
    assert_close(with_gradients(call_flash, leaves, grad, **options), want, rtol=0, atol=1e-12)
    out, lse = call_flash(*leaves, **{**options, "dropout": 0.5})
    assert_close(out, want[0], rtol=0, atol=1e-12)  # the functions here drop nothing
    assert lse is None  # the package would return all probabilities with it


def test_flash_attention_through_torch_needs_a_gpu_that_has_it(monkeypatch):
    """torch would run its own version instead."""
    _activate_flash.cache_clear()
    message = (
        "FlashAttention 3 needs a Hopper GPU and a torch that calls it; got compute capability 0.x and torch .*; inst"
    )
    with pytest.raises(ConfigError, match=message):
        _activate_flash(3)
