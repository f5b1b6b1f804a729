"""cuDNN's attention: the right operations with the right arguments, and other kernels where cuDNN fails.

torch has no cuDNN on a CPU. Here torch's kernel of the CPU takes the place of the two operations.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from megatron_lite.errors import TrainingError
from megatron_lite.model import cudnn_attention
from megatron_lite.model.core_attention import sdpa_attention
from megatron_lite.model.masks import CAUSAL, Mask
from tests.helpers.masks import attention_inputs

NO_PLAN = "cuDNN Frontend error: No valid execution plans built.\nmore"
OPTIONS = {"scale": 0.25, "dropout": 0.0, "softcap": 0.0}


def of_torch(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.25)


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


def attend(dropout=0.0):
    """Output and gradients, and those of torch's own call; here torch's call computes no dropout."""
    *leaves, grad = attention_inputs(2, 24, 4, 16, seed=0, dtype=torch.bfloat16)
    options = {"dropout": dropout, "causal": True, "scale": 0.25}
    out = cudnn_attention.attention(*leaves, **options, otherwise=of_torch)
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
    line = f" > attention: cuDNN failed in {where} (cuDNN Frontend error: No valid execution plans built.);"
    assert capsys.readouterr().out == f"{line} torch's other kernels compute it from now on\n"
    query = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)
    assert not cudnn_attention.can_compute(query, query, query, dropout=0.0, causal=True)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("cuDNN needs 2 GiB"), RuntimeError("illegal memory access")])
def test_other_errors_are_not_hidden(cudnn, where, error):
    cudnn[f"{where}_error"] = error
    with pytest.raises(type(error), match=str(error)):
        attend()
    assert not cudnn_attention._has_failed


def test_a_failed_backward_with_dropout_is_an_error_with_advice(cudnn):
    """Another kernel would drop other scores, so its gradient would not be that of the loss."""
    cudnn["backward_error"] = RuntimeError(NO_PLAN)
    with pytest.raises(TrainingError, match=r"no other kernel can repeat its dropout; set model\.attention_dropout: 0"):
        attend(dropout=0.1)


def test_cudnn_is_asked_for_16_bits_without_determinism_alone(cudnn):
    def asked(dtype):
        query = torch.zeros(1, 1, 8, 16, dtype=dtype)
        return cudnn_attention.can_compute(query, query, query, dropout=0.0, causal=True)

    assert asked(torch.bfloat16) and asked(torch.float16) and not asked(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert not asked(torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("mask", "calls"), [(CAUSAL, 1), (Mask(causal=False, lengths=torch.tensor([3, 5])), 0)])
def test_sdpa_calls_cudnn_without_a_mask_of_its_own(cudnn, monkeypatch, mask, calls):
    """cuDNN makes a plan for each new shape, which takes 0.1 s; documents of all lengths would never end that."""
    asked = []
    monkeypatch.setattr(cudnn_attention, "can_compute", lambda *_, **__: bool(asked.append(1)))
    query = torch.zeros(2, 2, 8, 16, dtype=torch.float32, device="meta" if mask is CAUSAL else "cpu")
    monkeypatch.setattr("megatron_lite.model.core_attention.with_fused_kernel", lambda call, backends: call())
    sdpa_attention(query, query, query, mask=mask, **OPTIONS)
    assert len(asked) == calls
