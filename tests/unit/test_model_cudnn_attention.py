"""cuDNN's attention: the right operations with the right arguments, and other kernels where cuDNN fails.

torch has no cuDNN on a CPU. Here torch's kernel of the CPU takes the place of the two operations.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from megatron_lite.model import core_attention, cudnn_attention
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.recompute import recompute
from tests.helpers.masks import attention_inputs

NO_PLAN = "cuDNN Frontend error: No valid execution plans built.\nmore"


def of_torch(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.25)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that claims to be on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


@pytest.fixture
def cudnn(monkeypatch):
    """The calls of both operations so far, and the error that each raises, if any."""
    state = {"forward": 0, "backward": 0, "forward_error": None, "backward_error": None}

    def forward(query, key, value, bias, with_lse, dropout, causal, debug, *, scale):
        state["forward"] += 1
        if state["forward_error"] is not None:
            raise state["forward_error"]
        assert (bias, causal, debug) == (None, True, False)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(query, key, value, 0.0, causal, scale=scale)
        seed = torch.zeros((), dtype=torch.int64)
        return out, lse, None, None, query.shape[2], key.shape[2], seed, seed + 1, None

    def backward(grad, query, key, value, out, lse, seed, offset, bias, *rest, scale):
        state["backward"] += 1
        if state["backward_error"] is not None:
            raise state["backward_error"]
        assert (bias, int(seed), int(offset)) == (None, 0, 1)
        assert rest == (None, None, query.shape[2], key.shape[2], 0.0, True)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(grad, query, key, value, out, lse, 0.0, True, scale=scale)

    names = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
    monkeypatch.setattr(cudnn_attention, "ops", SimpleNamespace(**dict(zip(names, (forward, backward), strict=True))))
    monkeypatch.setattr(cudnn_attention, "_has_failed", False)
    monkeypatch.setattr(cudnn_attention, "can_use_cudnn_attention", lambda params: True)
    return state


def attend():
    """Output and gradients, and those of torch's own call."""
    *leaves, grad = attention_inputs(2, 24, 4, 16, seed=0, dtype=torch.bfloat16)
    out = cudnn_attention.attention(*leaves, causal=True, scale=0.25, otherwise=of_torch)
    got = out, *torch.autograd.grad(out, leaves, grad)
    want = of_torch(*leaves)
    return got, (want, *torch.autograd.grad(want, leaves, grad))


def test_output_and_gradients_are_those_of_torchs_call(cudnn):
    got, want = attend()
    assert_close(got, want, rtol=0, atol=0)
    assert (cudnn["forward"], cudnn["backward"]) == (1, 1)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_kernel_takes_over_where_cudnn_fails_and_the_run_says_so_once(cudnn, capsys, where):
    """Before, such an error ended the run, in backward possibly after hours, at the first batch of another length."""
    cudnn[f"{where}_error"] = RuntimeError(NO_PLAN)
    for _ in range(2):
        got, want = attend()
        assert_close(got, want, rtol=0, atol=0)
    line = f"attention: cuDNN failed in {where} (cuDNN Frontend error: No valid execution plans built.);"
    assert capsys.readouterr().out == f"{line} torch's other kernels compute it from now on\n"
    assert cudnn[where] == 1  # it is not asked again


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("cuDNN needs 2 GiB"), RuntimeError("illegal memory access")])
def test_other_errors_are_not_hidden(cudnn, where, error):
    cudnn[f"{where}_error"] = error
    with pytest.raises(type(error), match=str(error)):
        attend()
    assert not cudnn_attention._has_failed


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_layers_recompute_although_cudnn_has_failed_since_their_forward(cudnn, where):
    """A checkpoint compares the tensors that a layer saves with those of its first forward."""

    def layer(x):
        query, key, value = x.split(16, dim=-1)
        out = cudnn_attention.attention(query, key, value, causal=True, scale=0.25, otherwise=of_torch)
        return torch.cat([out, key, value], dim=-1)

    *inputs, _ = attention_inputs(2, 24, 4, 16, seed=0, dtype=torch.bfloat16)
    x, rng = (
        torch.cat(inputs, dim=-1).detach().requires_grad_(),
        RngTracker(torch.device("cpu"), default_seed=1, tensor_parallel_seed=2),
    )
    y = layer(layer(layer(x)))
    want = torch.autograd.grad(y.sum(), x)
    y = recompute(layer, recompute(layer, x, rng=rng), rng=rng)
    cudnn[f"{where}_error"] = RuntimeError(NO_PLAN)  # in forward: of the third layer
    y = recompute(layer, y, rng=rng)
    assert_close(torch.autograd.grad(y.sum(), x), want, rtol=0, atol=0)


def test_the_graph_of_attention_does_not_keep_inputs_that_are_recomputed(monkeypatch):
    """With recomputation their memory would be kept, three hidden states of a layer, although nothing saves them."""
    kept = []
    monkeypatch.setattr(cudnn_attention, "attention", lambda *_, otherwise, **__: kept.append(otherwise))
    query = torch.zeros(2, 2, 8, 16).as_subclass(OnGpu)
    core_attention._sdpa(query, query, query, scale=0.25, dropout=0.0, is_causal=True)
    alive = weakref.ref(query)
    del query
    assert kept and alive() is None


def test_cudnn_is_asked_for_16_bits_without_determinism_alone(cudnn):
    def asked(dtype):
        query = torch.zeros(1, 1, 8, 16, dtype=dtype)
        return cudnn_attention.can_compute(query, query, query, causal=True)

    assert asked(torch.bfloat16) and asked(torch.float16) and not asked(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert not asked(torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("on", "changes", "calls"),
    [
        (OnGpu, {}, 1),
        (OnGpu, {"shape_varies": True}, 0),  # cuDNN makes a plan for each new shape, in 0.1 s
        (OnGpu, {"attn_mask": torch.ones(8, 8, dtype=torch.bool), "is_causal": False}, 0),
        (OnGpu, {"dropout": 0.1}, 0),  # no other kernel could repeat it in backward
        (torch.Tensor, {}, 0),
    ],
    ids=str,
)
def test_sdpa_asks_cudnn_for_attention_without_a_mask_on_a_gpu_alone(cudnn, monkeypatch, on, changes, calls):
    """torch's rules would ask the driver, which a plan for a GPU on another machine has not."""
    asked = []
    monkeypatch.setattr(cudnn_attention, "can_compute", lambda *_, **__: bool(asked.append(1)))
    monkeypatch.setattr(core_attention, "with_fused_kernel", lambda call, backends: call())
    query = torch.zeros(2, 2, 8, 16, device="cpu" if on is OnGpu else "meta").as_subclass(on)
    core_attention._sdpa(query, query, query, **{"scale": 0.25, "dropout": 0.0, "is_causal": True, **changes})
    assert len(asked) == calls
