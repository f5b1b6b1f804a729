"""Products by oneDNN, where this machine's torch has it."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.parallel import fp32_products
from megatron_lite.parallel.context import solo
from megatron_lite.parallel.linear import ColumnParallelLinear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """The shapes of weights whose products oneDNN computed, on any CPU."""
    found, linear = [], fp32_products.linear

    def counted(x, weight, bias):
        found.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(fp32_products, "linear", counted)
    monkeypatch.setattr(fp32_products, "onednn_is_faster", lambda: True)
    return found


@pytest.mark.parametrize(
    ("vendor", "capability", "wanted"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_onednn_is_for_amd_with_avx512(monkeypatch, vendor, capability, wanted):
    """On other CPUs MKL may be faster."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: f"vendor_id\t: {vendor}\n")
    assert fp32_products.onednn_is_faster.__wrapped__() is wanted


def test_without_a_list_of_cpus_torch_multiplies(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert not fp32_products.onednn_is_faster.__wrapped__()


def layer_and_input(tokens):
    layer = ColumnParallelLinear(
        256, 512, tp=solo(), bias=True, init_std=0.02, dtype=torch.float32, device=torch.device("cpu")
    )
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    layer.weight.add_grad = lambda write, returned: returned  # as of a data-parallel engine
    return layer, torch.randn(tokens, 2, 256, requires_grad=True)


def test_outputs_and_input_gradients_equal_those_of_torch(calls):
    """4e-6 of the largest value: the order of sums of 512 products."""
    layer, x = layer_and_input(64)
    y = layer(x)[0]
    grad = torch.randn_like(y)
    y.backward(grad)
    assert calls == [(512, 256), (256, 512)]
    for got, want in ((y, x @ layer.weight.t() + layer.bias), (x.grad, grad @ layer.weight)):
        assert_close(got, want, rtol=0, atol=4e-6 * float(want.detach().abs().max()))


def test_small_products_and_other_dtypes_are_left_to_torch(calls):
    layer, x = layer_and_input(8)
    layer(x)
    assert calls == []
    wide = torch.randn(512, 256, dtype=torch.bfloat16)
    assert not fp32_products.can_compute(wide, wide)
    assert fp32_products.can_compute(wide.float(), wide.float())
