"""The code for CUDA on fake CUDA tensors: a step of training in every configuration, without a GPU."""

import pytest
import torch

from tests.helpers import fake_cuda
from tests.helpers.fake_cuda import CASES

needs_cuda = pytest.mark.skipif(not fake_cuda.is_possible(), reason="needs a CUDA build of torch")
# `tiled` is for the CPU: on a GPU its loops read the ranges of keys in each call.
OWN_READS = {"tiled attention": "model/flash_tiled.py"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return fake_cuda.in_a_new_process(tmp_path_factory.mktemp("fake_cuda"))


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_a_step_computes_on_the_gpu_and_waits_for_it_once(reports, name):
    """A CPU tensor among CUDA tensors raises on a GPU. A second read of the host is a second time in which the GPU
    waits for the optimizer's launches: the loss and the gradient norm are read together."""
    report = reports[name]
    assert not report.error, report.error
    assert not report.mixed
    reads = [line for line in report.reads if not line.startswith(OWN_READS.get(name, "none"))]
    assert len(reads) == 1, report.reads
    assert reads[0].startswith("training/step.py")


@needs_cuda
def test_configurations_run_the_code_that_they_are_for(reports):
    """A configuration that fell back to other code would check nothing."""
    attention = {"_forward", "_dk_dv", "_dq"}
    assert {name for name in CASES if attention & set(reports[name].kernels)} == {"triton attention"}
    assert attention <= set(reports["triton attention"].kernels)
    assert {name for name in CASES if reports[name].copies_to_host} == {"offloaded activations"}
    eager = {"no fusion", *(f"{model} fp64" for model in ("gpt", "llama", "codegeex"))}
    assert {name for name in CASES if not reports[name].kernels} == eager
    assert set(reports["gpt bf16"].kernels) == {
        *("add_norm_forward", "add_norm_backward", "total_of_rows", "activation_forward", "activation_backward"),
        *("join_heads", "max_and_sum_of_exp", "softmax_gradient"),
    }


@needs_cuda
def test_planted_errors_are_found(reports):
    found = reports["mask on the CPU"].mixed
    assert found
    assert all(" in model/core_attention.py:" in line for line in found)
    assert "the kernel rotate_heads got a tensor" in reports["angles on the CPU"].error
    assert "got a gradient on cpu" in reports["gradients on the CPU"].error
    assert len(reports["read of the targets"].reads) == 2


class OneOfTwo(torch.autograd.Function):
    """Two outputs, of which a model uses one; the gradient of the other is zeros."""

    @staticmethod
    def forward(ctx, x, factor, weight):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight * factor, x + 1

    @staticmethod
    def backward(ctx, grad, other):
        x, weight = ctx.saved_tensors
        return grad * weight * ctx.factor + other, None, (grad * x * ctx.factor).sum(0)


def test_backward_without_the_engine_equals_torchs():
    """It is the backward of the fake GPU. Bitwise: it adds gradients in the order of torch's engine."""

    def grads_by(backward):
        torch.manual_seed(0)
        linear, norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
        weight, x = torch.nn.Parameter(torch.randn(8)), torch.randn(5, 8)
        hooked = []
        weight.register_post_accumulate_grad_hook(lambda leaf: hooked.append(leaf.grad.clone()))

        y, _ = OneOfTwo.apply(norm(linear(x)), 3.0, weight)
        y = linear(y.relu()) + y * weight  # weights are used twice
        backward(torch.autograd.graph.get_gradient_edge(y), torch.randn(5, 8))
        return [*hooked, *(p.grad for p in (weight, *linear.parameters(), *norm.parameters()))]

    for want, got in zip(grads_by(torch.autograd.backward), grads_by(fake_cuda.backward), strict=True):
        assert torch.equal(want, got)
