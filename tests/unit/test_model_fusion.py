"""Compiled elementwise chains equal eager ones; activations follow their formulas."""

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.model.fusion import ACTIVATIONS, bias_activation, bias_dropout_add, compiled, fusion_kind


def formula(activation, x):
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    if activation == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    if activation == "quick_gelu":
        return x / (1 + torch.exp(-1.702 * x))
    if activation == "relu":
        return x * (x > 0)
    gate, up = x.chunk(2, dim=-1)
    if activation == "geglu":
        return formula("gelu_tanh", gate) * up
    return gate / (1 + torch.exp(-gate)) * up


def with_gradients(function, x, *args, **kwargs):
    tensors = [t for t in (x, *args) if isinstance(t, torch.Tensor)]
    for tensor in tensors:
        tensor.grad = None
    y = function(x, *args, **kwargs)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), *(tensor.grad.clone() for tensor in tensors)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_sum_with_bias_follows_its_formula(activation):
    x, bias = torch.randn(6, 2, 16, dtype=torch.float64) * 3, torch.randn(16, dtype=torch.float64)
    assert_close(bias_activation(x, bias, activation), formula(activation, x + bias), rtol=0, atol=1e-14)
    assert torch.equal(bias_activation(x + bias, None, activation), bias_activation(x, bias, activation))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_a_gated_activation_keeps_its_input_alone_and_has_autograds_gradient(activation, dtype):
    """Autograd would keep the activated gate too, which is a quarter of the memory of an MLP. The function
    rounds where autograd rounds, so the gradients have the same bits."""
    x = (torch.randn(6, 2, 16) * 3).to(dtype).requires_grad_()

    def by_autograd(x):
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS["gelu_tanh"](gate) * up if activation == "geglu" else torch.nn.functional.silu(gate) * up

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = ACTIVATIONS[activation](x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    assert torch.equal(y, by_autograd(x))
    assert_close(with_gradients(ACTIVATIONS[activation], x), with_gradients(by_autograd, x), rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu", "geglu"])
def test_compiled_activation_equals_eager(activation):
    """1e-6: compiled code may use a fused multiply-add and uses another tanh."""
    x, bias = torch.randn(6, 2, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    eager = with_gradients(bias_activation, x, bias, activation)
    assert_close(with_gradients(compiled(bias_activation), x, bias, activation), eager, rtol=1e-6, atol=1e-6)


def test_compiled_add_drops_the_same_units_as_eager():
    """Otherwise fused and eager runs of one seed would differ."""
    tensors = [torch.randn(6, 2, 16, requires_grad=True), torch.randn(16, requires_grad=True)]
    residual = torch.randn(6, 2, 16, requires_grad=True)
    both = []
    for function in (bias_dropout_add, compiled(bias_dropout_add)):
        torch.manual_seed(3)
        both.append(with_gradients(function, *tensors, residual, dropout=0.4))
    assert_close(both[1], both[0], rtol=1e-6, atol=1e-6)
    assert (both[0][1] == 0).any()


def test_add_keeps_the_wider_dtype_and_adds_the_bias_once():
    x, bias, residual = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 3)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.0), torch.full((2, 3), 3.0))
    assert torch.equal(bias_dropout_add(x, None, residual, 0.0), torch.full((2, 3), 2.0))


def test_auto_is_triton_on_cuda_only(monkeypatch):
    monkeypatch.setattr("megatron_lite.model.fusion.find_spec", lambda name: object())
    cpu, cuda, settings = torch.device("cpu"), torch.device("cuda", 0), ("auto", "on", "off")
    assert [fusion_kind(setting, cpu, torch.float32) for setting in settings] == ["off", "compiled", "off"]
    assert [fusion_kind(setting, cuda, torch.bfloat16) for setting in settings] == ["triton", "triton", "off"]
    assert fusion_kind("on", cuda, torch.float64) == "off"  # the kernels compute in fp32


def test_auto_is_eager_on_a_gpu_without_triton(monkeypatch):
    """`on` is then an error when the first kernel starts."""
    monkeypatch.setattr("megatron_lite.model.fusion.find_spec", lambda name: None)
    kinds = [fusion_kind(setting, torch.device("cuda", 0), torch.bfloat16) for setting in ("auto", "on")]
    assert kinds == ["off", "triton"]
